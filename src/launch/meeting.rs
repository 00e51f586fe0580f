//! Rank 0's side of the rendezvous: collects every rank's address and hands out the table.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Launch, frame};
use crate::{Error, Result};

/// Changes whenever [`Hello`] or [`Reply`] does.
pub const PROTOCOL: u32 = 1;

/// How long a connection may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Largest hello.
const MAX_HELLO_BYTES: usize = 4096;

/// Connections that may be saying who they are at once, beyond the ranks: later ones are closed.
const MAX_STRANGERS: usize = 64;

/// How often new connections are looked for.
const POLL: Duration = Duration::from_millis(10);

/// How often ranks are reported missing.
const REPORT: Duration = Duration::from_secs(20);

/// What a rank says when it arrives.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`] of its program.
    pub protocol: u32,
    /// [`Launch::job_token`] in hexadecimal.
    pub job_token: String,
    /// [`Launch::restart_count`].
    pub restart_count: u32,
    /// Its rank.
    pub rank: usize,
    /// The world size it was started with.
    pub world: usize,
    /// The node it runs on.
    pub node: usize,
    /// Where it listens.
    pub addr: SocketAddr,
}

/// What rank 0 answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// Welcome: others are missing, another reply follows.
    Wait,
    /// Everybody is here.
    Table(Table),
    /// Come again: this may pass.
    Later(String),
    /// The job cannot start as it is, or no longer.
    Failed(String),
    /// The job was started wrongly.
    Wrong(String),
}

/// Every rank's address and node, in rank order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// Where each rank listens.
    pub addrs: Vec<SocketAddr>,
    /// The node each rank runs on.
    pub nodes: Vec<usize>,
}

/// A rank that has arrived and waits for the table.
struct Arrived {
    stream: TcpStream,
    node: usize,
    addr: SocketAddr,
}

/// Whether the other side has closed its connection.
fn is_gone(stream: &TcpStream) -> bool {
    let peek = || {
        stream.set_nonblocking(true)?;
        let peeked = stream.peek(&mut [0]);
        stream.set_nonblocking(false)?;
        peeked
    };
    match peek() {
        Ok(count) => count == 0,
        Err(e) => e.kind() != ErrorKind::WouldBlock,
    }
}

/// Waits on `listener` until every rank has arrived, and hands each the table. Strangers are refused
/// and change nothing.
///
/// # Errors
/// [`Error::Peer`] naming the ranks that are missing after `timeout`, when a rank belongs to a later
/// restart, or when a rank leaves while the table is handed out.
pub fn host(
    listener: &TcpListener,
    launch: &Launch,
    own_addr: SocketAddr,
    timeout: Duration,
) -> Result<Table> {
    let failed = |what: &str, e: std::io::Error| Error::Peer(format!("{what}: {e}"));
    listener
        .set_nonblocking(true)
        .map_err(|e| failed("the socket of the rendezvous", e))?;
    let deadline = Instant::now() + timeout;
    let mut next_report = Instant::now() + REPORT;
    let mut arrived: BTreeMap<usize, Arrived> = BTreeMap::new();
    let mut hellos = Hellos::new(launch.world);
    while arrived.len() + 1 < launch.world {
        match listener.accept() {
            Ok((stream, peer)) => hellos.ask(stream, peer),
            // Out of descriptors or a connection that is gone again: others may still come.
            Err(_) => thread::sleep(POLL),
        }
        arrived.retain(|rank, rank_arrived| {
            let gone = is_gone(&rank_arrived.stream);
            if gone {
                tracing::warn!("rank {rank} left before all ranks had arrived");
            }
            !gone
        });
        while let Some((hello, mut stream, peer)) = hellos.next() {
            // A rank that gave up on a late rank 0 and came again has all its connections in the queue.
            if is_gone(&stream) {
                continue;
            }
            let there = |rank| {
                arrived
                    .get(&rank)
                    .filter(|a: &&Arrived| !is_gone(&a.stream))
            };
            let reply = match judge(launch, &hello, |rank| there(rank).map(|a| a.addr)) {
                Verdict::Welcome => {
                    let Hello {
                        rank, node, addr, ..
                    } = hello;
                    tracing::debug!("rank {rank} on node {node} listens on {addr}");
                    // Tells the rank that nobody else has this port. It comes again when this fails.
                    if frame::write(&mut stream, &Reply::Wait).is_ok() {
                        arrived.insert(rank, Arrived { stream, node, addr });
                    }
                    continue;
                }
                Verdict::Refuse(reply) => reply,
                Verdict::Outdated(reason) => {
                    refuse_all(&mut arrived, &Reply::Failed(reason.clone()));
                    return Err(Error::Peer(reason));
                }
            };
            let reason = reply.reason();
            tracing::warn!("refused rank {} from {peer}: {reason}", hello.rank);
            // It may be gone already.
            let _ = frame::write(&mut stream, &reply);
        }
        if Instant::now() > next_report {
            next_report += REPORT;
            tracing::info!("waiting for {}", missing(launch.world, &arrived));
        }
        if Instant::now() > deadline {
            let reason = format!(
                "{} did not arrive within {} s; see what they printed",
                missing(launch.world, &arrived),
                timeout.as_secs()
            );
            refuse_all(&mut arrived, &Reply::Failed(reason.clone()));
            return Err(Error::Peer(reason));
        }
    }
    let mut table = Table {
        addrs: vec![own_addr],
        nodes: vec![launch.node],
    };
    for rank in arrived.values() {
        table.addrs.push(rank.addr);
        table.nodes.push(rank.node);
    }
    let reply = Reply::Table(table.clone());
    let told = arrived.iter_mut().try_for_each(|(rank, rank_arrived)| {
        frame::write(&mut rank_arrived.stream, &reply)
            .map_err(|e| format!("rank {rank} left when all ranks had arrived: {e}"))
    });
    told.map_err(|reason| {
        // Those that wait for the table would call again, and find nobody.
        refuse_all(&mut arrived, &Reply::Failed(reason.clone()));
        Error::Peer(reason)
    })?;
    Ok(table)
}

