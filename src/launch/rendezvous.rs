//! How the ranks meet: rank 0 listens where the others can find it, the others come to it.
//!
//! Under torchrun MASTER_PORT is taken by the agent's store: rank 0 then publishes its address there,
//! and listens on the next port in case the store cannot be used.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use super::address::{candidates, outgoing};
use super::meeting::{self, Hello, PROTOCOL, Reply, Table};
use super::tcp_store::TcpStore;
use super::{Launch, Master, frame};
use crate::comm::{Bootstrap, CommOptions, Topology};
use crate::{Error, Result};

/// How long one connection attempt may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// How long rank 0 may take to welcome a rank.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(10);

/// Between attempts.
const RETRY: Duration = Duration::from_millis(100);

/// How long rank 0 waits for a port that is taken: its predecessor may be about to end.
const BIND_PATIENCE: Duration = Duration::from_secs(15);

/// How long the others ask the store alone before they try the port beside it as well.
const STORE_PATIENCE: Duration = Duration::from_secs(5);

/// Rank 0 gives up first, so that everybody hears who is missing.
const ANSWER_MARGIN: Duration = Duration::from_secs(15);

/// What a table takes a rank, generously.
const TABLE_BYTES_PER_RANK: usize = 128;

/// Meets the other ranks, waiting for them as long as `options` says. None for a run of one rank, which
/// opens no socket.
///
/// # Errors
/// [`Error::Peer`] when ranks are missing after the timeout (naming them) or rank 0 cannot be
/// reached; [`Error::Config`] when the ranks were started differently or nodes are not equal.
pub fn join(launch: &Launch, options: CommOptions) -> Result<Option<Bootstrap>> {
    if launch.world == 1 {
        return Ok(None);
    }
    let master = launch.master.as_ref().ok_or_else(|| {
        Error::Config(
            "several ranks and no address of rank 0: set MASTER_ADDR and MASTER_PORT".into(),
        )
    })?;
    let (listener, table) = match launch.rank {
        0 => host(launch, master, options.timeout)?,
        _ => visit(launch, master, options.timeout)?,
    };
    Ok(Some(Bootstrap {
        topology: Topology::from_nodes(launch.rank, &table.nodes)?,
        listener,
        addrs: table.addrs,
        token: launch.job_token.of_start(launch.restart_count).0,
        options,
    }))
}

/// Rank 0: opens a socket, publishes its address if need be, and waits there.
fn host(launch: &Launch, master: &Master, timeout: Duration) -> Result<(TcpListener, Table)> {
    let socket = if launch.listens_on_stdin {
        inherited()?
    } else if master.agent_store {
        beside_store(launch, master)?
    } else {
        bind_patiently(&own_addrs(launch, master, master.port)?)?
    };
    let of_socket = |e| Error::Peer(format!("the socket of the rendezvous: {e}"));
    let socket_addr = socket.local_addr().map_err(of_socket)?;
    let listener = listen(launch, socket_addr.ip())?;
    let own_addr = listener.local_addr().map_err(of_socket)?;
    tracing::debug!("rank 0 waits for the others on {socket_addr}");
    let table = meeting::host(&socket, launch, own_addr, timeout)?;
    Ok((listener, table))
}

/// The socket that `train launch` opened and keeps open over restarts: nobody else can take its port.
fn inherited() -> Result<TcpListener> {
    let wrong = |e: std::io::Error| {
        Error::Config(format!(
            "TRAIN_RENDEZVOUS_ON_STDIN is set and standard input is no listening socket ({e}): unset \
             it, or start ranks with `train launch`"
        ))
    };
    let fd = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(wrong)?;
    let listener = TcpListener::from(fd);
    listener.local_addr().map_err(wrong)?;
    Ok(listener)
}

/// Where rank 0 may listen, best first.
fn own_addrs(launch: &Launch, master: &Master, port: u16) -> Result<Vec<SocketAddr>> {
    match launch.bind_addr {
        Some(ip) => Ok(vec![SocketAddr::new(ip, port)]),
        None => candidates(&master.addr, port, launch.num_hosts)
            .map_err(|e| Error::Config(format!("MASTER_ADDR = {e}"))),
    }
}

fn bind_patiently(addrs: &[SocketAddr]) -> Result<TcpListener> {
    let start = Instant::now();
    loop {
        let error = match TcpListener::bind(addrs) {
            Ok(listener) => return Ok(listener),
            Err(error) => error,
        };
        if error.kind() != ErrorKind::AddrInUse || start.elapsed() > BIND_PATIENCE {
            let what_to_do = match error.kind() {
                ErrorKind::AddrInUse => "another job has the port: choose another MASTER_PORT",
                ErrorKind::AddrNotAvailable => {
                    "rank 0 must run on the machine that MASTER_ADDR names"
                }
                _ => "choose another MASTER_ADDR or MASTER_PORT",
            };
            return Err(Error::Peer(format!(
                "rank 0 cannot listen on {addrs:?}: {error}; {what_to_do}"
            )));
        }
        thread::sleep(RETRY);
    }
}

