//! Whether the job is alive, as one rank knows it: the first cause of failure, and who has left.
//!
//! A job with a failed collective cannot go on, so one cause fails every group of every rank: the
//! rank that finds it tells the others. Waiting collectives look here every [`WAIT_SLICE`].

use std::fmt::Display;
use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::frame::Frame;
use crate::Error;

/// How long a collective sleeps before it looks whether a peer died.
pub(super) const WAIT_SLICE: Duration = Duration::from_millis(20);

/// Done, or the cause of failure in words.
pub(super) type Outcome = std::result::Result<(), String>;

/// How long what a rank sent before it left, or why it died, may still be on its way; after it, a rank
/// says for whom it waits.
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
    /// By rank: for whom it has been waiting for a while, as it said.
    waits: Mutex<Vec<Vec<u32>>>,
    peers: Peers,
}

impl Health {
    pub(super) fn new(rank: usize, world: usize, peers: Peers) -> Self {
        Self {
            rank,
            cause: OnceLock::new(),
            failed: AtomicBool::new(false),
            left: (0..world).map(|_| AtomicBool::new(false)).collect(),
            waits: Mutex::new(vec![Vec::new(); world]),
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
            self.tell(&Frame::Abort(cause.to_owned()));
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
        self.tell(&match self.cause() {
            None => Frame::Goodbye,
            Some(cause) => Frame::Abort(cause.to_owned()),
        });
    }

    /// Takes note of what `rank` says; false when that is nothing for running collectives.
    pub(super) fn hear(&self, rank: usize, frame: &Frame) -> bool {
        match frame {
            Frame::Goodbye => self.left[rank].store(true, Ordering::Release),
            // Its sender has told everybody.
            Frame::Abort(cause) => drop(self.note(cause)),
            Frame::Waits(ranks) => self.waits()[rank].clone_from(ranks),
            _ => return false,
        }
        true
    }

    fn waits(&self) -> MutexGuard<'_, Vec<Vec<u32>>> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who keeps `missing` from coming: where one of them waits for others itself, these. All of
    /// `missing` when everybody waits for somebody.
    fn at_fault(&self, missing: &[usize]) -> Vec<usize> {
        let waits = self.waits();
        let mut chain = missing.to_vec();
        let mut at = 0;
        while let Some(&rank) = chain.get(at) {
            for &next in waits.get(rank).into_iter().flatten() {
                if !chain.contains(&(next as usize)) {
                    chain.push(next as usize);
                }
            }
            at += 1;
        }
        let is_idle =
            |rank: &usize| *rank != self.rank && waits.get(*rank).is_some_and(Vec::is_empty);
        chain.retain(is_idle);
        chain.sort_unstable();
        if chain.is_empty() {
            missing.to_vec()
        } else {
            chain
        }
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

    /// Tells the others. Control connections do not block, and frames are small: a peer that takes none
    /// any more is dead or will be found so.
    fn tell(&self, frame: &Frame) {
        match &self.peers {
            Peers::Threads(peers) => {
                for peer in peers.get().into_iter().flatten().filter_map(Weak::upgrade) {
                    peer.hear(self.rank, frame);
                }
            }
            Peers::Sockets(sockets) => {
                let bytes = frame.encode();
                for mut socket in sockets.iter().flatten() {
                    let _ = socket.write_all(&bytes);
                }
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
    /// Whether the others have been told for whom this rank waits.
    has_told: bool,
}

impl<'a> Patience<'a> {
    pub(super) fn new(health: &'a Health, timeout: Duration) -> Self {
        Self {
            health,
            timeout,
            since: None,
            has_told: false,
        }
    }

    /// Something moved.
    pub(super) fn reset(&mut self) {
        self.since = None;
        if std::mem::take(&mut self.has_told) {
            self.health.tell(&Frame::Waits(Vec::new()));
        }
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
        if waited < GRACE.min(self.timeout / 2) {
            return Ok(());
        }
        let missing = missing();
        let gone = |rank: &&usize| self.health.has_left(**rank);
        if let Some(rank) = missing.iter().find(gone) {
            return Err(self.health.ended(*rank, call));
        }
        if !self.has_told {
            self.has_told = true;
            let missing = missing.iter().map(|rank| *rank as u32).collect();
            self.health.tell(&Frame::Waits(missing));
        }
        if waited < self.timeout {
            return Ok(());
        }
        let at_fault = self.health.at_fault(&missing);
        let mut cause = format!(
            "rank {} waited {} s in {call} for {}",
            self.health.rank,
            self.timeout.as_secs_f64(),
            ranks(&at_fault)
        );
        if at_fault != missing {
            cause += &format!(" (by way of {})", ranks(&missing));
        }
        Err(cause)
    }
}

impl Drop for Patience<'_> {
    fn drop(&mut self) {
        self.reset();
    }
}

/// "rank 3" or "ranks 1, 2".
pub(super) fn ranks(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", list.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_names_who_waits_for_nobody() {
        let ranks = Health::threads(4);
        let long = Duration::from_secs(60);
        let timeout = Duration::from_millis(200);
        // Rank 0's clock is over first, and rank 1 is no more to blame than rank 0.
        let mut patience = [
            Patience::new(&ranks[0], timeout),
            Patience::new(&ranks[1], long),
        ];
        let start = Instant::now();
        let cause = loop {
            let first = patience[0].check(&"barrier", || vec![1]);
            if let Err(cause) = first {
                break cause;
            }
            assert!(start.elapsed() < long);
            patience[1].since = Some(start - GRACE);
            patience[1].check(&"barrier", || vec![3]).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(
            cause,
            "rank 0 waited 0.2 s in barrier for rank 3 (by way of rank 1)"
        );
        // Once rank 1 goes on it is named again.
        patience[1].reset();
        let cause = patience[0].check(&"barrier", || vec![1]).unwrap_err();
        assert!(cause.ends_with("for rank 1"), "{cause}");
    }
}
