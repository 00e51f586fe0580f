//! Collectives over TCP: one connection a pair, all of them progressed at once by one poll loop.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use super::ReduceOp;
use super::call_id::{HEADER_BYTES, Header};
use super::health::{Outcome, WAIT_SLICE};
use super::leaf::{Context, Transport};
use super::reduce::combine;
use super::sys::{self, Watch};

/// Most bytes of one system call, so that every connection gets its turn.
const CHUNK_BYTES: usize = 1 << 20;

/// Values that may arrive from a rank ahead of the slowest one, in a reduction.
const AHEAD: usize = 256 << 10;

/// Values worth a pass of adding.
const PASS: usize = 16 << 10;

/// Connections to the ranks of a group.
pub(super) struct Tcp {
    /// By place; none to itself. They do not block.
    streams: Vec<Option<TcpStream>>,
    /// Per place a ring of [`AHEAD`] values for reductions, once there was one.
    rings: Vec<f32>,
}

/// What a rank sends to one other.
struct Out<'a> {
    place: usize,
    header: [u8; HEADER_BYTES],
    data: &'a [u8],
    sent: usize,
}

/// What is to come from another rank.
struct In {
    place: usize,
    header: [u8; HEADER_BYTES],
    payload: usize,
    received: usize,
}

/// Where what arrives goes.
trait Sink {
    /// Room for bytes from the rank at `place`: empty when it is ahead of the others.
    fn room(&mut self, place: usize) -> &mut [u8];

    /// The next `len` bytes of that room are filled.
    fn filled(&mut self, place: usize, len: usize);
}

impl Out<'_> {
    fn done(&self) -> bool {
        self.sent == HEADER_BYTES + self.data.len()
    }

    fn advance(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        let data = &self.data[self.sent.saturating_sub(HEADER_BYTES)..];
        let header = &self.header[self.sent.min(HEADER_BYTES)..];
        let data = &data[..data.len().min(CHUNK_BYTES)];
        let sent = if header.is_empty() {
            transient(stream.write(data))?
        } else {
            transient(stream.write_vectored(&[IoSlice::new(header), IoSlice::new(data)]))?
        };
        self.sent += sent.unwrap_or(0);
        Ok(sent.is_some())
    }
}

impl In {
    fn done(&self) -> bool {
        self.received == HEADER_BYTES + self.payload
    }

    /// Reads what is there; true if anything.
    fn advance(
        &mut self,
        mut stream: &TcpStream,
        sink: &mut dyn Sink,
        cx: &Context,
    ) -> Result<bool, String> {
        let before = self.received;
        let header = &mut self.header[before.min(HEADER_BYTES)..];
        let room = match self.payload {
            0 => &mut [],
            _ => sink.room(self.place),
        };
        let room_bytes = room.len().min(CHUNK_BYTES);
        let room = &mut room[..room_bytes];
        let read = if header.is_empty() {
            if room.is_empty() {
                return Ok(false);
            }
            stream.read(room)
        } else {
            stream.read_vectored(&mut [IoSliceMut::new(header), IoSliceMut::new(room)])
        };
        let lost = |e: io::Error| cx.lost(self.place, &e.to_string());
        let Some(read) = transient(read).map_err(lost)? else {
            return Ok(false);
        };
        if read == 0 {
            return Err(cx.lost(self.place, "closed by the other side"));
        }
        self.received += read;
        cx.count(self.place, read as u64);
        if before < HEADER_BYTES && self.received >= HEADER_BYTES {
            let theirs = Header::decode(&self.header);
            cx.check(self.place, theirs, self.payload as u64)?;
        }
        let data = self.received.saturating_sub(HEADER_BYTES) - before.saturating_sub(HEADER_BYTES);
        if data > 0 {
            sink.filled(self.place, data);
        }
        Ok(true)
    }
}

/// None when the call would have blocked or was interrupted.
fn transient(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(n) => Ok(Some(n)),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(e) => Err(e),
    }
}

