//! Tokenizers give back the text they encoded, are the same every time, and refuse the rest.

use std::sync::LazyLock;

use proptest::prelude::*;
use train::Error;
use train::data::Tokenizer;
use train::data::corpus::Document;

fn document(text: impl Into<String>) -> Document {
    Document {
        path: "book.txt".into(),
        text: text.into(),
    }
}

/// Text with enough different words, spaces and lengths that equal pair counts are common.
fn documents() -> Vec<Document> {
    let mut state = 1u64;
    let mut next = |n: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % n
    };
    (0..40)
        .map(|_| {
            let mut text = String::new();
            for _ in 0..1500 {
                for _ in 0..1 + next(6) {
                    text.push((b'a' + (next(26) * next(26) / 26) as u8) as char);
                }
                text += [" ", "\n", "  ", "\n\n    ", ", ", "é ", "(", ")\n"][next(8) as usize];
            }
            document(text)
        })
        .collect()
}

static BPE: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::train_bpe(&documents(), 600).unwrap());

fn json(tokenizer: &Tokenizer) -> String {
    let dir = tempfile::tempdir().unwrap();
    std::fs::read_to_string(tokenizer.save(dir.path()).unwrap()).unwrap()
}

fn message<T: std::fmt::Debug>(result: train::Result<T>) -> String {
    match result {
        Err(Error::Data(message)) => message,
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_text_survives_encoding_and_decoding(text in "(\\PC|[ \\t\\r\\n\u{a0}\u{2028}ab'0]){0,60}") {
        for tokenizer in [&Tokenizer::bytes(), &Tokenizer::chars([text.as_str()]), &*BPE] {
            let ids = tokenizer.encode(&text).unwrap();
            prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
            prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text.clone());
        }
    }
}

#[test]
fn saved_tokenizers_load_as_they_were() {
    let text = "zażółć\n\"\\ 字 \u{1F600} the end";
    for tokenizer in [Tokenizer::bytes(), Tokenizer::chars([text]), BPE.clone()] {
        let dir = tempfile::tempdir().unwrap();
        let path = tokenizer.save(dir.path()).unwrap();
        assert!(path.ends_with(tokenizer.file_name()));
        let loaded = Tokenizer::load(&path).unwrap();
        assert_eq!(loaded.vocab_size(), tokenizer.vocab_size());
        assert_eq!(
            loaded.encode(text).unwrap(),
            tokenizer.encode(text).unwrap()
        );
        assert_eq!(json(&loaded), json(&tokenizer));
    }
}

#[test]
fn training_gives_the_same_merges_on_any_number_of_threads() {
    let documents = &documents()[..15];
    let expected = json(&Tokenizer::train_bpe(documents, 600).unwrap());
    for threads in [1, 2, 5, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let again = pool.install(|| Tokenizer::train_bpe(documents, 600).unwrap());
        assert!(json(&again) == expected, "{threads} threads");
    }
}

#[test]
fn trained_bpe_has_the_size_asked_for_and_shortens_text() {
    assert_eq!(BPE.vocab_size(), 600);
    let text = &documents()[0].text;
    assert!(BPE.encode(text).unwrap().len() * 3 < text.len() * 2);
    // Too little text for that many tokens: the vocabulary is what there is.
    let small = Tokenizer::train_bpe(&[document("aaaa")], 600).unwrap();
    assert!((256..600).contains(&small.vocab_size()));
}

/// Documents are cut into pieces for the threads, which must not show in the tokens.
#[test]
fn pieces_of_a_long_document_encode_as_the_whole() {
    let text: String = documents()
        .iter()
        .map(|d| d.text.as_str())
        .collect::<String>()
        .repeat(2);
    assert!(text.len() > 1 << 19);
    for tokenizer in [
        &Tokenizer::bytes(),
        &Tokenizer::chars([text.as_str()]),
        &*BPE,
    ] {
        let whole = tokenizer.encode(&text).unwrap();
        let progress = std::sync::atomic::AtomicU64::new(0);
        let pieces = tokenizer
            .encode_documents(&[document(text.as_str())], |bytes| {
                progress.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
            })
            .unwrap();
        assert!(pieces == whole);
        assert_eq!(progress.into_inner() as usize, text.len());
    }
}

