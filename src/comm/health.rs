//! Whether the job is alive, as one rank knows it: the first cause of failure, and who has left.
//!
//! A job with a failed collective cannot go on, so one cause fails every group of every rank: the
//! rank that finds it tells the others. Waiting collectives look here every [`WAIT_SLICE`].

use std::fmt::Display;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::frame::Frame;
use crate::Error;

/// How long a collective sleeps before it looks whether a peer died.
pub(super) const WAIT_SLICE: Duration = Duration::from_millis(20);

/// Done, or the cause of failure in words.
pub(super) type Outcome = std::result::Result<(), String>;

/// How long what a rank sent before it left, or why it died, may still be on its way.
const GRACE: Duration = Duration::from_millis(500);

/// How a rank tells the others.
pub(super) enum Peers {
    /// They are threads of this process; one entry a rank, this one included.
    Threads(OnceLock<Vec<Weak<Health>>>),
    /// Control connections, by rank; none to itself.
    Sockets(Vec<Option<TcpStream>>),
}

/// The state of the job, shared by a rank's groups.
pub(super) struct Health {
    rank: usize,
    cause: OnceLock<String>,
    failed: AtomicBool,
    /// By rank: said goodbye.
    left: Vec<AtomicBool>,
    peers: Peers,
}

impl Health {
    pub(super) fn new(rank: usize, world: usize, peers: Peers) -> Self {
        Self {
            rank,
            cause: OnceLock::new(),
            failed: AtomicBool::new(false),
            left: (0..world).map(|_| AtomicBool::new(false)).collect(),
            peers,
        }
    }

    /// Of threads that tell each other, in rank order.
    pub(super) fn threads(world: usize) -> Vec<Arc<Self>> {
        let all: Vec<Arc<Self>> = (0..world)
            .map(|rank| Arc::new(Self::new(rank, world, Peers::Threads(OnceLock::new()))))
            .collect();
        let weak: Vec<Weak<Self>> = all.iter().map(Arc::downgrade).collect();
        for health in &all {
            if let Peers::Threads(peers) = &health.peers {
                let _ = peers.set(weak.clone());
            }
        }
        all
    }

    /// The first cause of failure, if there is one.
    pub(super) fn cause(&self) -> Option<&str> {
        if !self.failed.load(Ordering::Acquire) {
            return None;
        }
        self.cause.get().map(String::as_str)
    }

    /// Notes `cause` unless there is one already, without telling others. True when it is the first.
    pub(super) fn note(&self, cause: &str) -> bool {
        let first = self.cause.set(cause.to_owned()).is_ok();
        self.failed.store(true, Ordering::Release);
        first
    }

    /// Notes `cause` unless there is one already, tells the others, and returns the first as an error.
    pub(super) fn fail(&self, cause: &str) -> Error {
        if self.note(cause) {
            match &self.peers {
                Peers::Threads(peers) => {
                    for peer in peers.get().into_iter().flatten() {
                        if let Some(peer) = peer.upgrade() {
                            peer.note(cause);
                        }
                    }
                }
                Peers::Sockets(_) => self.send(&Frame::Abort(cause.to_owned())),
            }
        }
        // Set either way: `note` returns after the first cause is stored.
        Error::Peer(self.cause.get().map_or(cause, |first| first).to_owned())
    }

    /// Fails the job on this rank's own account.
    pub(super) fn abort(&self, reason: &str) {
        self.fail(&format!("rank {} stopped: {reason}", self.rank));
    }

    /// Tells the others that this rank is done: in an orderly way, or why not, in case they do not
    /// know yet.
    pub(super) fn goodbye(&self) {
        match (&self.peers, self.cause()) {
            (Peers::Threads(peers), None) => {
                for peer in peers.get().into_iter().flatten() {
                    if let Some(peer) = peer.upgrade() {
                        peer.note_left(self.rank);
                    }
                }
            }
            (Peers::Threads(_), Some(_)) => {}
            (Peers::Sockets(_), None) => self.send(&Frame::Goodbye),
            (Peers::Sockets(_), Some(cause)) => self.send(&Frame::Abort(cause.to_owned())),
        }
    }

    /// Notes that `rank` said goodbye.
    pub(super) fn note_left(&self, rank: usize) {
        self.left[rank].store(true, Ordering::Release);
    }

    /// Whether `rank` said goodbye.
    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.left[rank].load(Ordering::Acquire)
    }

    /// The cause when `rank` ended while this rank needed it.
    fn ended(&self, rank: usize, call: &dyn Display) -> String {
        format!(
            "rank {rank} has ended while rank {} waits for it in {call}",
            self.rank
        )
    }

    /// The cause when the connection to `rank` broke (`what`): what the control connection says,
    /// which may come a moment later, or else the break itself.
    pub(super) fn why_lost(&self, rank: usize, call: &dyn Display, what: &str) -> String {
        let start = Instant::now();
        while start.elapsed() < GRACE {
            if let Some(cause) = self.cause() {
                return cause.to_owned();
            }
            if self.has_left(rank) {
                return self.ended(rank, call);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        format!(
            "rank {} lost the connection to rank {rank} in {call}: {what}",
            self.rank
        )
    }

    /// Sends `frame` on every control connection. They do not block, and frames are small: a peer
    /// that takes none any more is dead or will be found so.
    fn send(&self, frame: &Frame) {
        use std::io::Write;
        if let Peers::Sockets(sockets) = &self.peers {
            let bytes = frame.encode();
            for mut socket in sockets.iter().flatten() {
                let _ = socket.write_all(&bytes);
            }
        }
    }

    /// Control connections, by rank.
    pub(super) fn sockets(&self) -> &[Option<TcpStream>] {
        match &self.peers {
            Peers::Sockets(sockets) => sockets,
            Peers::Threads(_) => &[],
        }
    }
}

/// Time since something last moved.
pub(super) struct Patience<'a> {
    health: &'a Health,
    timeout: Duration,
    since: Option<Instant>,
}

impl<'a> Patience<'a> {
    pub(super) fn new(health: &'a Health, timeout: Duration) -> Self {
        Self {
            health,
            timeout,
            since: None,
        }
    }

    /// Something moved.
    pub(super) fn reset(&mut self) {
        self.since = None;
    }

    /// Called when nothing moves, with the call's name and those it waits for.
    ///
    /// # Errors
    /// The cause when the job has failed, or nothing moved for the timeout.
    pub(super) fn check(
        &mut self,
        call: &dyn Display,
        missing: impl Fn() -> Vec<usize>,
    ) -> Outcome {
        if let Some(cause) = self.health.cause() {
            return Err(cause.to_owned());
        }
        let now = Instant::now();
        let waited = now - *self.since.get_or_insert(now);
        if waited < self.timeout.min(GRACE) {
            return Ok(());
        }
        let gone = |rank: &usize| self.health.has_left(*rank);
        if let Some(rank) = missing().into_iter().find(gone) {
            return Err(self.health.ended(rank, call));
        }
        if waited < self.timeout {
            return Ok(());
        }
        Err(format!(
            "rank {} waited {} s in {call} for {}",
            self.health.rank,
            self.timeout.as_secs_f64(),
            ranks(&missing())
        ))
    }
}

/// "rank 3" or "ranks 1, 2".
pub(super) fn ranks(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", list.join(", "))
}