impl Tcp {
    /// Over connections to each rank of the group by place (none to itself).
    ///
    /// # Errors
    /// When a connection cannot be made not to block.
    pub(super) fn new(streams: Vec<Option<TcpStream>>) -> io::Result<Self> {
        for stream in streams.iter().flatten() {
            stream.set_nonblocking(true)?;
        }
        Ok(Self {
            streams,
            rings: Vec::new(),
        })
    }

    /// Runs one step: a header and `sends` to each rank, a header and `expects` bytes from each.
    fn run<'a>(
        streams: &[Option<TcpStream>],
        cx: &Context,
        sends: impl Fn(usize) -> &'a [u8],
        expects: impl Fn(usize) -> usize,
        sink: &mut dyn Sink,
    ) -> Outcome {
        let (me, size) = (cx.members.me, streams.len());
        // Those after this rank first, so that not all send to the same one at once.
        let others = || (1..size).map(move |i| (me + i) % size);
        let stream = |place: usize| streams[place].as_ref().expect("connected to all others");
        let mut outs: Vec<Out> = others()
            .map(|place| Out {
                place,
                header: Header {
                    payload: sends(place).len() as u64,
                    ..cx.header
                }
                .encode(),
                data: sends(place),
                sent: 0,
            })
            .collect();
        let mut ins: Vec<In> = others()
            .map(|place| In {
                place,
                header: [0; HEADER_BYTES],
                payload: expects(place),
                received: 0,
            })
            .collect();
        let mut watches = Vec::with_capacity(2 * size);
        let mut patience = cx.patience();
        loop {
            let mut moved = false;
            for out in &mut outs {
                let place = out.place;
                let lost = |e: io::Error| cx.lost(place, &e.to_string());
                moved |= out.advance(stream(place)).map_err(lost)?;
            }
            for incoming in &mut ins {
                moved |= incoming.advance(stream(incoming.place), sink, cx)?;
            }
            outs.retain(|out| !out.done());
            ins.retain(|incoming| !incoming.done());
            if outs.is_empty() && ins.is_empty() {
                return Ok(());
            }
            if moved {
                patience.reset();
                continue;
            }
            patience.check(&cx.header.id, || {
                let mut missing: Vec<usize> = match ins.as_slice() {
                    [] => outs.iter().map(|o| o.place).collect(),
                    _ => ins.iter().map(|i| i.place).collect(),
                };
                missing.sort_unstable();
                missing.iter().map(|&p| cx.members.ranks[p]).collect()
            })?;
            watches.clear();
            for out in &outs {
                watches.push(Watch::new(stream(out.place).as_raw_fd(), false, true));
            }
            for incoming in &ins {
                let reads =
                    incoming.received < HEADER_BYTES || !sink.room(incoming.place).is_empty();
                if reads {
                    watches.push(Watch::new(stream(incoming.place).as_raw_fd(), true, false));
                }
            }
            sys::poll(&mut watches, WAIT_SLICE).map_err(|e| format!("poll failed: {e}"))?;
        }
    }
}

/// Straight to where it belongs.
struct Copies<'a> {
    /// By place.
    rest: Vec<&'a mut [u8]>,
}

impl Sink for Copies<'_> {
    fn room(&mut self, place: usize) -> &mut [u8] {
        self.rest[place]
    }

    fn filled(&mut self, place: usize, len: usize) {
        let _filled = self.rest[place].split_off_mut(..len);
    }
}

/// Combines in rank order as far as all have arrived.
struct Reduction<'a> {
    op: ReduceOp,
    me: usize,
    own: &'a [f32],
    out: &'a mut [f32],
    /// Values combined.
    done: usize,
    /// Bytes arrived, by place; this rank's own piece is there.
    arrived: Vec<usize>,
    /// [`AHEAD`] values a place.
    rings: &'a mut [f32],
}

