//! One rank's ends of the lanes: filling, emptying, announcing, waiting.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::region::{NUM_SLOTS, Region};
use crate::comm::call_id::Header;
use crate::comm::health::WAIT_SLICE;
use crate::comm::sys;

/// Looks at the bell before a rank sleeps, when every rank can have a core of its own: about 20
/// microseconds, what a sleep and a wake-up cost. With more ranks than cores the one that is waited
/// for needs this core.
const SPINS: u32 = 400;

/// Which lane of a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    /// The lane to one reader.
    One(usize),
    /// The broadcast lane.
    All,
}

/// The lanes of one rank.
pub(super) struct Lanes {
    region: Arc<Region>,
    me: usize,
    size: usize,
    spins: u32,
    /// Slots filled, by reader; the entry of this rank is the broadcast lane.
    filled: Vec<u64>,
    /// Slots emptied, by writer: of the lane to this rank, and of the broadcast lane.
    emptied: Vec<[u64; 2]>,
}

impl Lanes {
    pub(super) fn new(region: Arc<Region>, me: usize, size: usize) -> Self {
        let spins = if crate::runtime::num_cores() >= size {
            SPINS
        } else {
            0
        };
        Self {
            region,
            me,
            size,
            spins,
            filled: vec![0; size],
            emptied: vec![[0; 2]; size],
        }
    }

    pub(super) fn me(&self) -> usize {
        self.me
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn slot_bytes(&self) -> usize {
        self.region.slot_bytes()
    }

    /// Whether the next slot of this rank's lane is free.
    pub(super) fn has_room(&self, to: To) -> bool {
        match to {
            To::One(reader) => self.has_emptied(to, reader),
            To::All => self.others().all(|reader| self.has_emptied(to, reader)),
        }
    }

    /// The readers whose turn it is to empty a slot.
    pub(super) fn behind(&self, to: To) -> Vec<usize> {
        let reads = |reader: &usize| to == To::All || to == To::One(*reader);
        let is_behind = |reader: &usize| reads(reader) && !self.has_emptied(to, *reader);
        self.others().filter(is_behind).collect()
    }

    fn has_emptied(&self, to: To, reader: usize) -> bool {
        let tail = match to {
            To::One(_) => self.region.tail(self.me, reader),
            To::All => self.region.broadcast_tail(self.me, reader),
        };
        self.filled[self.reader(to)] < tail.load(Ordering::Acquire) + NUM_SLOTS as u64
    }

    /// Fills the next slot, which must be free, and rings.
    pub(super) fn fill(&mut self, to: To, chunk: &[u8]) {
        debug_assert!(self.has_room(to));
        let reader = self.reader(to);
        let count = self.filled[reader];
        // SAFETY: only this rank writes its lanes, and `has_room` saw the slot emptied.
        unsafe { self.region.fill(self.me, reader, count, chunk) };
        self.filled[reader] = count + 1;
        self.region
            .head(self.me, reader)
            .store(count + 1, Ordering::Release);
        match to {
            To::One(reader) => self.ring(reader),
            To::All => self.others().for_each(|reader| self.ring(reader)),
        }
    }

    /// The first `len` bytes of the next slot from `writer`, if it is filled.
    pub(super) fn next(&self, writer: usize, broadcast: bool, len: usize) -> Option<&[u8]> {
        let reader = if broadcast { writer } else { self.me };
        let count = self.emptied[writer][usize::from(broadcast)];
        let head = self.region.head(writer, reader).load(Ordering::Acquire);
        // SAFETY: the head says it is filled; the borrow ends before `empty`, which needs `&mut self`.
        (head > count).then(|| unsafe { self.region.filled(writer, reader, count, len) })
    }

    /// Gives the next slot from `writer` back, and rings.
    pub(super) fn empty(&mut self, writer: usize, broadcast: bool) {
        let count = &mut self.emptied[writer][usize::from(broadcast)];
        *count += 1;
        let tail = if broadcast {
            self.region.broadcast_tail(writer, self.me)
        } else {
            self.region.tail(writer, self.me)
        };
        tail.store(*count, Ordering::Release);
        self.ring(writer);
    }

    /// Announces this rank's call and what it has for each rank.
    ///
    /// Two places in turn are enough: a rank announces step s + 2 after all have announced s + 1,
    /// which they do after they have read everybody's s.
    pub(super) fn announce(&self, header: Header, bytes_for: impl Fn(usize) -> u64) {
        let odd = header.sequence % 2 == 1;
        for reader in self.others() {
            let piece = self.region.piece(self.me, reader, odd);
            piece.store(bytes_for(reader), Ordering::Relaxed);
        }
        let [sequence, kind, bytes, _] = header.to_words();
        let call = self.region.call(self.me, odd);
        call[1].store(kind, Ordering::Relaxed);
        call[2].store(bytes, Ordering::Relaxed);
        call[0].store(sequence, Ordering::Release);
        self.others().for_each(|rank| self.ring(rank));
    }

    /// What `rank` announced for step `sequence`; the inner None for words that make no call.
    pub(super) fn announced(&self, rank: usize, sequence: u64) -> Option<Option<Header>> {
        let odd = sequence % 2 == 1;
        let call = self.region.call(rank, odd);
        if call[0].load(Ordering::Acquire) != sequence {
            return None;
        }
        let [kind, bytes] = [1, 2].map(|i: usize| call[i].load(Ordering::Relaxed));
        let piece = self
            .region
            .piece(rank, self.me, odd)
            .load(Ordering::Relaxed);
        Some(Header::from_words([sequence, kind, bytes, piece]))
    }

    /// How often this rank's bell has rung. To be read before looking for work.
    pub(super) fn rung(&self) -> u32 {
        self.region.bell(self.me).0.load(Ordering::Acquire)
    }

    /// Returns when the bell has rung since `seen`, or a while later.
    pub(super) fn wait(&self, seen: u32) {
        let (bell, asleep) = self.region.bell(self.me);
        for _ in 0..self.spins {
            if bell.load(Ordering::Acquire) != seen {
                return;
            }
            std::hint::spin_loop();
        }
        asleep.store(1, Ordering::Relaxed);
        // Either this load sees the ring, or the ringer's sees that this rank sleeps; the kernel
        // compares the bell once more.
        fence(Ordering::SeqCst);
        if bell.load(Ordering::Relaxed) == seen {
            sys::futex_wait(bell, seen, WAIT_SLICE);
        }
        asleep.store(0, Ordering::Relaxed);
    }

    fn ring(&self, rank: usize) {
        let (bell, asleep) = self.region.bell(rank);
        bell.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if asleep.load(Ordering::Relaxed) == 1 {
            sys::futex_wake(bell);
        }
    }

    fn reader(&self, to: To) -> usize {
        match to {
            To::One(reader) => reader,
            To::All => self.me,
        }
    }

    /// The other ranks, those after this one first, so that not all write to the same one at once.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, size) = (self.me, self.size);
        (1..size).map(move |i| (me + i) % size)
    }
}