impl Reply {
    fn reason(&self) -> &str {
        match self {
            Reply::Wait | Reply::Table(_) => "",
            Reply::Later(reason) | Reply::Failed(reason) | Reply::Wrong(reason) => reason,
        }
    }
}

/// What rank 0 thinks of a hello.
#[derive(Debug, PartialEq)]
enum Verdict {
    /// It is the rank it says.
    Welcome,
    /// It is not, and is told why.
    Refuse(Reply),
    /// It is, but the job has been restarted: rank 0 is a leftover.
    Outdated(String),
}

fn judge(launch: &Launch, hello: &Hello, arrived: impl Fn(usize) -> Option<SocketAddr>) -> Verdict {
    let wrong = |reason| Verdict::Refuse(Reply::Wrong(reason));
    if hello.protocol != PROTOCOL {
        return wrong(format!(
            "rank {} speaks version {} of the rendezvous, rank 0 version {PROTOCOL}: run the same build \
             on every node",
            hello.rank, hello.protocol
        ));
    }
    if hello.job_token != launch.job_token.to_hex() {
        // Rank 0 of the job before may still be about to end.
        return Verdict::Refuse(Reply::Later(format!(
            "rank 0 here belongs to another job ({:?}), or TRAIN_JOB_SECRET differs",
            launch.run_id
        )));
    }
    if hello.restart_count > launch.restart_count {
        return Verdict::Outdated(format!(
            "rank {} is in restart {} and rank 0 in restart {}: the job has been restarted elsewhere",
            hello.rank, hello.restart_count, launch.restart_count
        ));
    }
    if hello.restart_count < launch.restart_count {
        return Verdict::Refuse(Reply::Failed(format!(
            "rank {} is in restart {} and rank 0 in restart {} already",
            hello.rank, hello.restart_count, launch.restart_count
        )));
    }
    if hello.world != launch.world {
        return wrong(format!(
            "rank {} was started with {} ranks, rank 0 with {}: start the same job on every node",
            hello.rank, hello.world, launch.world
        ));
    }
    // Node numbers index a table: they are bounded like ranks.
    if hello.rank >= launch.world || hello.node >= launch.world {
        return wrong(format!(
            "rank {} on node {}: expected both below the {} ranks",
            hello.rank, hello.node, launch.world
        ));
    }
    if hello.rank == 0 {
        return wrong("two processes were started as rank 0".into());
    }
    if let Some(addr) = arrived(hello.rank) {
        return wrong(format!(
            "two processes were started as rank {}; the other listens on {addr}",
            hello.rank
        ));
    }
    Verdict::Welcome
}