const VALUE: usize = size_of::<f32>();

impl Reduction<'_> {
    fn combine(&mut self) {
        let ready = self.arrived.iter().min().map_or(0, |bytes| bytes / VALUE);
        while self.done < ready && (ready - self.done >= PASS || ready == self.out.len()) {
            let at = self.done % AHEAD;
            let len = (ready - self.done).min(AHEAD - at);
            let parts: Vec<&[f32]> = (self.rings.chunks_exact(AHEAD).enumerate())
                .map(|(place, ring)| {
                    if place == self.me {
                        &self.own[self.done..self.done + len]
                    } else {
                        &ring[at..at + len]
                    }
                })
                .collect();
            let target = &mut self.out[self.done..self.done + len];
            combine(self.op, &parts, target);
            self.done += len;
        }
    }
}

impl Sink for Reduction<'_> {
    fn room(&mut self, place: usize) -> &mut [u8] {
        let arrived = self.arrived[place];
        let ring = &mut self.rings[place * AHEAD..(place + 1) * AHEAD];
        let end = ((self.done + AHEAD).min(self.out.len()) * VALUE) - arrived;
        let at = arrived % (AHEAD * VALUE);
        let ring: &mut [u8] = bytemuck::cast_slice_mut(ring);
        let end = (at + end).min(ring.len());
        &mut ring[at..end]
    }

    fn filled(&mut self, place: usize, len: usize) {
        self.arrived[place] += len;
        self.combine();
    }
}

impl Transport for Tcp {
    const HEADER_BYTES: u64 = HEADER_BYTES as u64;

    fn all_gather(&mut self, cx: &Context, send: &[u8], recv: &mut [u8]) -> Outcome {
        let piece = send.len();
        let mut rest: Vec<&mut [u8]> = match piece {
            0 => self.streams.iter().map(|_| &mut [][..]).collect(),
            _ => recv.chunks_exact_mut(piece).collect(),
        };
        rest[cx.members.me].copy_from_slice(send);
        Self::run(&self.streams, cx, |_| send, |_| piece, &mut Copies { rest })
    }

    fn reduce_scatter(
        &mut self,
        cx: &Context,
        op: ReduceOp,
        send: &[f32],
        recv: &mut [f32],
    ) -> Outcome {
        let (me, len) = (cx.members.me, recv.len());
        let piece = |place: usize| &send[place * len..(place + 1) * len];
        self.rings.resize(self.streams.len() * AHEAD, 0.0);
        let mut arrived = vec![0; self.streams.len()];
        arrived[me] = len * VALUE;
        let mut sink = Reduction {
            op,
            me,
            own: piece(me),
            out: recv,
            done: 0,
            arrived,
            rings: &mut self.rings,
        };
        let sends = |place| bytemuck::cast_slice(piece(place));
        Self::run(&self.streams, cx, sends, |_| len * VALUE, &mut sink)
    }

    fn all_to_all(&mut self, cx: &Context, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Outcome {
        let me = cx.members.me;
        recv[me].copy_from_slice(send[me]);
        let expected: Vec<usize> = recv.iter().map(|piece| piece.len()).collect();
        let rest = recv.iter_mut().map(|piece| &mut **piece).collect();
        Self::run(
            &self.streams,
            cx,
            |place| send[place],
            |place| expected[place],
            &mut Copies { rest },
        )
    }

    fn broadcast(&mut self, cx: &Context, data: &mut [u8], root: usize) -> Outcome {
        let bytes = data.len();
        let mut rest: Vec<&mut [u8]> = self.streams.iter().map(|_| &mut [][..]).collect();
        let mut send: &[u8] = &[];
        if cx.members.me == root {
            send = data;
        } else {
            rest[root] = data;
        }
        let expects = |place| if place == root { bytes } else { 0 };
        Self::run(&self.streams, cx, |_| send, expects, &mut Copies { rest })
    }
}
