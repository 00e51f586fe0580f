//! Copies to memory that is not read again soon.

/// Copies `from` to `to`, which are as long, past the cache where the processor can: the target is
/// then not first read into it, and what is there stays there.
///
/// # Panics
/// When the lengths differ.
pub(super) fn copy_past_cache(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    if from.len() >= LEAST && is_x86_feature_detected!("avx") {
        // SAFETY: the CPU has AVX, and the lengths are equal.
        unsafe { stream(from, to) };
        return;
    }
    to.copy_from_slice(from);
}

/// Below it the fence costs more than the copy gains.
#[cfg(target_arch = "x86_64")]
const LEAST: usize = 16 << 10;

/// # Safety
/// The CPU has AVX and `to` is as long as `from`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::*;
    /// Bytes a turn: two cache lines.
    const TURN: usize = 128;
    // Streaming stores need aligned targets: the ends are copied as usual.
    let head = to.as_ptr().align_offset(TURN).min(to.len());
    let turns = (to.len() - head) / TURN;
    let tail = head + turns * TURN;
    to[..head].copy_from_slice(&from[..head]);
    to[tail..].copy_from_slice(&from[tail..]);
    let (source, target) = (from[head..].as_ptr(), to[head..].as_mut_ptr());
    for turn in 0..turns {
        // SAFETY: the turn lies in both slices, and targets are aligned to 32 bytes.
        unsafe {
            let source = source.add(turn * TURN).cast::<__m256i>();
            let target = target.add(turn * TURN).cast::<__m256i>();
            let (a, b) = (
                _mm256_loadu_si256(source),
                _mm256_loadu_si256(source.add(1)),
            );
            let (c, d) = (
                _mm256_loadu_si256(source.add(2)),
                _mm256_loadu_si256(source.add(3)),
            );
            _mm256_stream_si256(target, a);
            _mm256_stream_si256(target.add(1), b);
            _mm256_stream_si256(target.add(2), c);
            _mm256_stream_si256(target.add(3), d);
        }
    }
    // Streaming stores are weakly ordered: done before anything that follows.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_every_byte_at_every_offset() {
        let from: Vec<u8> = (0..70_000usize).map(|i| (i * 31 / 7) as u8).collect();
        for (offset, len) in [(0, 0), (1, 127), (3, 16 << 10), (5, 65_001), (64, 40_000)] {
            let mut to = vec![0; len + 2 * offset];
            copy_past_cache(&from[offset..offset + len], &mut to[offset..offset + len]);
            assert_eq!(to[offset..offset + len], from[offset..offset + len]);
            let around = to[..offset].iter().chain(&to[offset + len..]);
            assert!(around.clone().all(|byte| *byte == 0));
        }
    }
}
