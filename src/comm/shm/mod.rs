//! Collectives through shared memory: between threads of a process or processes of a host.
//!
//! Data moves in chunks through rings of slots that stay in cache. A rank writes what it has to
//! send and reads what has arrived in turn, one chunk each, and sleeps on one futex when it can do
//! neither. Reductions read straight from the slots. Headers are words of the shared memory and do
//! not count as received; data counts when it is copied or summed out of a slot.

mod copy;
mod lanes;
mod region;

use std::sync::Arc;

use self::copy::copy_past_cache;
use self::lanes::{Lanes, To};
pub(super) use self::region::Region;
use super::ReduceOp;
use super::health::Outcome;
use super::leaf::{Context, Transport};
use super::reduce::combine;

/// A rank's end of the shared memory.
pub(super) struct Shm {
    lanes: Lanes,
}

/// What a rank sends on one lane.
struct Out<'a> {
    to: To,
    rest: &'a [u8],
    /// Where the same bytes go on this rank: copied while they are in cache.
    mirror: Option<&'a mut [u8]>,
}

/// Where what arrives goes.
trait Sink {
    /// Uses at most one chunk from each rank in `ready` (checked headers); true if any.
    fn advance(&mut self, lanes: &mut Lanes, ready: &[bool], cx: &Context) -> bool;

    /// Whether something from the rank at `place` is still to come.
    fn waits_for(&self, place: usize) -> bool;

    /// Work that waits for nobody, a little of it; true if there was some.
    fn idle(&mut self) -> bool {
        false
    }
}

impl Shm {
    pub(super) fn new(region: Arc<Region>, me: usize, size: usize) -> Self {
        Self {
            lanes: Lanes::new(region, me, size),
        }
    }

    /// Runs one step: announces it, sends `outs`, checks that the others make the same call and have
    /// `expects` bytes for this rank, and feeds `sink`.
    fn run(
        &mut self,
        cx: &Context,
        outs: &mut [Out],
        sends: impl Fn(usize) -> u64,
        expects: impl Fn(usize) -> u64,
        sink: &mut dyn Sink,
    ) -> Outcome {
        let lanes = &mut self.lanes;
        let sequence = cx.header.sequence;
        lanes.announce(cx.header, sends);
        let mut arrived = vec![false; lanes.size()];
        arrived[lanes.me()] = true;
        let mut patience = cx.patience();
        loop {
            let rung = lanes.rung();
            let mut moved = false;
            for place in lanes.others() {
                if arrived[place] {
                    continue;
                }
                if let Some(theirs) = lanes.announced(place, sequence) {
                    cx.check(place, theirs, expects(place))?;
                    arrived[place] = true;
                    moved = true;
                }
            }
            let mut all_sent = true;
            for out in outs.iter_mut().filter(|out| !out.rest.is_empty()) {
                if lanes.has_room(out.to) {
                    out.send(lanes);
                    moved = true;
                }
                all_sent &= out.rest.is_empty();
            }
            moved |= sink.advance(lanes, &arrived, cx);
            let waits = |sink: &dyn Sink, place: usize| !arrived[place] || sink.waits_for(place);
            if all_sent && !lanes.others().any(|place| waits(sink, place)) {
                while sink.idle() {}
                return Ok(());
            }
            if moved || sink.idle() {
                patience.reset();
                continue;
            }
            let missing = || {
                let waits = |&place: &usize| waits(sink, place);
                let mut missing: Vec<usize> = lanes.others().filter(waits).collect();
                if missing.is_empty() {
                    // It is their turn to empty slots.
                    missing = (outs.iter().filter(|out| !out.rest.is_empty()))
                        .flat_map(|out| lanes.behind(out.to))
                        .collect();
                }
                missing.sort_unstable();
                missing.iter().map(|&p| cx.members.ranks[p]).collect()
            };
            patience.check(&cx.header.id, missing)?;
            lanes.wait(rung);
        }
    }
}

impl Out<'_> {
    fn send(&mut self, lanes: &mut Lanes) {
        let len = self.rest.len().min(lanes.slot_bytes());
        let (chunk, rest) = self.rest.split_at(len);
        lanes.fill(self.to, chunk);
        self.rest = rest;
        if let Some(mirror) = self.mirror.take() {
            let (copy, rest) = mirror.split_at_mut(len);
            copy_past_cache(chunk, copy);
            self.mirror = Some(rest);
        }
    }
}

/// Copies to where it belongs.
struct Copies<'a> {
    /// By place: what is still to be filled from there.
    rest: Vec<&'a mut [u8]>,
    broadcast: bool,
    /// This rank's own piece.
    own: (&'a [u8], &'a mut [u8]),
}

