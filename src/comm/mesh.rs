//! Makes the connections between all ranks: the higher rank calls, the lower one listens.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::bootstrap::Bootstrap;
use super::frame::{Frame, MAX_CONTENT};
use super::handshake::{
    self, Channel, HELLO_BYTES, Hello, OPENING_BYTES, REPLY_BYTES, Reply, VERSION,
};
use super::health::ranks;
use super::sys::{self, Watch};
use super::{LocalTransport, Topology};
use crate::{Error, Result};

/// How long a caller may take to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Between two attempts to reach a listener.
const RETRY: Duration = Duration::from_millis(50);

/// Connections by channel and rank.
pub(super) struct Mesh(Vec<Vec<Option<TcpStream>>>);

impl Mesh {
    /// The connection with `rank`.
    pub(super) fn get(&self, channel: Channel, rank: usize) -> &TcpStream {
        self.0[channel as usize][rank].as_ref().expect("connected")
    }

    /// The connections with `ranks`; None where there is none, as with this rank itself.
    pub(super) fn take(&mut self, channel: Channel, ranks: Vec<usize>) -> Vec<Option<TcpStream>> {
        let row = &mut self.0[channel as usize];
        ranks.into_iter().map(|rank| row[rank].take()).collect()
    }
}

/// Whether the job has a connection on `channel` between this rank and `peer`.
fn is_needed(topology: Topology, local: LocalTransport, channel: Channel, peer: usize) -> bool {
    let peer = Topology {
        rank: peer,
        ..topology
    };
    topology.rank != peer.rank
        && match channel {
            Channel::Control => true,
            Channel::Local => topology.node() == peer.node() && local != LocalTransport::Shm,
            Channel::Cross => topology.local_rank() == peer.local_rank(),
            Channel::Direct => topology.num_nodes > 1 && topology.local_size > 1,
        }
}

/// What happens while connections are made.
enum Event {
    Connected(Channel, usize, TcpStream),
    /// The job cannot start.
    Fatal(String),
    /// Worth a line if the job does not come together, by rank or about nobody in particular.
    Note(Option<usize>, String),
}

/// What all helper threads share.
struct Shared {
    topology: Topology,
    local: LocalTransport,
    token: [u8; 32],
    stop: AtomicBool,
    /// Callers who have not said hello yet.
    callers: AtomicUsize,
}

