//! Logging is global to a process, so its test has one of its own.

use train::Error;
use train::metrics::logging::{FILE_NAME, init, to_file};

#[test]
fn a_wrong_filter_is_an_error_and_lines_reach_the_file() {
    match init(Some("train=loud")) {
        Err(Error::Config(message)) => assert!(message.contains("train=loud"), "{message}"),
        other => panic!("{other:?}"),
    }
    init(Some("warn")).unwrap();
    assert!(matches!(init(None), Err(Error::Config(_))));
    tracing::warn!("before the folder");
    let dir = tempfile::tempdir().unwrap();
    to_file(dir.path()).unwrap();
    tracing::warn!(step = 3, "a line to keep");
    tracing::info!("below the filter");
    let text = std::fs::read_to_string(dir.path().join(FILE_NAME)).unwrap();
    assert!(
        text.contains("a line to keep") && text.contains("step=3"),
        "{text}"
    );
    assert!(!text.contains("before the folder") && !text.contains("below the filter"));
    assert!(!text.contains('\u{1b}'), "no colours in a file");
}
