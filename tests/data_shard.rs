//! Token files: what is written is read back, and anything else is an error with file and offset.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tempfile::TempDir;
use train::Error;
use train::data::shard::{self, Shard};

fn file(bytes: &[u8]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens.bin");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

fn all_tokens(shard: &Shard) -> Vec<u32> {
    let mut tokens = vec![0; shard.num_tokens()];
    shard.read(0, &mut tokens);
    tokens
}

/// The message of the data error that opening must give; it always names the file.
fn refused(path: &Path, vocab_size: usize) -> String {
    match Shard::open(path, vocab_size) {
        Err(Error::Data(message)) => {
            assert!(message.contains("tokens.bin"), "{message}");
            message
        }
        other => panic!("{other:?}"),
    }
}

fn llmc(magic: i32, version: i32, count: i32, tokens: &[u8]) -> Vec<u8> {
    let mut bytes: Vec<u8> = [magic, version, count]
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .collect();
    bytes.resize(1024, 0);
    bytes.extend(tokens);
    bytes
}

/// The reader's definition, written a second time without shortcuts.
fn naive(bytes: &[u8], vocab_size: usize) -> Option<Vec<u32>> {
    let le = |b: &[u8]| b.iter().rev().fold(0u32, |sum, &x| sum << 8 | x as u32);
    let first = (bytes.len() >= 4).then(|| le(&bytes[..4]));
    let (body, width) = match first {
        Some(20240520) => (bytes.get(1024..)?, 2),
        Some(20240801) => (bytes.get(1024..)?, 4),
        _ => (bytes, 2),
    };
    if body.len() != bytes.len() {
        let version = if width == 2 { 1 } else { 7 };
        if le(&bytes[4..8]) != version || le(&bytes[8..12]) as usize * width != body.len() {
            return None;
        }
    } else if vocab_size > 65536 {
        return None;
    }
    let tokens: Vec<u32> = body.chunks(width).map(le).collect();
    let fits = tokens.iter().all(|&t| (t as usize) < vocab_size);
    (body.len() % width == 0 && !tokens.is_empty() && fits).then_some(tokens)
}

fn tokens_and_vocab() -> impl Strategy<Value = (Vec<u32>, usize)> {
    prop_oneof![1usize..300, 65_000usize..66_000, 1usize << 20..1 << 31]
        .prop_flat_map(|v| (proptest::collection::vec(0..v as u32, 1..400), Just(v)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn what_is_written_is_read_back((tokens, vocab) in tokens_and_vocab(), from in 0usize..400) {
        let (_dir, path) = file(b"");
        shard::write(&path, &tokens, vocab).unwrap();
        let width = if vocab <= 65536 { 2 } else { 4 };
        prop_assert_eq!(std::fs::metadata(&path).unwrap().len() as usize, 1024 + width * tokens.len());
        let shard = Shard::open(&path, vocab).unwrap();
        prop_assert_eq!(&all_tokens(&shard), &tokens);
        let from = from % tokens.len();
        let mut tail = vec![0; tokens.len() - from];
        shard.read(from, &mut tail);
        prop_assert_eq!(&tail[..], &tokens[from..]);
    }

    /// Arbitrary bytes, most of them close to a valid file: the reader never panics and agrees
    /// with the naive one on every byte string.
    #[test]
    fn any_bytes_are_read_right_or_refused(
        magic in prop_oneof![Just(20240520), Just(20240801), any::<i32>()],
        version in prop_oneof![Just(1), Just(7), any::<i32>()],
        body in proptest::collection::vec(any::<u8>(), 0..64),
        count in prop_oneof![Just(None), Just(None), any::<i32>().prop_map(Some)],
        keep in prop_oneof![Just(2000usize), 0usize..1100],
        vocab in prop_oneof![Just(65536usize), Just(1 << 32), 1usize..70_000],
    ) {
        let width = if magic == 20240520 { 2 } else { 4 };
        let count = count.unwrap_or((body.len() / width) as i32);
        let mut bytes = llmc(magic, version, count, &body);
        bytes.truncate(keep);
        let (_dir, path) = file(&bytes);
        let got = Shard::open(&path, vocab);
        match (got, naive(&bytes, vocab)) {
            (Ok(shard), Some(tokens)) => prop_assert_eq!(all_tokens(&shard), tokens),
            (Err(Error::Data(_)), None) => {}
            (got, want) => prop_assert!(false, "{:?} {:?}", got, want),
        }
    }

    #[test]
    fn headerless_bytes_are_u16(tokens in proptest::collection::vec(any::<u16>(), 1..300)) {
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        let (_dir, path) = file(&bytes);
        let want: Vec<u32> = tokens.iter().map(|&t| t as u32).collect();
        prop_assert_eq!(all_tokens(&Shard::open(&path, 65536).unwrap()), want);
    }
}

#[test]
fn a_file_cut_at_any_byte_is_refused() {
    let (_dir, path) = file(b"");
    shard::write(&path, &[3, 1, 2, 0, 9], 70_000).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for len in (4..40).chain(1000..whole.len()) {
        std::fs::write(&path, &whole[..len]).unwrap();
        let message = refused(&path, 70_000);
        assert!(message.contains(&len.to_string()), "{len}: {message}");
    }
    std::fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
    refused(&path, 70_000);
}

#[test]
fn a_damaged_header_is_never_read_as_headerless_tokens() {
    let tokens = [1u8, 0, 2, 0];
    for (bytes, offset) in [
        (llmc(20240520, 7, 2, &tokens), "byte 4"),
        (llmc(20240801, 1, 1, &tokens), "byte 4"),
        (llmc(20240520, 1, 3, &tokens), "byte 8"),
        (llmc(20240520, 1, -2, &tokens), "byte 8"),
        (llmc(20240520, 1, i32::MIN, &tokens), "byte 8"),
        (llmc(20240801, 7, 2, &tokens), "byte 8"),
    ] {
        let (_dir, path) = file(&bytes);
        let message = refused(&path, 65536);
        assert!(message.contains(offset), "{message}");
    }
}

#[test]
fn a_token_past_the_vocabulary_is_named_with_its_offset() {
    let mut tokens = vec![7u32; 200_000];
    tokens[150_000] = 256;
    tokens[170_000] = 300;
    let (_dir, path) = file(b"");
    shard::write(&path, &tokens, 301).unwrap();
    let message = refused(&path, 256);
    assert!(message.contains("token 256 at byte 301024"), "{message}");
    Shard::open(&path, 301).unwrap();

    let (_dir, path) = file(&[5, 0, 6, 0]);
    assert!(refused(&path, 6).contains("token 6 at byte 2"));

    match shard::write(&path, &[1, 6], 6) {
        Err(Error::Data(message)) => assert!(message.contains("position 1"), "{message}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn empty_odd_and_too_narrow_files_are_refused() {
    let (_dir, path) = file(b"");
    assert!(refused(&path, 256).contains("no tokens"));
    std::fs::write(&path, llmc(20240520, 1, 0, &[])).unwrap();
    assert!(refused(&path, 256).contains("no tokens"));
    std::fs::write(&path, [1, 0, 2]).unwrap();
    assert!(refused(&path, 256).contains("even size"));
    std::fs::write(&path, [1, 0, 2, 0]).unwrap();
    assert!(refused(&path, 65537).contains("u32"));
    assert!(shard::write(&path, &[], 256).is_err());
    assert!(matches!(
        Shard::open(path.parent().unwrap(), 256),
        Err(Error::Data(_))
    ));
    assert!(matches!(
        Shard::open(&path.with_extension("none"), 256),
        Err(Error::Io { .. })
    ));
}

#[test]
fn a_failed_write_leaves_the_old_file_and_no_temporary_one() {
    let (dir, path) = file(b"");
    shard::write(&path, &[1, 2], 3).unwrap();
    let before = std::fs::read(&path).unwrap();
    assert!(shard::write(&path, &[9], 3).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), before);
    // A folder of the target's name makes the last step, the rename, fail.
    let blocked = dir.path().join("blocked.bin");
    std::fs::create_dir_all(blocked.join("x")).unwrap();
    assert!(matches!(
        shard::write(&blocked, &[1], 3),
        Err(Error::Io { .. })
    ));
    let names = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(names, 2);
}
