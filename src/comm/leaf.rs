//! A group whose ranks reach each other directly: over one transport, in one step a collective.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::call_id::{CallId, Header, Scope};
use super::health::{Health, Outcome, Patience};
use super::steps::Steps;
use super::{Call, LinkBytes, ReduceOp, Topology};
use crate::{Error, Result};

/// Moves bytes between the ranks of a leaf group. Errors are the cause, in words.
///
/// Every step also carries a header from each rank to each other, checked before data is used, and
/// returns after all have arrived: nobody is ever more than one step ahead.
pub(super) trait Transport: Send {
    /// Bytes of a header that count as received.
    const HEADER_BYTES: u64;

    fn all_gather(&mut self, cx: &Context, send: &[u8], recv: &mut [u8]) -> Outcome;

    fn reduce_scatter(
        &mut self,
        cx: &Context,
        op: ReduceOp,
        send: &[f32],
        recv: &mut [f32],
    ) -> Outcome;

    fn all_to_all(&mut self, cx: &Context, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Outcome;

    fn broadcast(&mut self, cx: &Context, data: &mut [u8], root: usize) -> Outcome;
}

/// Who is in a group.
#[derive(Clone, Debug)]
pub(super) struct Members {
    /// World ranks, in the group's order.
    pub(super) ranks: Vec<usize>,
    /// This process's place among them.
    pub(super) me: usize,
    /// By place: on another node than this process.
    far: Vec<bool>,
}

impl Members {
    pub(super) fn new(topology: Topology, ranks: Vec<usize>) -> Self {
        let node = |rank: usize| rank / topology.local_size;
        Self {
            me: ranks
                .iter()
                .position(|&r| r == topology.rank)
                .expect("a group holds its own rank"),
            far: ranks.iter().map(|&r| node(r) != topology.node()).collect(),
            ranks,
        }
    }

    /// All ranks.
    pub(super) fn world(topology: Topology) -> Self {
        Self::new(topology, (0..topology.world()).collect())
    }

    /// The ranks of this node.
    pub(super) fn local(topology: Topology) -> Self {
        let first = topology.node() * topology.local_size;
        Self::new(topology, (first..first + topology.local_size).collect())
    }

    /// The ranks with this local rank.
    pub(super) fn cross(topology: Topology) -> Self {
        let ranks = (topology.local_rank()..topology.world()).step_by(topology.local_size);
        Self::new(topology, ranks.collect())
    }

    /// `bytes` from the rank at `place`, by link.
    fn bytes_from(&self, place: usize, bytes: u64) -> LinkBytes {
        let (intra_bytes, inter_bytes) = if self.far[place] {
            (0, bytes)
        } else {
            (bytes, 0)
        };
        LinkBytes {
            intra_bytes,
            inter_bytes,
        }
    }
}

/// What arrived, by link.
#[derive(Default)]
struct Counter {
    intra_bytes: AtomicU64,
    inter_bytes: AtomicU64,
}

/// One step, as the transport sees it.
pub(super) struct Context<'a> {
    pub(super) members: &'a Members,
    /// This rank's, with no payload.
    pub(super) header: Header,
    health: &'a Health,
    timeout: Duration,
    counter: &'a Counter,
}

impl<'a> Context<'a> {
    /// Books `bytes` that arrived from the rank at `place`.
    pub(super) fn count(&self, place: usize, bytes: u64) {
        let by_link = self.members.bytes_from(place, bytes);
        let add = |counter: &AtomicU64, n| counter.fetch_add(n, Ordering::Relaxed);
        add(&self.counter.intra_bytes, by_link.intra_bytes);
        add(&self.counter.inter_bytes, by_link.inter_bytes);
    }

    /// Checks the header of the rank at `place` against `payload` bytes expected from it.
    pub(super) fn check(&self, place: usize, theirs: Option<Header>, payload: u64) -> Outcome {
        let [me, peer] = [self.members.me, place].map(|p| self.members.ranks[p]);
        Header {
            payload,
            ..self.header
        }
        .check(me, theirs, peer)
    }

    pub(super) fn patience(&self) -> Patience<'a> {
        Patience::new(self.health, self.timeout)
    }

    /// Why the connection to the rank at `place` ended.
    pub(super) fn lost(&self, place: usize, what: &str) -> String {
        let rank = self.members.ranks[place];
        self.health.why_lost(rank, &self.header.id, what)
    }
}

