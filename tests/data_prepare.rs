//! From `[data]` to shards: sources, split, cache, samples.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use train::Error;
use train::data::corpus::Corpus;
use train::data::{DataConfig, Dataset, Sampler, Shard, ShardsConfig, Windows, prepare, shard};

/// A folder with a text of 1000 lines and a config that prepares it.
fn project() -> (TempDir, DataConfig) {
    let dir = tempfile::tempdir().unwrap();
    let text: String = (0..1000)
        .map(|i| format!("line {i}, ünder {}\n", i * i))
        .collect();
    fs::write(dir.path().join("book.txt"), text).unwrap();
    let config = DataConfig {
        text: vec![dir.path().join("book.txt").display().to_string()],
        tokenizer: "char".into(),
        dir: dir.path().join("cache"),
        ..DataConfig::default()
    };
    (dir, config)
}

fn tokens(shard: &Shard) -> Vec<u32> {
    let mut tokens = vec![0; shard.num_tokens()];
    shard.read(0, &mut tokens);
    tokens
}

fn text_of(dataset: &Dataset) -> String {
    let all = [tokens(&dataset.train), tokens(&dataset.val)].concat();
    dataset.tokenizer.as_ref().unwrap().decode(&all).unwrap()
}

fn folder_of(dataset: &Dataset) -> PathBuf {
    dataset.train.path().parent().unwrap().to_path_buf()
}

fn message<T: std::fmt::Debug>(result: train::Result<T>) -> String {
    match result {
        Err(Error::Data(message) | Error::Config(message)) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_tokenizer_keeps_the_whole_text_and_splits_by_fraction() {
    let (dir, config) = project();
    let text = fs::read_to_string(dir.path().join("book.txt")).unwrap();
    for (tokenizer, num_tokens) in [
        ("char", Some(text.chars().count())),
        ("byte", Some(text.len())),
        ("bpe:300", None),
    ] {
        let config = DataConfig {
            tokenizer: tokenizer.into(),
            ..config.clone()
        };
        let data = prepare(&config, false).unwrap();
        assert_eq!(text_of(&data), text);
        let total = data.train.num_tokens() + data.val.num_tokens();
        assert_eq!(total, num_tokens.unwrap_or(total));
        assert_eq!(data.train.num_tokens(), (total as f64 * 0.9) as usize);
        assert_eq!(data.meta.train_tokens, data.train.num_tokens());
        assert_eq!(data.meta.val_tokens, data.val.num_tokens());
        assert_eq!(data.meta.num_bytes, text.len() as u64);
        let (unigram, bigram) = (
            data.meta.unigram_nats.unwrap(),
            data.meta.bigram_nats.unwrap(),
        );
        assert!(0.0 < bigram && bigram < unigram && unigram < (data.vocab_size as f64).ln());
    }
}

#[test]
fn a_second_call_reuses_what_the_first_wrote() {
    let (_dir, config) = project();
    let first = prepare(&config, false).unwrap();
    let written = |d: &Dataset| fs::metadata(d.train.path()).unwrap().modified().unwrap();
    let before = written(&first);
    let second = prepare(&config, false).unwrap();
    assert_eq!(written(&second), before);
    assert_eq!(second.meta, first.meta);
    assert_eq!(text_of(&second), text_of(&first));
}

#[test]
fn other_text_tokenizer_or_split_is_other_data() {
    let (dir, config) = project();
    let mut folders = vec![folder_of(&prepare(&config, false).unwrap())];
    let changes = [
        DataConfig {
            tokenizer: "byte".into(),
            ..config.clone()
        },
        DataConfig {
            val_fraction: 0.2,
            ..config.clone()
        },
    ];
    for changed in &changes {
        folders.push(folder_of(&prepare(changed, false).unwrap()));
    }
    fs::write(dir.path().join("book.txt"), "another text\n".repeat(50)).unwrap();
    folders.push(folder_of(&prepare(&config, false).unwrap()));
    folders.sort();
    folders.dedup();
    assert_eq!(folders.len(), 4);
}

#[test]
fn a_damaged_or_half_written_cache_is_made_again() {
    let (_dir, config) = project();
    let good = prepare(&config, false).unwrap();
    let (folder, want) = (folder_of(&good), text_of(&good));
    let names = ["train.bin", "val.bin", "chars.json", "meta.json"];
    let damages: [fn(&Path); 4] = [
        |path| fs::remove_file(path).unwrap(),
        |path| fs::write(path, "").unwrap(),
        |path| {
            let bytes = fs::read(path).unwrap();
            fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
        },
        |path| {
            // The last token of a shard becomes another valid token; JSON loses its brace.
            let mut bytes = fs::read(path).unwrap();
            let at = bytes.len() - 2;
            bytes[at] ^= 1;
            fs::write(path, bytes).unwrap();
        },
    ];
    for name in names {
        for damage in damages {
            damage(&folder.join(name));
            let again = prepare(&config, false).unwrap();
            assert_eq!(text_of(&again), want, "{name}");
            assert_eq!(again.meta, good.meta, "{name}");
        }
    }
}

#[test]
fn left_overs_of_a_killed_process_are_swept_and_never_used() {
    let (_dir, config) = project();
    let good = prepare(&config, false).unwrap();
    let (folder, want) = (folder_of(&good), text_of(&good));
    let key = folder.file_name().unwrap().to_str().unwrap();
    let left_over = config.dir.join(format!(".{key}.tmp-1"));
    fs::rename(&folder, &left_over).unwrap();
    fs::remove_file(left_over.join("meta.json")).unwrap();
    fs::write(left_over.join("train.bin"), "half").unwrap();
    assert_eq!(text_of(&prepare(&config, false).unwrap()), want);
    assert!(!left_over.exists());
}

#[test]
fn many_at_once_make_one_folder_and_all_get_it() {
    let (_dir, config) = project();
    let config = DataConfig {
        tokenizer: "bpe:300".into(),
        ..config
    };
    let texts: Vec<String> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| text_of(&prepare(&config, false).unwrap())))
            .collect();
        workers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    assert!(texts.iter().all(|t| *t == texts[0]));
    let visible = fs::read_dir(&config.dir).unwrap().filter(|e| {
        !e.as_ref()
            .unwrap()
            .file_name()
            .as_encoded_bytes()
            .starts_with(b".")
    });
    assert_eq!(visible.count(), 1);
}

