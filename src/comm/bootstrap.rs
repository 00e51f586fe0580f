//! From addresses to groups: connections between all ranks.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::assemble::{Builder, Leaves};
use super::frame::Frame;
use super::handshake::Channel;
use super::health::{Health, Peers};
use super::leaf::Members;
use super::mesh::{self, Mesh, read_frame, write_frame};
use super::shm::{Region, Shm};
use super::sys;
use super::tcp::Tcp;
use super::watch::Lifeline;
use super::{CommConfig, Groups, LocalTransport, Topology};
use crate::{Error, Result};

/// How ranks talk.
#[derive(Clone, Copy, Debug)]
pub struct CommOptions {
    /// How long ranks wait for each other: for all connections, and in a collective while nothing
    /// moves.
    pub timeout: Duration,
    /// What carries data inside a node. The same on every rank.
    pub local: LocalTransport,
}

impl Default for CommOptions {
    fn default() -> Self {
        CommConfig::default().options()
    }
}

/// What a rank knows once all ranks have met.
#[derive(Debug)]
pub struct Bootstrap {
    /// This rank's place.
    pub topology: Topology,
    /// This rank's, listening.
    pub listener: TcpListener,
    /// The listener of every rank, in rank order.
    pub addrs: Vec<SocketAddr>,
    /// Of this job and start of it: strangers do not know it.
    pub token: [u8; 32],
    /// How ranks talk.
    pub options: CommOptions,
}

/// Connects this rank with all others and agrees on what carries data inside the node.
///
/// # Errors
/// [`Error::Peer`] naming the ranks that did not connect within the timeout, or the one that is of
/// another version, job or configuration; [`Error::Config`] when shared memory was required and
/// cannot be had.
pub fn connect(bootstrap: Bootstrap) -> Result<Groups> {
    let Bootstrap {
        topology, options, ..
    } = bootstrap;
    if bootstrap.addrs.len() != topology.world() {
        return Err(Error::Peer(format!(
            "{} addresses for {topology}",
            bootstrap.addrs.len()
        )));
    }
    if topology.world() == 1 {
        return Ok(Groups::solo());
    }
    let deadline = Instant::now() + options.timeout;
    let mut mesh = mesh::connect(bootstrap, deadline)?;
    let local = share_memory(topology, options.local, &mesh, deadline)?;
    let refused = |e| Error::Peer(format!("cannot set up connections: {e}"));
    let mut tcp = |channel, is_needed: bool, members: Members| {
        let tcp = || Tcp::new(mesh.take(channel, members.ranks)).map_err(refused);
        is_needed.then(tcp).transpose()
    };
    let (nodes, local_ranks) = (topology.num_nodes > 1, topology.local_size > 1);
    let over_tcp = local_ranks && local.is_none();
    let local_tcp = tcp(Channel::Local, over_tcp, Members::local(topology))?;
    let cross = tcp(Channel::Cross, nodes, Members::cross(topology))?;
    let direct = tcp(
        Channel::Direct,
        nodes && local_ranks,
        Members::world(topology),
    )?;
    let control = mesh.take(Channel::Control, (0..topology.world()).collect());
    for socket in control.iter().flatten() {
        socket.set_nonblocking(true).map_err(refused)?;
        sys::keep_alive(socket);
    }
    let health = Arc::new(Health::new(
        topology.rank,
        topology.world(),
        Peers::Sockets(control),
    ));
    let builder = Builder {
        topology,
        health: &health,
        timeout: options.timeout,
    };
    let leaves = Leaves {
        local: match (local, local_tcp) {
            (Some(region), _) => {
                let shm = Shm::new(region, topology.local_rank(), topology.local_size);
                Some(builder.local(shm))
            }
            (None, tcp) => tcp.map(|tcp| builder.local(tcp)),
        },
        cross: cross.map(|tcp| builder.cross(tcp)),
        direct: direct.map(|tcp| builder.direct(tcp)),
    };
    let lifeline = Lifeline::watch(health.clone())?;
    Ok(leaves.groups(topology, lifeline))
}

/// The memory that this node's ranks share, or None when they talk over TCP. All ranks of the node
/// come to the same result: local rank 0 makes a file, asks the others whether they see it, and
/// tells them what all do.
fn share_memory(
    topology: Topology,
    local: LocalTransport,
    mesh: &Mesh,
    deadline: Instant,
) -> Result<Option<Arc<Region>>> {
    let size = topology.local_size;
    if size == 1 || local == LocalTransport::Tcp {
        return Ok(None);
    }
    let leader = topology.node() * size;
    let socket = |rank| mesh.get(Channel::Control, rank);
    let told = |rank: usize, frame| {
        Error::Peer(format!("rank {rank} sent {frame:?} while sharing memory"))
    };
    let (region, decision) = if topology.rank == leader {
        let path = fresh_path();
        let region = Region::create(&path, size);
        let file = region.is_ok().then(|| Unlinked(&path));
        let offer = match &region {
            Ok(_) => Ok(path.display().to_string()),
            Err(e) => Err(format!(
                "rank {leader} cannot create {}: {e}",
                path.display()
            )),
        };
        let mut decision = offer.clone().map(|_| ());
        for rank in leader + 1..leader + size {
            write_frame(socket(rank), rank, &Frame::ShmOffer(offer.clone()))?;
        }
        for rank in leader + 1..leader + size {
            match read_frame(socket(rank), rank, deadline)? {
                Frame::ShmAnswer(answer) => decision = decision.and(answer),
                frame => return Err(told(rank, frame)),
            }
        }
        // All have it open, or nobody will: the name is not needed any more.
        drop(file);
        for rank in leader + 1..leader + size {
            write_frame(socket(rank), rank, &Frame::ShmDecision(decision.clone()))?;
        }
        (region.ok(), decision)
    } else {
        let region = match read_frame(socket(leader), leader, deadline)? {
            Frame::ShmOffer(Ok(path)) => Region::open(path.as_ref(), size)
                .map_err(|e| format!("rank {} cannot open {path}: {e}", topology.rank)),
            Frame::ShmOffer(Err(why)) => Err(why),
            frame => return Err(told(leader, frame)),
        };
        let answer = region.as_ref().map(|_| ()).map_err(String::clone);
        write_frame(socket(leader), leader, &Frame::ShmAnswer(answer))?;
        match read_frame(socket(leader), leader, deadline)? {
            Frame::ShmDecision(decision) => (region.ok(), decision),
            frame => return Err(told(leader, frame)),
        }
    };
    match (region, decision) {
        (Some(region), Ok(())) => Ok(Some(Arc::new(region))),
        (_, decision) => {
            let why = decision.err().unwrap_or_default();
            if local == LocalTransport::Shm {
                return Err(Error::Config(format!(
                    "comm.local = \"shm\", but {why}: give the ranks of a node one /dev/shm, or set \
                     \"auto\" or \"tcp\""
                )));
            }
            if topology.rank == leader {
                tracing::warn!("the ranks of node {} use TCP: {why}", topology.node());
            }
            Ok(None)
        }
    }
}

/// A file that is unlinked when this is dropped, by an error too.
struct Unlinked<'a>(&'a Path);

impl Drop for Unlinked<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0);
    }
}

/// A name that nobody has or can guess.
fn fresh_path() -> PathBuf {
    use std::hash::{BuildHasher, RandomState};
    let [a, b] = [0, 1].map(|i| RandomState::new().hash_one(i));
    PathBuf::from(format!("/dev/shm/train-{a:016x}{b:016x}"))
}