/// The port beside the store's, known to everybody without the store.
fn port_beside(port: u16) -> u16 {
    port.checked_add(1).unwrap_or(port - 1)
}

/// The store's name for rank 0's address. A new start never reads the one before.
fn store_key(launch: &Launch) -> String {
    format!("/train/{}/{}/rank0", launch.run_id, launch.restart_count)
}

/// Connects to the agent's store.
fn store(launch: &Launch, master: &Master) -> std::result::Result<TcpStore, String> {
    let mut reason = String::new();
    for addr in candidates(&master.addr, master.port, launch.num_hosts)? {
        match TcpStore::connect(addr) {
            Ok(store) => return Ok(store),
            Err(e) => reason = format!("{addr}: {e}"),
        }
    }
    Err(reason)
}

/// Opens rank 0's socket beside the agent's store and publishes its address there.
fn beside_store(launch: &Launch, master: &Master) -> Result<TcpListener> {
    let beside = port_beside(master.port);
    let (mut store, ip) = match store(launch, master) {
        Ok(store) => {
            let local = store.local_ip().ok();
            // The way to the store is the way to the others, unless it stays inside this machine.
            let hidden = launch.num_hosts > 1 && local.is_some_and(|ip| ip.is_loopback());
            let hidden = hidden && !super::discover::is_loopback(&master.addr);
            (
                Some(store),
                if hidden { outgoing().or(local) } else { local },
            )
        }
        Err(e) => {
            tracing::warn!(
                "torchrun's store does not answer ({e}): rank 0 uses port {beside} instead"
            );
            (None, None)
        }
    };
    let ip = launch.bind_addr.or(ip);
    let addrs = match ip {
        Some(ip) => vec![SocketAddr::new(ip, beside)],
        None => own_addrs(launch, master, beside)?,
    };
    let socket = match (TcpListener::bind(&addrs[..]), ip) {
        (Ok(socket), _) => socket,
        // Any port will do where the store tells the others.
        (Err(_), Some(ip)) if store.is_some() => bind_patiently(&[SocketAddr::new(ip, 0)])?,
        _ => bind_patiently(&addrs)?,
    };
    if let Some(store) = &mut store {
        let addr = socket
            .local_addr()
            .map_err(|e| Error::Peer(format!("the socket of the rendezvous: {e}")))?;
        // On all interfaces: the one that reaches the store is the one to name.
        let ip = match store.local_ip() {
            Ok(ip) if addr.ip().is_unspecified() => ip,
            _ => addr.ip(),
        };
        let addr = SocketAddr::new(ip, addr.port());
        match store.set(&store_key(launch), addr.to_string().as_bytes()) {
            Ok(()) => tracing::info!(
                "rank 0 listens on {addr}, published in torchrun's store at {master}"
            ),
            Err(e) => tracing::warn!(
                "torchrun's store did not take rank 0's address ({e}): the others try port {beside}"
            ),
        }
    }
    Ok(socket)
}

/// Another rank: finds rank 0, says hello and waits for the table.
fn visit(launch: &Launch, master: &Master, timeout: Duration) -> Result<(TcpListener, Table)> {
    let start = Instant::now();
    let mut addrs = RankZeroAddrs::new(launch, master);
    let mut last = String::new();
    while start.elapsed() < timeout {
        for addr in addrs.candidates(start.elapsed(), &mut last) {
            match call(launch, addr, timeout) {
                Call::Met(met) => return Ok(met),
                Call::Over(error) => return Err(error),
                Call::Later(reason) => last = format!("{addr}: {reason}"),
            }
        }
        thread::sleep(RETRY);
    }
    Err(Error::Peer(format!(
        "rank {} did not reach rank 0 at {master} within {} s ({last}): is rank 0 running, and does no \
         firewall stand between?",
        launch.rank,
        timeout.as_secs()
    )))
}

/// Addresses at which rank 0 may be.
struct RankZeroAddrs<'a> {
    launch: &'a Launch,
    master: &'a Master,
    store: Option<TcpStore>,
}

impl<'a> RankZeroAddrs<'a> {
    fn new(launch: &'a Launch, master: &'a Master) -> Self {
        let store = match master.agent_store.then(|| store(launch, master)) {
            Some(Ok(store)) => Some(store),
            Some(Err(e)) => {
                let port = port_beside(master.port);
                tracing::warn!(
                    "torchrun's store does not answer ({e}): trying port {port} instead"
                );
                None
            }
            None => None,
        };
        Self {
            launch,
            master,
            store,
        }
    }

