//! Compute threads: how many, and how they treat denormals.
//!
//! A rank computes on its own rayon pool. The thread that drives the rank is the pool's first
//! worker, so entering a parallel region costs no hand-over, and `threads = n` means n busy cores.

use crate::{Error, Result};

/// `FZ` of FPCR: denormal operands and results are zero.
#[cfg(target_arch = "aarch64")]
const FPCR_FZ: u64 = 1 << 24;

/// Sets flush-to-zero and denormals-are-zero on the calling thread, where the processor can.
///
/// A saturated softmax fills the backward pass with denormals, each of which costs over a hundred
/// cycles: the same step then takes several times as long.
pub fn flush_denormals() {
    #[cfg(target_arch = "x86_64")]
    {
        let mut mxcsr = 0u32;
        // SAFETY: reads and writes this thread's own MXCSR through a local; only FTZ (bit 15) and
        // DAZ (bit 6) change, rounding and exception masks stay as Rust expects them.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &mut mxcsr, options(nostack));
            mxcsr |= (1 << 15) | (1 << 6);
            std::arch::asm!("ldmxcsr [{}]", in(reg) &mxcsr, options(nostack));
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        let mut fpcr: u64;
        // SAFETY: reads and writes this thread's own FPCR, in which only FZ changes.
        unsafe {
            std::arch::asm!("mrs {}, fpcr", out(reg) fpcr, options(nomem, nostack));
            fpcr |= FPCR_FZ;
            std::arch::asm!("msr fpcr, {}", in(reg) fpcr, options(nostack));
        }
    }
}

/// Whether the calling thread flushes denormals: never on processors whose switch is not known here.
pub fn denormals_flushed() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let mut mxcsr = 0u32;
        // SAFETY: stores this thread's MXCSR into a local.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut mxcsr, options(nostack)) };
        mxcsr & (1 << 15) != 0 && mxcsr & (1 << 6) != 0
    }
    #[cfg(target_arch = "aarch64")]
    {
        let fpcr: u64;
        // SAFETY: copies this thread's FPCR into a local.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) fpcr, options(nomem, nostack)) };
        fpcr & FPCR_FZ != 0
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    false
}

/// Makes the calling thread the first of `threads` compute workers that flush denormals.
///
/// Everything the caller then runs through rayon, candle and gemm uses this pool. The pool lives
/// until the process ends: a thread can join one pool only.
pub fn start_workers(threads: usize) -> Result<()> {
    flush_denormals();
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .use_current_thread()
        .thread_name(|i| format!("compute-{i}"))
        .start_handler(|_| flush_denormals())
        .build()
        .map_err(|e| Error::Config(format!("compute threads = {threads}: cannot start: {e}")))?;
    std::mem::forget(pool);
    Ok(())
}

/// Cores this process may use.
pub fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Compute threads of each of `ranks_here` ranks on this machine unless told otherwise: an equal share
/// of its cores. OMP_NUM_THREADS is not asked: torchrun sets it to 1 for PyTorch's sake.
pub fn cores_each(ranks_here: usize) -> usize {
    (num_cores() / ranks_here.max(1)).max(1)
}

/// Tells the allocator to keep freed memory and to ask for huge pages.
///
/// By default mimalloc gives freed memory back after a few milliseconds, and the next step pays a
/// page fault and a cleared page for each 4 KiB of activations again.
pub fn keep_freed_memory() {
    use libmimalloc_sys::{mi_option_large_os_pages, mi_option_set};
    /// `mi_option_purge_delay` of mimalloc.h, which the crate does not name.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: both are documented options; setting one only stores a number.
    unsafe {
        mi_option_set(PURGE_DELAY, -1);
        mi_option_set(mi_option_large_os_pages, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_cores() {
        assert_eq!(cores_each(1), num_cores());
        assert_eq!(cores_each(2), (num_cores() / 2).max(1));
        assert_eq!(cores_each(10 * num_cores()), 1);
    }

    #[test]
    fn every_worker_flushes_denormals() {
        std::thread::spawn(|| {
            start_workers(3).unwrap();
            assert_eq!(rayon::current_num_threads(), 3);
            let flushes = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));
            assert_eq!(rayon::broadcast(|_| denormals_flushed()), [flushes; 3]);
            let tiny = std::hint::black_box(f32::MIN_POSITIVE);
            assert_eq!(tiny * std::hint::black_box(0.5) == 0.0, flushes);
        })
        .join()
        .unwrap();
    }
}
