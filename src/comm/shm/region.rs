//! The memory that the ranks of a group share, and where what lies in it.
//!
//! Each (writer, reader) pair has a lane: a ring of slots that the writer fills and the reader
//! empties. The lane of a rank with itself is its broadcast lane, which all others read. Heads count
//! slots filled and tails slots emptied, since the beginning. Words that different ranks write lie on
//! different cache lines, except the bells, which everybody rings.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapMut, MmapOptions, MmapRaw};

use crate::comm::sys;

/// Slots of a lane.
pub(super) const NUM_SLOTS: usize = 4;

/// Two cache lines: the processor fetches them in pairs.
const LINE: usize = 128;

const PAGE: usize = 4096;

/// All lanes of a group together, size x size x [`NUM_SLOTS`] slots: a container often has 64 MiB of
/// shared memory. With the smallest slots 45 ranks fit; the ranks of a larger node use TCP.
const MAX_LANE_BYTES: usize = 32 << 20;

const SLOT_BYTES: std::ops::RangeInclusive<usize> = PAGE..=256 << 10;

/// Of this layout: another version of it gets another number.
const MAGIC: u64 = u64::from_le_bytes(*b"trainsh2");

/// Where what lies; the same on every rank because it follows from the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    size: usize,
    slot_bytes: usize,
}

impl Layout {
    fn new(size: usize) -> Self {
        let fair = MAX_LANE_BYTES / (size * size * NUM_SLOTS).max(1);
        let slot_bytes = fair.clamp(*SLOT_BYTES.start(), *SLOT_BYTES.end()) / PAGE * PAGE;
        Self { size, slot_bytes }
    }

    /// That the lanes are no larger than a node's shared memory may be expected to hold.
    fn check(self) -> io::Result<Self> {
        if self.lane_bytes() <= MAX_LANE_BYTES {
            return Ok(self);
        }
        let what = format!(
            "{} ranks would take {} MiB of shared memory, and at most {} MiB are taken",
            self.size,
            self.lane_bytes() >> 20,
            MAX_LANE_BYTES >> 20
        );
        Err(io::Error::new(io::ErrorKind::Unsupported, what))
    }

    // Lines of one word or a few each; then lines of sizes of pieces, a row each writer.
    fn bells(&self) -> usize {
        LINE
    }
    fn calls(&self) -> usize {
        self.bells() + self.size * LINE
    }
    fn heads(&self) -> usize {
        self.calls() + 2 * self.size * LINE
    }
    fn tails(&self) -> usize {
        self.heads() + self.size * self.size * LINE
    }
    fn broadcast_tails(&self) -> usize {
        self.tails() + self.size * self.size * LINE
    }
    fn pieces(&self) -> usize {
        self.broadcast_tails() + self.size * self.size * LINE
    }
    fn pieces_of_writer(&self) -> usize {
        (2 * self.size * size_of::<u64>()).next_multiple_of(LINE)
    }
    fn data(&self) -> usize {
        (self.pieces() + self.size * self.pieces_of_writer()).next_multiple_of(PAGE)
    }
    fn lane_bytes(&self) -> usize {
        self.size * self.size * NUM_SLOTS * self.slot_bytes
    }
    fn len(&self) -> usize {
        self.data() + self.lane_bytes()
    }
}

/// Shared memory of a group of `size` ranks.
pub(crate) struct Region {
    map: MmapRaw,
    layout: Layout,
}

impl Region {
    /// Memory that the threads of this process share.
    pub(crate) fn anonymous(size: usize) -> io::Result<Self> {
        let layout = Layout::new(size);
        let map = MmapRaw::from(MmapMut::map_anon(layout.len())?);
        Ok(Self { map, layout }.signed())
    }

    /// A new file at `path`, which must not exist.
    pub(crate) fn create(path: &Path, size: usize) -> io::Result<Self> {
        let layout = Layout::new(size).check()?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        let made = sys::reserve(&file, layout.len() as u64).and_then(|()| Self::map(&file, layout));
        if made.is_err() {
            let _ = std::fs::remove_file(path);
        }
        Ok(made?.signed())
    }

    /// The file that another rank created.
    pub(crate) fn open(path: &Path, size: usize) -> io::Result<Self> {
        let layout = Layout::new(size);
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let found = file.metadata()?.len();
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if found != layout.len() as u64 {
            return wrong(format!("{found} bytes and not {}", layout.len()));
        }
        let region = Self::map(&file, layout)?;
        if region.word(0).load(Ordering::Acquire) != MAGIC {
            return wrong("not made by this version".into());
        }
        Ok(region)
    }

    fn map(file: &File, layout: Layout) -> io::Result<Self> {
        let map = MmapOptions::new()
            .len(layout.len())
            .populate()
            .map_raw(file)?;
        Ok(Self { map, layout })
    }