#[test]
fn a_tokenizer_file_counts_by_content() {
    let (dir, config) = project();
    let trained = prepare(
        &DataConfig {
            tokenizer: "bpe:300".into(),
            ..config.clone()
        },
        false,
    );
    let trained = trained.unwrap();
    let mut folders = Vec::new();
    for name in ["a.json", "b.json"] {
        let path = dir.path().join(name);
        fs::copy(folder_of(&trained).join("tokenizer.json"), &path).unwrap();
        let config = DataConfig {
            tokenizer: path.display().to_string(),
            ..config.clone()
        };
        let data = prepare(&config, false).unwrap();
        assert_eq!(tokens(&data.val), tokens(&trained.val));
        folders.push(folder_of(&data));
    }
    assert_eq!(folders[0], folders[1]);
    let missing = DataConfig {
        tokenizer: "none.json".into(),
        ..config
    };
    assert!(message(prepare(&missing, false)).contains("data.tokenizer"));
}

#[test]
fn crates_come_from_the_registry_folder_and_an_absent_one_says_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = home.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let registry = "registry/src/index.crates.io-0123";
    write(&format!("{registry}/alpha-1.0.0/src/lib.rs"), "lib");
    write(&format!("{registry}/alpha-1.0.0/src/a/b.rs"), "b");
    write(&format!("{registry}/alpha-1.0.0/build.rs"), "build");
    write(&format!("{registry}/alpha-1.0.0/README.md"), "no");
    write(&format!("{registry}/alpha-1.0.0/.cargo-ok"), "no");
    write(
        &format!("{registry}/alpha-1.0.1/src/lib.rs"),
        "other version",
    );
    write(&format!("{registry}/beta-0.1.0/lib.rs"), "beta");
    write("extra/note.md", "note");
    let cargo_home = home.path().display().to_string();
    let environment = |name: &str| (name == "CARGO_HOME").then(|| cargo_home.clone());
    let config = DataConfig {
        text: vec!["${CARGO_HOME}/extra".into()],
        crates: vec!["beta-0.1.0".into(), "alpha-1.0.0".into()],
        ..DataConfig::default()
    };
    let corpus = Corpus::read_with(&config, &environment).unwrap();
    let texts: Vec<&str> = corpus.documents.iter().map(|d| d.text.as_str()).collect();
    assert_eq!(texts, ["note", "beta", "build", "b", "lib"]);

    for (name, hint) in [("gamma-1.0.0", "cargo fetch"), ("../x", "name-version")] {
        let config = DataConfig {
            crates: vec![name.into()],
            ..config.clone()
        };
        let found = message(Corpus::read_with(&config, &environment));
        assert!(
            found.contains("data.crates") && found.contains(name),
            "{found}"
        );
        assert!(found.contains(hint), "{found}");
    }

    write(&format!("{registry}/beta-0.1.0/bad.rs"), "");
    fs::write(
        home.path().join(registry).join("beta-0.1.0/bad.rs"),
        b"ab\xffc",
    )
    .unwrap();
    let found = message(Corpus::read_with(&config, &environment));
    assert!(
        found.contains("bad.rs: invalid UTF-8 at byte 2 (0xff)"),
        "{found}"
    );
}