#[test]
fn a_character_outside_the_vocabulary_is_named_with_file_and_offset() {
    let tokenizer = Tokenizer::chars(["abc\n"]);
    assert!(message(tokenizer.encode("abéc")).contains("'é' (U+00E9) at byte 2"));
    let long = "abc\n".repeat(1 << 18) + "?";
    let found = message(tokenizer.encode_documents(&[document("a"), document(long)], |_| ()));
    assert!(
        found.contains("book.txt: character '?' (U+003F) at byte 1048576"),
        "{found}"
    );
}

#[test]
fn chars_are_numbered_in_code_point_order() {
    let tokenizer = Tokenizer::chars(["ba\u{10FFFF}", "é\nb"]);
    assert_eq!(tokenizer.vocab_size(), 5);
    assert_eq!(
        tokenizer.encode("\nabé\u{10FFFF}").unwrap(),
        [0, 1, 2, 3, 4]
    );
}

#[test]
fn decoding_refuses_unknown_ids_and_marks_broken_utf8() {
    assert!(message(Tokenizer::bytes().decode(&[65, 256])).contains("position 1"));
    assert!(BPE.decode(&[600]).is_err());
    assert!(Tokenizer::chars(["ab"]).decode(&[2]).is_err());
    assert_eq!(Tokenizer::bytes().decode(&[65, 0xC3]).unwrap(), "A\u{FFFD}");
}

#[test]
fn broken_tokenizer_files_are_refused_with_their_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let whole = json(&BPE);
    for text in [
        "",
        "{}",
        "[1]",
        "\u{0}",
        &whole[..whole.len() / 2],
        r#"{"chars":""}"#,
        r#"{"chars":"aba"}"#,
        r#"{"bytes":255}"#,
        r#"{"bytes":256,"chars":"a"}"#,
        r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null,"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#,
    ] {
        std::fs::write(&path, text).unwrap();
        let found = message(Tokenizer::load(&path));
        assert!(found.contains("t.json"), "{found}");
    }
}

/// Files made for inference cut each text; a corpus must not be.
#[test]
fn truncation_and_padding_of_a_tokenizer_json_are_not_applied() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let cut = json(&BPE)
        .replace(
            "\"truncation\": null",
            r#""truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}"#,
        )
        .replace(
            "\"padding\": null",
            r#""padding": {"strategy": {"Fixed": 900}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}"#,
        );
    assert!(cut.contains("max_length") && cut.contains("pad_id"));
    std::fs::write(&path, cut).unwrap();
    let text = "a text of more than four tokens, and then some";
    let ids = Tokenizer::load(&path).unwrap().encode(text).unwrap();
    assert_eq!(ids, BPE.encode(text).unwrap());
}

#[test]
fn a_tokenizer_json_with_random_merges_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let random = json(&BPE).replace("\"dropout\": null", "\"dropout\": 0.1");
    std::fs::write(&path, random).unwrap();
    assert!(message(Tokenizer::load(&path)).contains("dropout"));
}

/// crate tokenizers skips bytes that a model without unk_token lacks.
#[test]
fn a_byte_missing_from_a_tokenizer_json_is_an_error_and_not_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let byte_level =
        r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":true}"#;
    std::fs::write(
        &path,
        format!(
            r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":{byte_level},"post_processor":null,"decoder":{byte_level},"model":{{"type":"BPE","vocab":{{"a":0,"b":1,"Ġ":7}},"merges":[]}}}}"#
        ),
    )
    .unwrap();
    let tokenizer = Tokenizer::load(&path).unwrap();
    assert_eq!(tokenizer.vocab_size(), 8);
    assert_eq!(tokenizer.encode("ab a").unwrap(), [0, 1, 7, 0]);
    assert!(message(tokenizer.encode("ab ca")).contains("'c' (U+0063) at byte 3"));
}