    /// Addresses to try now; why there are none goes to `last`.
    fn candidates(&mut self, waited: Duration, last: &mut String) -> Vec<SocketAddr> {
        let mut addrs = Vec::new();
        if let Some(store) = &mut self.store {
            match store.get(&store_key(self.launch)) {
                Ok(Some(value)) => match String::from_utf8_lossy(&value).parse() {
                    Ok(addr) => addrs.push(addr),
                    Err(_) => *last = format!("the store has {value:?} as rank 0's address"),
                },
                Ok(None) => *last = "rank 0 has not published its address in the store".into(),
                Err(e) => {
                    tracing::warn!("torchrun's store failed: {e}");
                    self.store = None;
                }
            }
        }
        let port = match self.master.agent_store {
            false => self.master.port,
            // Rank 0's port beside the store, which it takes when it can.
            true if self.store.is_none() || waited > STORE_PATIENCE => {
                port_beside(self.master.port)
            }
            true => return addrs,
        };
        // Machines come up in any order, and so do their names.
        match candidates(&self.master.addr, port, self.launch.num_hosts) {
            Ok(more) => addrs.extend(more),
            Err(e) => *last = e,
        }
        addrs
    }
}

/// How a call to what may be rank 0 ended.
enum Call {
    Met((TcpListener, Table)),
    Later(String),
    Over(Error),
}

fn call(launch: &Launch, addr: SocketAddr, timeout: Duration) -> Call {
    match try_call(launch, addr, timeout) {
        Ok((listener, Reply::Table(mut table))) => {
            let world = launch.world;
            if table.addrs.len() != world || table.nodes.len() != world || !in_range(&table) {
                return Call::Later(format!("a table that is not of {world} ranks"));
            }
            // A rank that listens on all interfaces is known by the one that was reached.
            if let Some(first) = table.addrs.first_mut().filter(|a| a.ip().is_unspecified()) {
                first.set_ip(addr.ip());
            }
            Call::Met((listener, table))
        }
        Ok((_, Reply::Wait)) => Call::Later("rank 0 asks to wait twice".into()),
        Ok((_, Reply::Later(reason))) => Call::Later(reason),
        Ok((_, Reply::Failed(reason))) => Call::Over(Error::Peer(reason)),
        Ok((_, Reply::Wrong(reason))) => Call::Over(Error::Config(reason)),
        Err(Trouble::Unreachable(reason)) => Call::Later(reason),
        Err(Trouble::Fatal(error)) => Call::Over(error),
    }
}

/// Node numbers index a table.
fn in_range(table: &Table) -> bool {
    table.nodes.iter().all(|node| *node < table.nodes.len())
}

enum Trouble {
    Unreachable(String),
    Fatal(Error),
}

fn try_call(
    launch: &Launch,
    addr: SocketAddr,
    timeout: Duration,
) -> std::result::Result<(TcpListener, Reply), Trouble> {
    let unreachable = |e: std::io::Error| Trouble::Unreachable(e.to_string());
    let mut stream = TcpStream::connect_timeout(&addr, CONNECT_TIMEOUT).map_err(unreachable)?;
    let local_ip = stream.local_addr().map_err(unreachable)?.ip();
    let listener = listen(launch, local_ip).map_err(Trouble::Fatal)?;
    let port = listener.local_addr().map_err(unreachable)?.port();
    let hello = Hello {
        protocol: PROTOCOL,
        job_token: launch.job_token.to_hex(),
        restart_count: launch.restart_count,
        rank: launch.rank,
        world: launch.world,
        node: launch.node,
        addr: SocketAddr::new(local_ip, port),
    };
    frame::write(&mut stream, &hello).map_err(unreachable)?;
    let max_bytes = (4096 + TABLE_BYTES_PER_RANK * launch.world).min(frame::MAX_BYTES);
    let mut reply = |patience| {
        frame::read(&mut stream, max_bytes, Instant::now() + patience)
            .map_err(|e| Trouble::Unreachable(format!("no answer as from rank 0: {e}")))
    };
    // The first answer comes at once, unless somebody else has the port or rank 0 has not started.
    match reply(WELCOME_TIMEOUT)? {
        Reply::Wait => Ok((listener, reply(timeout + ANSWER_MARGIN)?)),
        other => Ok((listener, other)),
    }
}

/// Listens for the other ranks' connections, on the interface that reaches the others or as told.
fn listen(launch: &Launch, ip: IpAddr) -> Result<TcpListener> {
    let ip = launch.bind_addr.unwrap_or(ip);
    TcpListener::bind((ip, 0))
        .map_err(|e| Error::Peer(format!("rank {} cannot listen on {ip}: {e}", launch.rank)))
}