#[test]
fn sources_keep_their_order_and_the_hash_depends_on_bytes_only() {
    let read = |text: Vec<String>| {
        let config = DataConfig {
            text,
            ..DataConfig::default()
        };
        Corpus::read(&config)
    };
    let corpora: Vec<Corpus> = (0..2)
        .map(|i| {
            let dir = tempfile::tempdir().unwrap();
            let root = dir.path().join(format!("root{i}"));
            for (path, text) in [
                ("b/z.txt", "z"),
                ("b/a/y.md", "y"),
                ("b/.git/x.txt", "hidden"),
                ("b/skip.bin", "skipped"),
                ("g1.log", "g1"),
                ("g2.log", "g2"),
                ("a.txt", "a"),
            ] {
                fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
                fs::write(root.join(path), text).unwrap();
            }
            let entry = |p: &str| root.join(p).display().to_string();
            // b/z.txt comes a second time, and is not repeated.
            let entries = vec![entry("b"), entry("*.log"), entry("a.txt"), entry("b/z.txt")];
            let corpus = read(entries).unwrap();
            let swapped = read(vec![entry("a.txt"), entry("b"), entry("*.log")]).unwrap();
            assert_ne!(swapped.hash, corpus.hash);
            corpus
        })
        .collect();
    let texts: Vec<&str> = corpora[0]
        .documents
        .iter()
        .map(|d| d.text.as_str())
        .collect();
    assert_eq!(texts, ["y", "z", "g1", "g2", "a"]);
    assert_eq!(corpora[0].hash, corpora[1].hash);
    assert_ne!(corpora[0].documents[0].path, corpora[1].documents[0].path);
}

#[test]
fn text_that_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().display().to_string();
    fs::create_dir(dir.path().join("folder")).unwrap();
    fs::write(dir.path().join("folder/x.png"), "x").unwrap();
    fs::write(dir.path().join("empty.txt"), "").unwrap();
    for (entry, hint) in [
        (format!("{root}/none.txt"), "no such file"),
        (format!("{root}/*.none"), "matches no file"),
        (format!("{root}/folder"), "data.extensions"),
        (format!("{root}/[.txt"), "not a glob"),
        ("${TRAIN_TEST_UNSET}/x".into(), "TRAIN_TEST_UNSET"),
        (format!("{root}/empty.txt"), "corpus is empty"),
    ] {
        let config = DataConfig {
            text: vec![entry.clone()],
            ..DataConfig::default()
        };
        let found = message(Corpus::read(&config));
        assert!(
            found.contains("data.text") && found.contains(hint),
            "{entry}: {found}"
        );
    }
}

#[test]
fn too_little_text_for_the_split_is_an_error() {
    let (dir, config) = project();
    fs::write(dir.path().join("book.txt"), "a").unwrap();
    assert!(message(prepare(&config, false)).contains("data.val_fraction"));
}

#[test]
fn token_files_are_used_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let shards = ShardsConfig {
        train: dir.path().join("train.bin"),
        val: dir.path().join("val.bin"),
        vocab_size: 10,
    };
    shard::write(&shards.train, &[1, 2, 9], 10).unwrap();
    fs::write(&shards.val, [3, 0, 4, 0]).unwrap(); // nanoGPT's
    let config = |shards: ShardsConfig| DataConfig {
        shards: Some(shards),
        dir: dir.path().join("cache"),
        ..DataConfig::default()
    };
    let data = prepare(&config(shards.clone()), false).unwrap();
    assert_eq!(tokens(&data.train), [1, 2, 9]);
    assert_eq!(tokens(&data.val), [3, 4]);
    assert!(data.tokenizer.is_none() && !dir.path().join("cache").exists());

    let small = ShardsConfig {
        vocab_size: 9,
        ..shards.clone()
    };
    assert!(message(prepare(&config(small), false)).contains("token 9 at byte 1028"));
    let missing = ShardsConfig {
        val: dir.path().join("none.bin"),
        ..shards.clone()
    };
    assert!(message(prepare(&config(missing), false)).contains("data.shards.val"));
    let narrow = DataConfig {
        tokenizer: train::data::Tokenizer::bytes()
            .save(dir.path())
            .unwrap()
            .display()
            .to_string(),
        ..config(shards)
    };
    assert!(message(prepare(&narrow, false)).contains("data.shards.vocab_size"));
}