impl Sink for Copies<'_> {
    fn advance(&mut self, lanes: &mut Lanes, ready: &[bool], cx: &Context) -> bool {
        let mut moved = false;
        for place in lanes.others() {
            let rest = &mut self.rest[place];
            if rest.is_empty() || !ready[place] {
                continue;
            }
            let len = rest.len().min(lanes.slot_bytes());
            let Some(chunk) = lanes.next(place, self.broadcast, len) else {
                continue;
            };
            let target = rest.split_off_mut(..len).expect("at most the rest");
            copy_past_cache(chunk, target);
            lanes.empty(place, self.broadcast);
            cx.count(place, len as u64);
            moved = true;
        }
        moved
    }

    fn waits_for(&self, place: usize) -> bool {
        !self.rest[place].is_empty()
    }

    fn idle(&mut self) -> bool {
        const CHUNK: usize = 256 << 10;
        let (from, to) = &mut self.own;
        let len = from.len().min(CHUNK);
        let from = from.split_off(..len).expect("at most the rest");
        let to = to.split_off_mut(..len).expect("as long as its source");
        copy_past_cache(from, to);
        len > 0
    }
}

/// Combines in rank order, straight from the slots.
struct Reduction<'a> {
    op: ReduceOp,
    own: &'a [f32],
    rest: &'a mut [f32],
}

impl Sink for Reduction<'_> {
    fn advance(&mut self, lanes: &mut Lanes, ready: &[bool], cx: &Context) -> bool {
        let len = self.rest.len().min(lanes.slot_bytes() / size_of::<f32>());
        if len == 0 || ready.contains(&false) {
            return false;
        }
        let bytes = len * size_of::<f32>();
        let parts: Option<Vec<&[f32]>> = (0..lanes.size())
            .map(|place| {
                if place == lanes.me() {
                    Some(&self.own[..len])
                } else {
                    lanes.next(place, false, bytes).map(bytemuck::cast_slice)
                }
            })
            .collect();
        let Some(parts) = parts else {
            return false;
        };
        let target = self.rest.split_off_mut(..len).expect("at most the rest");
        combine(self.op, &parts, target);
        self.own = &self.own[len..];
        for place in lanes.others() {
            lanes.empty(place, false);
            cx.count(place, bytes as u64);
        }
        true
    }

    fn waits_for(&self, _: usize) -> bool {
        !self.rest.is_empty()
    }
}

impl Transport for Shm {
    const HEADER_BYTES: u64 = 0;

    fn all_gather(&mut self, cx: &Context, send: &[u8], recv: &mut [u8]) -> Outcome {
        let piece = send.len();
        let mut rest: Vec<&mut [u8]> = match piece {
            0 => cx.members.ranks.iter().map(|_| &mut [][..]).collect(),
            _ => recv.chunks_exact_mut(piece).collect(),
        };
        let mut outs = [Out {
            to: To::All,
            rest: send,
            mirror: Some(std::mem::take(&mut rest[self.lanes.me()])),
        }];
        let mut sink = Copies {
            rest,
            broadcast: true,
            own: (&[], &mut []),
        };
        let bytes = |_| piece as u64;
        self.run(cx, &mut outs, bytes, bytes, &mut sink)
    }

    fn reduce_scatter(
        &mut self,
        cx: &Context,
        op: ReduceOp,
        send: &[f32],
        recv: &mut [f32],
    ) -> Outcome {
        let piece = |place: usize| &send[place * recv.len()..(place + 1) * recv.len()];
        let mut outs: Vec<Out> = (self.lanes.others())
            .map(|place| Out {
                to: To::One(place),
                rest: bytemuck::cast_slice(piece(place)),
                mirror: None,
            })
            .collect();
        let bytes = size_of_val(recv) as u64;
        let mut sink = Reduction {
            op,
            own: piece(self.lanes.me()),
            rest: recv,
        };
        self.run(cx, &mut outs, |_| bytes, |_| bytes, &mut sink)
    }

    fn all_to_all(&mut self, cx: &Context, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Outcome {
        let me = self.lanes.me();
        let mut outs: Vec<Out> = (self.lanes.others())
            .map(|place| Out {
                to: To::One(place),
                rest: send[place],
                mirror: None,
            })
            .collect();
        let expected: Vec<u64> = recv.iter().map(|piece| piece.len() as u64).collect();
        let mut rest: Vec<&mut [u8]> = recv.iter_mut().map(|piece| &mut **piece).collect();
        let own = (send[me], std::mem::take(&mut rest[me]));
        let mut sink = Copies {
            rest,
            broadcast: false,
            own,
        };
        let bytes = |place: usize| send[place].len() as u64;
        self.run(cx, &mut outs, bytes, |place| expected[place], &mut sink)
    }

    fn broadcast(&mut self, cx: &Context, data: &mut [u8], root: usize) -> Outcome {
        let (me, size, bytes) = (self.lanes.me(), self.lanes.size(), data.len() as u64);
        let sends = |_| if me == root { bytes } else { 0 };
        let expects = |place| if place == root { bytes } else { 0 };
        let mut sink = Copies {
            rest: (0..size).map(|_| &mut [][..]).collect(),
            broadcast: true,
            own: (&[], &mut []),
        };
        if me == root {
            let mut outs = [Out {
                to: To::All,
                rest: data,
                mirror: None,
            }];
            self.run(cx, &mut outs, sends, expects, &mut sink)
        } else {
            sink.rest[root] = data;
            self.run(cx, &mut [], sends, expects, &mut sink)
        }
    }
}