struct Inner<T> {
    transport: T,
    sequence: u64,
}

/// A group over one transport.
pub(super) struct Leaf<T> {
    members: Members,
    scope: Scope,
    health: Arc<Health>,
    timeout: Duration,
    inner: Mutex<Inner<T>>,
    scratch: Mutex<Vec<f32>>,
    /// For calls on this group itself, and for steps of calls on the world.
    received: [Counter; 2],
}

impl<T: Transport> Leaf<T> {
    pub(super) fn new(
        members: Members,
        scope: Scope,
        health: Arc<Health>,
        timeout: Duration,
        transport: T,
    ) -> Self {
        Self {
            members,
            scope,
            health,
            timeout,
            inner: Mutex::new(Inner {
                transport,
                sequence: 0,
            }),
            scratch: Mutex::default(),
            received: Default::default(),
        }
    }

    fn counter(&self, scope: Scope) -> &Counter {
        &self.received[usize::from(scope != self.scope)]
    }

    fn step(&self, id: CallId, run: impl FnOnce(&mut T, &Context) -> Outcome) -> Result<()> {
        let mut inner = match self.inner.lock() {
            Ok(inner) => inner,
            Err(_) => {
                self.health.abort("a collective panicked");
                return Err(self.health.fail("a collective panicked"));
            }
        };
        if let Some(cause) = self.health.cause() {
            return Err(Error::Peer(cause.to_owned()));
        }
        inner.sequence += 1;
        let header = Header {
            sequence: inner.sequence,
            id,
            payload: 0,
        };
        let context = Context {
            members: &self.members,
            header,
            health: &self.health,
            timeout: self.timeout,
            counter: self.counter(id.scope),
        };
        run(&mut inner.transport, &context).map_err(|cause| self.health.fail(&cause))
    }
}

impl<T: Transport> Steps for Leaf<T> {
    fn place(&self) -> usize {
        self.members.me
    }

    fn num_ranks(&self) -> usize {
        self.members.ranks.len()
    }

    fn run_len(&self) -> usize {
        self.members.ranks.len()
    }

    fn scope(&self) -> Scope {
        self.scope
    }

    fn all_gather_step(&self, id: CallId, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.step(id, |t, cx| t.all_gather(cx, send, recv))
    }

    fn reduce_scatter_step(
        &self,
        id: CallId,
        op: ReduceOp,
        send: &[f32],
        recv: &mut [f32],
    ) -> Result<()> {
        self.step(id, |t, cx| t.reduce_scatter(cx, op, send, recv))
    }

    fn all_to_all_step(&self, id: CallId, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<()> {
        let me = self.members.me;
        assert_eq!(send[me].len(), recv[me].len(), "all_to_all: own piece");
        self.step(id, |t, cx| t.all_to_all(cx, send, recv))
    }

    fn broadcast_step(&self, id: CallId, data: &mut [u8], root: usize) -> Result<()> {
        self.step(id, |t, cx| t.broadcast(cx, data, root))
    }

    fn scratch(&self) -> MutexGuard<'_, Vec<f32>> {
        // What a panicking call left in it is overwritten.
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step_volume(&self, call: Call) -> LinkBytes {
        let payload = |place: usize| match call {
            Call::AllGather { piece_bytes } | Call::ReduceScatter { piece_bytes } => piece_bytes,
            Call::AllToAll { recv_bytes } => recv_bytes[place],
            Call::Broadcast { bytes, root } if place == root => bytes,
            Call::Broadcast { .. } | Call::Barrier => 0,
            Call::AllReduce { .. } => unreachable!("made of other steps"),
        };
        let mut volume = LinkBytes::default();
        for place in (0..self.num_ranks()).filter(|&place| place != self.members.me) {
            let bytes = T::HEADER_BYTES + payload(place) as u64;
            volume += self.members.bytes_from(place, bytes);
        }
        volume
    }

    fn received_in(&self, scope: Scope) -> LinkBytes {
        let counter = self.counter(scope);
        LinkBytes {
            intra_bytes: counter.intra_bytes.load(Ordering::Relaxed),
            inter_bytes: counter.inter_bytes.load(Ordering::Relaxed),
        }
    }
}