/// A shard whose token i is i, so that a window shows where it starts.
fn counting_shard(num_tokens: u32) -> (TempDir, Shard) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("count.bin");
    let tokens: Vec<u32> = (0..num_tokens).collect();
    shard::write(&path, &tokens, num_tokens as usize).unwrap();
    let shard = Shard::open(&path, num_tokens as usize).unwrap();
    (dir, shard)
}

#[test]
fn a_global_batch_is_the_same_however_it_is_cut() {
    let (_dir, shard) = counting_shard(5000);
    let sampler = Sampler::new(&shard, 1337, 16).unwrap();
    for step in [0, 1, 70_000] {
        let whole = sampler.fill(step, 0, 8);
        for size in [1, 2, 3, 8] {
            let mut cut = (Vec::new(), Vec::new());
            for first in (0..8).step_by(size) {
                let (inputs, targets) = sampler.fill(step, first as u64, size.min(8 - first));
                cut.0.extend(inputs);
                cut.1.extend(targets);
            }
            assert_eq!(cut, whole, "step {step}, {size} at a time");
        }
    }
}

#[test]
fn samples_differ_by_seed_step_and_index() {
    let (_dir, shard) = counting_shard(1 << 20);
    let start = |seed, step, index| {
        Sampler::new(&shard, seed, 4)
            .unwrap()
            .fill(step, index, 1)
            .0[0]
    };
    let mut starts = Vec::new();
    for seed in 0..4 {
        for step in 0..4 {
            starts.extend((0..4).map(|index| start(seed, step, index)));
        }
    }
    starts.sort();
    starts.dedup();
    // 64 draws of a million: a collision has a chance of 0.2%, and the draws never change.
    assert_eq!(starts.len(), 64);
}

#[test]
fn every_start_is_drawn_alike_and_none_passes_the_end() {
    let (_dir, shard) = counting_shard(20);
    let sampler = Sampler::new(&shard, 5, 4).unwrap();
    let mut counts = [0u32; 16]; // starts 0 ..= 20 - 4 - 1
    for step in 0..1000 {
        let (inputs, targets) = sampler.fill(step, 0, 16);
        for (input, target) in inputs.chunks(4).zip(targets.chunks(4)) {
            counts[input[0] as usize] += 1;
            assert!((0..4).all(|i| input[i] == input[0] + i as u32 && target[i] == input[i] + 1));
        }
    }
    // 16000 draws, 1000 +- 31 a start.
    assert!(
        counts.iter().all(|&c| (850..1150).contains(&c)),
        "{counts:?}"
    );
}

#[test]
fn validation_windows_cover_the_shard_once() {
    for (num_tokens, num_windows) in [(5, 1), (8, 1), (9, 2), (42, 10)] {
        let (_dir, shard) = counting_shard(num_tokens);
        let windows = Windows::new(&shard, 4).unwrap();
        assert_eq!(windows.num_windows(), num_windows);
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for (i, t) in windows.batches(3) {
            inputs.extend(i);
            targets.extend(t);
        }
        let last = 4 * num_windows as u32;
        assert_eq!(inputs, (0..last).collect::<Vec<_>>());
        assert_eq!(targets, (1..=last).collect::<Vec<_>>());
        assert_eq!(
            windows.fill(num_windows - 1, 1).0,
            inputs[inputs.len() - 4..]
        );
    }
}

#[test]
fn a_shard_shorter_than_one_window_is_an_error_with_both_numbers() {
    let (_dir, shard) = counting_shard(4);
    for found in [
        message(Sampler::new(&shard, 1, 4)),
        message(Windows::new(&shard, 4)),
    ] {
        assert!(
            found.contains("4 tokens") && found.contains("takes 5"),
            "{found}"
        );
    }
    Sampler::new(&shard, 1, 3).unwrap().fill(0, 0, 2);
    assert!(message(Windows::new(&shard, 0)).contains("model.seq_len"));
}