/// "ranks 1, 3 of 4".
fn missing(world: usize, arrived: &BTreeMap<usize, Arrived>) -> String {
    let ranks: Vec<String> = (1..world)
        .filter(|rank| !arrived.contains_key(rank))
        .map(|rank| rank.to_string())
        .collect();
    let shown = ranks
        .iter()
        .take(16)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    let more = match ranks.len().saturating_sub(16) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {shown}{more} of {world}")
}

fn refuse_all(arrived: &mut BTreeMap<usize, Arrived>, reply: &Reply) {
    for rank in arrived.values_mut() {
        // It will find out by the closed connection otherwise.
        let _ = frame::write(&mut rank.stream, reply);
    }
}

/// Connections that are saying who they are, each on a thread of its own: a silent one holds up nobody.
struct Hellos {
    send: Sender<Answer>,
    receive: Receiver<Answer>,
    pending: usize,
    max_pending: usize,
}

type Answer = (std::io::Result<Hello>, TcpStream, SocketAddr);

impl Hellos {
    fn new(world: usize) -> Self {
        let (send, receive) = channel();
        Self {
            send,
            receive,
            pending: 0,
            max_pending: world + MAX_STRANGERS,
        }
    }

    fn ask(&mut self, mut stream: TcpStream, peer: SocketAddr) {
        if self.pending >= self.max_pending {
            return;
        }
        let send = self.send.clone();
        let spawned = thread::Builder::new()
            .name("rendezvous".into())
            .spawn(move || {
                let hello = stream.set_nonblocking(false).and_then(|()| {
                    let deadline = Instant::now() + HELLO_TIMEOUT;
                    frame::read(&mut stream, MAX_HELLO_BYTES, deadline)
                });
                // Rank 0 may have gone on without it.
                let _ = send.send((hello, stream, peer));
            });
        // Without a thread the connection closes, and its rank comes again.
        self.pending += usize::from(spawned.is_ok());
    }