    fn signed(self) -> Self {
        self.word(0).store(MAGIC, Ordering::Release);
        self
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= self.layout.data() && offset.is_multiple_of(8));
        // SAFETY: the word lies in the map, is aligned (the map starts on a page), and everything
        // below `data` is only ever accessed through atomics.
        unsafe { &*self.map.as_mut_ptr().add(offset).cast::<AtomicU64>() }
    }

    fn line(&self, start: usize, i: usize) -> &AtomicU64 {
        self.word(start + i * LINE)
    }

    fn lane(&self, writer: usize, reader: usize) -> usize {
        assert!(writer < self.layout.size && reader < self.layout.size);
        writer * self.layout.size + reader
    }

    /// What others ring when there is something for `rank` to see, and whether it sleeps.
    pub(super) fn bell(&self, rank: usize) -> (&AtomicU32, &AtomicU32) {
        let offset = self.layout.bells() + rank * LINE;
        assert!(rank < self.layout.size);
        // SAFETY: as in `word`; the two halves of that word are accessed as halves only.
        unsafe {
            let start = self.map.as_mut_ptr().add(offset).cast::<AtomicU32>();
            (&*start, &*start.add(1))
        }
    }

    /// The words of the call that `rank` makes at even and at odd steps.
    pub(super) fn call(&self, rank: usize, odd: bool) -> [&AtomicU64; 3] {
        assert!(rank < self.layout.size);
        let start = self.layout.calls() + (2 * rank + usize::from(odd)) * LINE;
        [0, 8, 16].map(|word| self.word(start + word))
    }

    /// Bytes that `writer` has for `reader` at even and at odd steps.
    pub(super) fn piece(&self, writer: usize, reader: usize, odd: bool) -> &AtomicU64 {
        assert!(writer < self.layout.size && reader < self.layout.size);
        let row = self.layout.pieces() + writer * self.layout.pieces_of_writer();
        self.word(row + (2 * reader + usize::from(odd)) * size_of::<u64>())
    }

    /// Slots that `writer` has filled for `reader`, or for all when they are the same.
    pub(super) fn head(&self, writer: usize, reader: usize) -> &AtomicU64 {
        self.line(self.layout.heads(), self.lane(writer, reader))
    }

    /// Slots of their lane that `reader` has emptied.
    pub(super) fn tail(&self, writer: usize, reader: usize) -> &AtomicU64 {
        self.line(self.layout.tails(), self.lane(writer, reader))
    }

    /// Slots of the broadcast lane of `writer` that `reader` has emptied.
    pub(super) fn broadcast_tail(&self, writer: usize, reader: usize) -> &AtomicU64 {
        self.line(self.layout.broadcast_tails(), self.lane(writer, reader))
    }

    /// Bytes of a slot.
    pub(super) fn slot_bytes(&self) -> usize {
        self.layout.slot_bytes
    }

    fn slot(&self, writer: usize, reader: usize, count: u64) -> *mut u8 {
        let slot = self.lane(writer, reader) * NUM_SLOTS + (count % NUM_SLOTS as u64) as usize;
        let offset = self.layout.data() + slot * self.layout.slot_bytes;
        debug_assert!(offset + self.layout.slot_bytes <= self.layout.len());
        // SAFETY: the slot lies in the map.
        unsafe { self.map.as_mut_ptr().add(offset) }
    }

    /// Copies `chunk` into slot `count` of the lane.
    ///
    /// # Safety
    /// The caller is the lane's only writer and has seen, with acquire, the tail of every reader
    /// above `count - NUM_SLOTS`: nobody reads the slot.
    pub(super) unsafe fn fill(&self, writer: usize, reader: usize, count: u64, chunk: &[u8]) {
        assert!(chunk.len() <= self.layout.slot_bytes);
        // SAFETY: the chunk fits, and nobody else accesses the slot now.
        unsafe {
            std::ptr::copy_nonoverlapping(
                chunk.as_ptr(),
                self.slot(writer, reader, count),
                chunk.len(),
            )
        };
    }

    /// The first `len` bytes of slot `count` of the lane.
    ///
    /// # Safety
    /// The caller has seen, with acquire, the head above `count`, and keeps the slice only until it
    /// stores its tail above `count`: the writer does not touch the slot.
    pub(super) unsafe fn filled(
        &self,
        writer: usize,
        reader: usize,
        count: u64,
        len: usize,
    ) -> &[u8] {
        assert!(len <= self.layout.slot_bytes);
        // SAFETY: the bytes are initialised (the map starts as zeros) and nobody writes them now.
        unsafe { std::slice::from_raw_parts(self.slot(writer, reader, count), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_for_any_number_of_ranks() {
        for size in 1..=200 {
            let layout = Layout::new(size);
            assert_eq!(layout.check().is_ok(), size <= 45, "{size} ranks");
            if size <= 45 {
                assert!(layout.len() <= 33 << 20, "{size} ranks: {}", layout.len());
            }
        }
        assert_eq!(Layout::new(4).slot_bytes, 256 << 10);
        assert_eq!(Layout::new(32).slot_bytes, 8 << 10);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("region");
        let refused = Region::create(&path, 46).map(drop).unwrap_err().to_string();
        assert!(refused.contains("46 ranks would take 33 MiB"), "{refused}");
        assert!(!path.exists());
    }
}
