//! Notices that a rank died: a thread that listens to the control connections.

use std::io::{ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use super::frame::Frame;
use super::health::Health;
use super::sys::{self, Watch};
use crate::{Error, Result};

/// Says goodbye when it is dropped, and stops the thread.
#[derive(Default)]
pub(super) struct Lifeline {
    health: Option<Arc<Health>>,
    /// Closing it ends the thread.
    thread: Option<(UnixStream, JoinHandle<()>)>,
}

impl Lifeline {
    /// Of ranks that are threads: they see each other's state.
    pub(super) fn threads(health: Arc<Health>) -> Self {
        Self {
            health: Some(health),
            thread: None,
        }
    }

    /// Starts to listen to the control connections of `health`.
    ///
    /// # Errors
    /// [`Error::Config`] when the system refuses a thread or a descriptor.
    pub(super) fn watch(health: Arc<Health>) -> Result<Self> {
        let refused = |e| Error::Config(format!("cannot watch the other ranks: {e}"));
        let (ours, theirs) = UnixStream::pair().map_err(refused)?;
        let watched = health.clone();
        let thread = std::thread::Builder::new()
            .name("watch".into())
            .spawn(move || listen(&watched, &theirs))
            .map_err(refused)?;
        Ok(Self {
            health: Some(health),
            thread: Some((ours, thread)),
        })
    }

    /// Fails every group of every rank, as "rank r stopped: reason".
    pub(super) fn abort(&self, reason: &str) {
        if let Some(health) = &self.health {
            health.abort(reason);
        }
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        let Some(health) = &self.health else {
            return;
        };
        if std::thread::panicking() {
            health.abort("it panicked");
        }
        health.goodbye();
        if let Some((wake, thread)) = self.thread.take() {
            drop(wake);
            // It ends by itself; a panic there was reported by the panic hook.
            let _ = thread.join();
        }
        for socket in health.sockets().iter().flatten() {
            let _ = socket.shutdown(Shutdown::Write);
        }
    }
}

/// Reads frames from every control connection until `stop` closes.
fn listen(health: &Health, stop: &UnixStream) {
    let mut open: Vec<(usize, &TcpStream, Vec<u8>)> = (health.sockets().iter().enumerate())
        .filter_map(|(rank, socket)| Some((rank, socket.as_ref()?, Vec::new())))
        .collect();
    loop {
        let mut watches = vec![Watch::new(stop.as_raw_fd(), true, false)];
        watches.extend((open.iter()).map(|(_, s, _)| Watch::new(s.as_raw_fd(), true, false)));
        if let Err(e) = sys::poll(&mut watches, Duration::from_secs(60)) {
            health.fail(&format!("cannot watch the other ranks: {e}"));
            return;
        }
        if watches[0].ready() {
            return;
        }
        let mut ready = watches[1..].iter();
        open.retain_mut(|(rank, socket, buffer)| {
            let ready = ready.next().is_some_and(Watch::ready);
            !ready || receive(health, *rank, socket, buffer)
        });
    }
}

/// Reads what `rank` says; false once nothing more is to come.
fn receive(health: &Health, rank: usize, mut socket: &TcpStream, buffer: &mut Vec<u8>) -> bool {
    let mut chunk = [0; 4096];
    let gone = match socket.read(&mut chunk) {
        Ok(0) => "it ended without a goodbye".to_owned(),
        Ok(read) => {
            buffer.extend(&chunk[..read]);
            return parse(health, rank, buffer);
        }
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            return true;
        }
        Err(e) => e.to_string(),
    };
    if !health.has_left(rank) {
        health.fail(&format!("rank {rank} is gone: {gone}"));
    }
    false
}

/// Takes whole frames off the front of `buffer`; false after one that is none.
fn parse(health: &Health, rank: usize, buffer: &mut Vec<u8>) -> bool {
    loop {
        match Frame::decode(buffer) {
            Ok(None) => return true,
            Ok(Some((frame, len))) => {
                buffer.drain(..len);
                if !health.hear(rank, &frame) {
                    health.fail(&format!("rank {rank} sent {frame:?} out of turn"));
                    return false;
                }
            }
            Err(what) => {
                health.fail(&format!("rank {rank} sent {what}"));
                return false;
            }
        }
    }
}