/// Makes all connections, or names the ranks that are missing at `deadline`.
pub(super) fn connect(bootstrap: Bootstrap, deadline: Instant) -> Result<Mesh> {
    let topology = bootstrap.topology;
    let (world, me, local) = (topology.world(), topology.rank, bootstrap.options.local);
    let shared = Arc::new(Shared {
        topology,
        local,
        token: bootstrap.token,
        stop: AtomicBool::new(false),
        callers: AtomicUsize::new(0),
    });
    let (events, inbox) = channel();
    let refused = |e| Error::Config(format!("cannot connect with the other ranks: {e}"));
    let spawn = |f: Box<dyn FnOnce() + Send>| {
        std::thread::Builder::new()
            .name("connect".into())
            .spawn(f)
            .map_err(refused)
    };
    for peer in 0..me {
        let (shared, events, addr) = (shared.clone(), events.clone(), bootstrap.addrs[peer]);
        spawn(Box::new(move || {
            call(&shared, peer, addr, deadline, &events)
        }))?;
    }
    let (listening, called, listener) = (shared.clone(), events, bootstrap.listener);
    spawn(Box::new(move || listen(&listening, &listener, &called)))?;

    let mut mesh = Mesh(
        (Channel::ALL.iter())
            .map(|_| (0..world).map(|_| None).collect())
            .collect(),
    );
    let needed = |channel, peer| is_needed(topology, local, channel, peer);
    let mut num_missing = (Channel::ALL.iter())
        .map(|&channel| (0..world).filter(|&peer| needed(channel, peer)).count())
        .sum::<usize>();
    let mut notes: Vec<(Option<usize>, String)> = Vec::new();
    let result = loop {
        if num_missing == 0 {
            break Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        match inbox.recv_timeout(left) {
            Ok(Event::Connected(channel, peer, stream)) => {
                let place = &mut mesh.0[channel as usize][peer];
                if place.is_none() {
                    num_missing -= 1;
                    *place = Some(stream);
                }
            }
            Ok(Event::Fatal(why)) => break Err(why),
            Ok(Event::Note(about, what)) => {
                tracing::debug!("{what}");
                notes.retain(|(who, _)| who.is_none() || *who != about);
                notes.push((about, what));
                notes.truncate(world + 8);
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let lacks = |&peer: &usize| {
                    (Channel::ALL.iter())
                        .any(|&c| needed(c, peer) && mesh.0[c as usize][peer].is_none())
                };
                let missing: Vec<usize> = (0..world).filter(lacks).collect();
                let mut text = format!(
                    "rank {me} waited {} s for connections with {}",
                    bootstrap.options.timeout.as_secs_f64(),
                    ranks(&missing)
                );
                for (about, what) in &notes {
                    if about.is_none_or(|rank| missing.contains(&rank)) {
                        text += &format!("; {what}");
                    }
                }
                break Err(text);
            }
        }
    };
    shared.stop.store(true, Ordering::Relaxed);
    result.map(|()| mesh).map_err(Error::Peer)
}

/// Connects to `peer` on every channel needed.
fn call(shared: &Shared, peer: usize, addr: SocketAddr, deadline: Instant, events: &Sender<Event>) {
    for channel in Channel::ALL {
        if !is_needed(shared.topology, shared.local, channel, peer) {
            continue;
        }
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || shared.stop.load(Ordering::Relaxed) {
                return;
            }
            let answer = greet(shared, peer, addr, channel, left);
            let me = shared.topology.rank;
            let event = match answer {
                Ok((stream, Some(Reply::Welcome))) => Event::Connected(channel, peer, stream),
                Ok((_, Some(Reply::Version(version)))) => Event::Fatal(format!(
                    "rank {peer} at {addr} speaks version {version} of the protocol, this rank \
                     {VERSION}: start the same build on every node"
                )),
                Ok((_, Some(Reply::Token))) => Event::Fatal(format!(
                    "rank {peer} at {addr} refused this rank: it belongs to another job, or to another \
                     start of this one"
                )),
                Ok((_, Some(Reply::Place))) => Event::Fatal(format!(
                    "rank {peer} at {addr} expects no {channel:?} connection from rank {me}: do all \
                     ranks have the same topology?"
                )),
                Ok((_, Some(Reply::Options))) => {
                    Event::Fatal(format!("rank {peer} has another comm.local than rank {me}"))
                }
                Ok((_, None)) => Event::Note(
                    Some(peer),
                    format!("{addr} did not answer like rank {peer}"),
                ),
                Err(e) => Event::Note(
                    Some(peer),
                    format!("cannot reach rank {peer} at {addr}: {e}"),
                ),
            };
            let ends = matches!(event, Event::Fatal(_));
            let retries = matches!(event, Event::Note(..));
            if events.send(event).is_err() || ends {
                return;
            }
            if !retries {
                break;
            }
            std::thread::sleep(RETRY);
        }
    }
}

/// One attempt: connect, say hello, hear the answer.
fn greet(
    shared: &Shared,
    peer: usize,
    addr: SocketAddr,
    channel: Channel,
    timeout: Duration,
) -> io::Result<(TcpStream, Option<Reply>)> {
    let mut stream = TcpStream::connect_timeout(&addr, timeout)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    let hello = Hello {
        channel,
        local: shared.local,
        from: shared.topology.rank as u32,
        to: peer as u32,
        token: shared.token,
    };
    stream.write_all(&hello.encode())?;
    let mut reply = [0; REPLY_BYTES];
    stream.read_exact(&mut reply)?;
    Ok((stream, Reply::decode(&reply)))
}

/// Accepts callers until told to stop, each heard on a thread of its own: one who says nothing
/// holds up nobody.
fn listen(shared: &Arc<Shared>, listener: &TcpListener, events: &Sender<Event>) {
    let note = |what: String| {
        let _ = events.send(Event::Note(None, what));
    };
    if let Err(e) = listener.set_nonblocking(true) {
        return note(format!("cannot listen: {e}"));
    }
    let callers = &shared.callers;
    let most = 64 + Channel::ALL.len() * shared.topology.world();
    while !shared.stop.load(Ordering::Relaxed) {
        let mut watch = [Watch::new(listener.as_raw_fd(), true, false)];
        let _ = sys::poll(&mut watch, RETRY);
        while let Ok((stream, addr)) = listener.accept() {
            if callers.load(Ordering::Relaxed) >= most {
                continue;
            }
            callers.fetch_add(1, Ordering::Relaxed);
            let (shared, events) = (shared.clone(), events.clone());
            let heard = std::thread::Builder::new()
                .name("accept".into())
                .spawn(move || {
                    let event = match hear(&shared, stream) {
                        Ok((hello, stream)) => {
                            Event::Connected(hello.channel, hello.from as usize, stream)
                        }
                        Err(Refusal::Stranger(why)) => {
                            Event::Note(None, format!("refused {addr}: {why}"))
                        }
                        Err(Refusal::Rank(why)) => Event::Fatal(why),
                    };
                    let _ = events.send(event);
                    shared.callers.fetch_sub(1, Ordering::Relaxed);
                });
            if let Err(e) = heard {
                callers.fetch_sub(1, Ordering::Relaxed);
                note(format!("cannot hear a caller: {e}"));
            }
        }
    }
}