    /// The next connection that has said who it is.
    fn next(&mut self) -> Option<(Hello, TcpStream, SocketAddr)> {
        loop {
            let (hello, stream, peer) = self.receive.try_recv().ok()?;
            self.pending -= 1;
            match hello {
                Ok(hello) => return Some((hello, stream, peer)),
                Err(e) => tracing::warn!("a stranger from {peer} was refused: {e}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;
    use crate::launch::{Environment, LaunchFlags, Token, discover_from};

    fn launch(rank: usize, world: usize) -> Launch {
        let flags = LaunchFlags {
            rank: Some(rank),
            world_size: Some(world),
            master_addr: Some("127.0.0.1".into()),
            master_port: Some(1),
            ..LaunchFlags::default()
        };
        discover_from(&flags, &Environment::default()).unwrap()
    }

    fn hello(rank: usize, world: usize) -> Hello {
        Hello {
            protocol: PROTOCOL,
            job_token: launch(0, world).job_token.to_hex(),
            restart_count: 0,
            rank,
            world,
            node: 0,
            addr: "127.0.0.1:7".parse().unwrap(),
        }
    }

    #[test]
    fn whoever_does_not_belong_is_told_why() {
        let base = Launch {
            restart_count: 2,
            ..launch(0, 4)
        };
        let judged = |change: &dyn Fn(&mut Hello)| {
            let mut hello = Hello {
                restart_count: 2,
                ..hello(1, 4)
            };
            change(&mut hello);
            let taken = |rank| (rank == 3).then(|| "127.0.0.1:9".parse().unwrap());
            judge(&base, &hello, taken)
        };
        assert_eq!(judged(&|_| ()), Verdict::Welcome);
        type Change<'a> = &'a dyn Fn(&mut Hello);
        let wrong: [(Change, &str); 6] = [
            (&|h| h.protocol = 9, "speaks version 9"),
            (&|h| h.world = 5, "started with 5 ranks, rank 0 with 4"),
            (&|h| h.rank = 4, "below the 4 ranks"),
            (&|h| h.node = usize::MAX, "below the 4 ranks"),
            (&|h| h.rank = 0, "two processes were started as rank 0"),
            (
                &|h| h.rank = 3,
                "as rank 3; the other listens on 127.0.0.1:9",
            ),
        ];
        for (change, part) in wrong {
            match judged(change) {
                Verdict::Refuse(Reply::Wrong(reason)) => assert!(reason.contains(part), "{reason}"),
                other => panic!("{part}: {other:?}"),
            }
        }
        let other_job = judged(&|h| h.job_token = Token::of_job("x", None).to_hex());
        assert!(matches!(other_job, Verdict::Refuse(Reply::Later(_))));
        assert!(matches!(
            judged(&|h| h.restart_count = 1),
            Verdict::Refuse(Reply::Failed(_))
        ));
        assert!(matches!(
            judged(&|h| h.restart_count = 3),
            Verdict::Outdated(_)
        ));
        // Without the job's token nobody ends it.
        let stranger = judged(&|h| (h.restart_count, h.job_token) = (3, "x".into()));
        assert!(matches!(stranger, Verdict::Refuse(Reply::Later(_))));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        /// Whatever strangers send, the ranks meet.
        #[test]
        fn strangers_change_nothing(
            garbage in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..6),
            framed in any::<bool>(),
        ) {
            let socket = TcpListener::bind("127.0.0.1:0").unwrap();
            let addr = socket.local_addr().unwrap();
            let own = "127.0.0.1:5".parse().unwrap();
            let timeout = Duration::from_secs(30);
            let host = thread::spawn(move || host(&socket, &launch(0, 2), own, timeout));
            let mut strangers = Vec::new();
            for bytes in garbage {
                let mut stream = TcpStream::connect(addr).unwrap();
                if framed {
                    stream.write_all(b"TRN1").unwrap();
                }
                stream.write_all(&bytes).unwrap();
                strangers.push(stream);
            }
            let mut stream = TcpStream::connect(addr).unwrap();
            frame::write(&mut stream, &hello(1, 2)).unwrap();
            let deadline = Instant::now() + timeout;
            let mut reply = || frame::read::<Reply>(&mut stream, 4096, deadline).unwrap();
            prop_assert_eq!(reply(), Reply::Wait);
            let table = Table { addrs: vec![own, hello(1, 2).addr], nodes: vec![0, 0] };
            prop_assert_eq!(reply(), Reply::Table(table.clone()));
            prop_assert_eq!(host.join().unwrap().unwrap(), table);
        }
    }

    #[test]
    fn a_rank_that_leaves_may_come_again() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = socket.local_addr().unwrap();
        let own = "127.0.0.1:5".parse().unwrap();
        let timeout = Duration::from_secs(30);
        let host = thread::spawn(move || host(&socket, &launch(0, 3), own, timeout));
        let arrive = |rank| {
            let mut stream = TcpStream::connect(addr).unwrap();
            frame::write(&mut stream, &hello(rank, 3)).unwrap();
            let reply: Reply = frame::read(&mut stream, 4096, Instant::now() + timeout).unwrap();
            (stream, reply)
        };
        drop(arrive(1));
        let again = arrive(1);
        assert_eq!(again.1, Reply::Wait);
        let last = arrive(2);
        assert_eq!(host.join().unwrap().unwrap().addrs.len(), 3);
        drop((again, last));
    }

    #[test]
    fn a_rank_that_came_twice_before_rank_0_is_welcome() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = socket.local_addr().unwrap();
        let come = || {
            let mut stream = TcpStream::connect(addr).unwrap();
            frame::write(&mut stream, &hello(1, 2)).unwrap();
            stream
        };
        // As a rank does that has heard nothing for too long.
        for _ in 0..8 {
            drop(come());
        }
        let mut stream = come();
        let timeout = Duration::from_secs(30);
        let own = "127.0.0.1:5".parse().unwrap();
        let table = host(&socket, &launch(0, 2), own, timeout).unwrap();
        let mut reply =
            || frame::read::<Reply>(&mut stream, 4096, Instant::now() + timeout).unwrap();
        assert_eq!(reply(), Reply::Wait);
        assert_eq!(reply(), Reply::Table(table));
    }
}
