//! Resident memory is of the whole process, so its test has one of its own.

#[cfg(target_os = "linux")]
#[test]
fn touched_memory_is_counted() {
    use train::metrics::memory::resident;

    let before = resident().now_bytes.unwrap();
    let block = vec![1u8; 64 << 20];
    assert!(std::hint::black_box(&block).iter().all(|b| *b == 1));
    let held = resident();
    assert!(held.now_bytes.unwrap() >= before + (60 << 20));
    drop(block);
    let after = resident();
    assert!(after.now_bytes.unwrap() < before + (30 << 20));
    assert!(after.peak_bytes.unwrap() >= before + (60 << 20));
}