/// Why a caller was refused.
enum Refusal {
    /// Somebody else: the job goes on.
    Stranger(String),
    /// A rank of this job, which cannot work like that.
    Rank(String),
}

/// Hears one caller out and answers.
fn hear(
    shared: &Shared,
    mut stream: TcpStream,
) -> std::result::Result<(Hello, TcpStream), Refusal> {
    let stranger = |why: &str| Refusal::Stranger(why.to_owned());
    let broken = |e: io::Error| Refusal::Stranger(e.to_string());
    stream.set_nonblocking(false).map_err(broken)?;
    stream.set_nodelay(true).map_err(broken)?;
    stream
        .set_read_timeout(Some(HELLO_TIMEOUT))
        .map_err(broken)?;
    stream
        .set_write_timeout(Some(HELLO_TIMEOUT))
        .map_err(broken)?;
    let mut bytes = [0; HELLO_BYTES];
    let (start, rest) = bytes
        .split_first_chunk_mut::<OPENING_BYTES>()
        .expect("longer");
    stream.read_exact(start).map_err(broken)?;
    let version = handshake::opening(start).ok_or_else(|| stranger("not a rank of a job"))?;
    if version != VERSION {
        let _ = stream.write_all(&Reply::Version(VERSION).encode());
        return Err(Refusal::Stranger(format!(
            "it speaks version {version} of the protocol, this rank {VERSION}"
        )));
    }
    stream.read_exact(rest).map_err(broken)?;
    let hello = Hello::decode(&bytes).ok_or_else(|| stranger("a malformed hello"))?;
    let topology = shared.topology;
    let from = hello.from as usize;
    let expected = hello.to as usize == topology.rank
        && (topology.rank + 1..topology.world()).contains(&from)
        && is_needed(topology, hello.local, hello.channel, from);
    let me = topology.rank;
    let (reply, refusal) = if hello.token != shared.token {
        (Reply::Token, Some(stranger("it belongs to another job")))
    } else if hello.local != shared.local {
        let why = format!("rank {from} has another comm.local than rank {me}");
        (Reply::Options, Some(Refusal::Rank(why)))
    } else if !expected {
        let why = format!(
            "rank {me} expects no {:?} connection from rank {from}: do all ranks have the same \
             topology?",
            hello.channel
        );
        (Reply::Place, Some(Refusal::Rank(why)))
    } else {
        (Reply::Welcome, None)
    };
    stream.write_all(&reply.encode()).map_err(broken)?;
    match refusal {
        None => Ok((hello, stream)),
        Some(refusal) => Err(refusal),
    }
}

/// Sends `frame` to `rank`, blocking.
pub(super) fn write_frame(mut stream: &TcpStream, rank: usize, frame: &Frame) -> Result<()> {
    stream
        .write_all(&frame.encode())
        .map_err(|e| Error::Peer(format!("lost rank {rank}: {e}")))
}

/// The next frame from `rank`.
pub(super) fn read_frame(mut stream: &TcpStream, rank: usize, deadline: Instant) -> Result<Frame> {
    let lost = |e: io::Error| Error::Peer(format!("waiting for rank {rank} to share memory: {e}"));
    let left = deadline.saturating_duration_since(Instant::now());
    let least = Duration::from_millis(1);
    stream
        .set_read_timeout(Some(left.max(least)))
        .map_err(lost)?;
    let mut bytes = vec![0; 5];
    stream.read_exact(&mut bytes).map_err(lost)?;
    let len = u32::from_le_bytes(bytes[1..5].try_into().expect("4 bytes")) as usize;
    bytes.resize(5 + len.min(MAX_CONTENT), 0);
    stream.read_exact(&mut bytes[5..]).map_err(lost)?;
    match Frame::decode(&bytes) {
        Ok(Some((frame, _))) => Ok(frame),
        Ok(None) => Err(Error::Peer(format!("rank {rank} sent half a frame"))),
        Err(what) => Err(Error::Peer(format!("rank {rank} sent {what}"))),
    }
}
