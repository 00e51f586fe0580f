//! The few system calls that the standard library has no name for.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// A file descriptor to wait for.
#[repr(transparent)]
pub(super) struct Watch(libc::pollfd);

impl Watch {
    /// Waits for `fd` to be readable, writable or both. Hang-ups always count.
    pub(super) fn new(fd: RawFd, read: bool, write: bool) -> Self {
        let events = if read { libc::POLLIN } else { 0 } | if write { libc::POLLOUT } else { 0 };
        Self(libc::pollfd {
            fd,
            events,
            revents: 0,
        })
    }

    /// Whether something happened: what was asked for, an error or a hang-up.
    pub(super) fn ready(&self) -> bool {
        self.0.revents != 0
    }
}

/// Blocks until one of `watches` is ready or `timeout` (rounded up to a millisecond) is over;
/// returns how many are.
pub(super) fn poll(watches: &mut [Watch], timeout: Duration) -> io::Result<usize> {
    let ms = timeout.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32;
    // SAFETY: `Watch` is a pollfd (transparent), and pointer and count describe the slice.
    let found = unsafe { libc::poll(watches.as_mut_ptr().cast(), watches.len() as _, ms) };
    match found {
        0.. => Ok(found as usize),
        _ => match io::Error::last_os_error() {
            e if e.kind() == io::ErrorKind::Interrupted => Ok(0),
            e => Err(e),
        },
    }
}

/// Sleeps until [`futex_wake`] is called on `word`, unless it no longer holds `seen`; at most
/// `timeout`. May return early. Works between processes that share the word's memory.
pub(super) fn futex_wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    #[cfg(target_os = "linux")]
    {
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs() as _,
            tv_nsec: timeout.subsec_nanos() as _,
        };
        // SAFETY: the word and the timeout live through the call; FUTEX_WAIT only reads both. Every
        // outcome (woken, changed, interrupted, timed out) means: look again.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                libc::FUTEX_WAIT,
                seen,
                &raw const timeout,
            )
        };
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (word, seen);
        std::thread::sleep(timeout.min(Duration::from_micros(100)));
    }
}

/// Wakes the sleeper of `word`.
pub(super) fn futex_wake(word: &AtomicU32) {
    #[cfg(target_os = "linux")]
    // SAFETY: FUTEX_WAKE uses the address alone.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1)
    };
    #[cfg(not(target_os = "linux"))]
    let _ = word;
}

/// Makes the system probe an idle connection, so that a machine that vanished without closing it
/// (power, cable) shows as an error within about half a minute.
pub(super) fn keep_alive(stream: &TcpStream) {
    let set = |level, name, value: libc::c_int| {
        // SAFETY: the option's value is an int, which lives through the call. A refusal only means
        // later notice.
        unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                size_of_val(&value) as _,
            )
        };
    };
    set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    #[cfg(target_os = "linux")]
    {
        set(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 10);
        set(libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 5);
        set(libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 4);
        set(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 30_000);
    }
}

/// Reserves `len` bytes of a file, so that writing through a map cannot meet a full file system
/// (which is a SIGBUS).
pub(super) fn reserve(file: &std::fs::File, len: u64) -> io::Result<()> {
    file.set_len(len)?;
    #[cfg(target_os = "linux")]
    {
        // SAFETY: takes the descriptor and numbers only.
        let refused = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len as _) };
        if refused != 0 {
            return Err(io::Error::from_raw_os_error(refused));
        }
    }
    Ok(())
}
