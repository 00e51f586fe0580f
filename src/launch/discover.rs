//! Who am I: rank, world, node and rank 0's address, from flags or a launcher's variables.

use std::fmt;
use std::net::IpAddr;

use sha2::{Digest, Sha256};

use super::launchers::{Place, by_flags, hydra, is_srun, open_mpi, srun, torchrun};
use super::{Environment, LaunchFlags, Token};
use crate::{Error, Result};

/// Port of rank 0 where nothing else says one (MPI without a job id).
const DEFAULT_PORT: u16 = 29551;

/// Most ranks: beyond it a number is a mistake, and tables would take memory.
const MAX_WORLD: usize = 1 << 20;

/// Who said which rank this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `--rank` and `--world-size`.
    Flags,
    /// `train launch`.
    TrainLaunch,
    /// torchrun, or whatever else sets RANK and WORLD_SIZE.
    Torchrun,
    /// Open MPI's mpirun.
    OpenMpi,
    /// Hydra: MPICH's and Intel MPI's mpiexec.
    Pmi,
    /// srun.
    Slurm,
    /// Nobody: one rank.
    Single,
}

/// Where rank 0 can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// Host name or address.
    pub addr: String,
    /// Port, held by the launcher's store when `agent_store`.
    pub port: u16,
    /// Whether torchrun's agent serves a TCPStore at this port, so that rank 0 cannot listen there.
    pub agent_store: bool,
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.addr.contains(':') {
            true => write!(f, "[{}]:{}", self.addr, self.port),
            false => write!(f, "{}:{}", self.addr, self.port),
        }
    }
}

/// This process's place in the job, and how the job meets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This rank, `0..world`.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// This rank's place on its node, emulated nodes included.
    pub local_rank: usize,
    /// Ranks on its node, emulated nodes included.
    pub local_size: usize,
    /// Its node, emulated nodes included.
    pub node: usize,
    /// Nodes, emulated nodes included.
    pub num_nodes: usize,
    /// This rank's place on the machine it runs on, which chooses its device.
    pub host_rank: usize,
    /// Ranks on that machine, which share its cores.
    pub host_size: usize,
    /// Machines.
    pub num_hosts: usize,
    /// Who said so.
    pub source: Source,
    /// Where rank 0 can be reached; always there when `world > 1`.
    pub master: Option<Master>,
    /// What the launcher calls the job.
    pub run_id: String,
    /// How often the launcher has restarted it.
    pub restart_count: u32,
    /// Tells the job's ranks from strangers; also hashes TRAIN_JOB_SECRET when that is set.
    pub job_token: Token,
    /// Address to listen on, when told.
    pub bind_addr: Option<IpAddr>,
    /// Whether standard input is the socket on which rank 0 waits for the others (`train launch`).
    pub listens_on_stdin: bool,
    /// What a person should know although nothing is wrong.
    pub note: Option<String>,
}

/// [`discover_from`] the process's environment.
///
/// # Errors
/// As there.
pub fn discover(flags: &LaunchFlags) -> Result<Launch> {
    discover_from(flags, &Environment::of_process())
}

/// Finds this process's place. The first of these that is there wins: `--rank`, RANK/WORLD_SIZE
/// (`train launch`, torchrun), Open MPI, Hydra, Slurm. MPI comes before Slurm because mpirun starts its
/// daemons with srun, whose variables then describe the daemons.
///
/// # Errors
/// [`Error::Config`] naming the variable and its value when one does not parse, is missing beside
/// the others or contradicts them.
pub fn discover_from(flags: &LaunchFlags, env: &Environment) -> Result<Launch> {
    let mut place = match () {
        () if flags.rank.is_some() => by_flags(flags)?,
        () if env.has("RANK") || env.has("WORLD_SIZE") => torchrun(env)?,
        () if env.has("OMPI_COMM_WORLD_RANK") || env.has("OMPI_COMM_WORLD_SIZE") => open_mpi(env)?,
        () if env.has("PMI_RANK") && env.has("MPI_LOCALRANKID") => hydra(env)?,
        () if is_srun(env)? => srun(env)?,
        () if env.has("PMI_RANK") && env.number("PMI_SIZE")? != Some(1) => hydra(env)?,
        () => Place::single(env),
    };
    let names = place.names;
    let range = |name: &str, value: usize, of: &str, limit: usize| {
        if value < limit {
            return Ok(());
        }
        Err(Error::Config(format!(
            "{name} = {value} and {of} = {limit}: expected {name} to be 0..{}",
            limit.saturating_sub(1)
        )))
    };
    if place.world > MAX_WORLD {
        return Err(Error::Config(format!(
            "{} = {}: expected at most {MAX_WORLD} ranks",
            names.world, place.world
        )));
    }
    range(names.rank, place.rank, names.world, place.world)?;
    range(
        names.local_rank,
        place.host_rank,
        names.local_size,
        place.host_size,
    )?;
    range(names.node, place.host, names.num_nodes, place.num_hosts)?;
    if place.host_size.checked_mul(place.num_hosts) != Some(place.world) {
        return Err(Error::Config(format!(
            "{} = {}, {} = {} and {} = {}: start the same number of ranks on every node \
             (--nproc-per-node, --ntasks-per-node)",
            names.local_size,
            place.host_size,
            names.num_nodes,
            place.num_hosts,
            names.world,
            place.world
        )));
    }
    let master = master(flags, env, &mut place)?;
    let (node, num_nodes, local_rank, local_size) = nodes(flags, env, &place)?;
    let run_id = env.get("TRAIN_RUN_ID").map_or(place.run_id, str::to_string);
    Ok(Launch {
        rank: place.rank,
        world: place.world,
        local_rank,
        local_size,
        node,
        num_nodes,
        host_rank: place.host_rank,
        host_size: place.host_size,
        num_hosts: place.num_hosts,
        source: place.source,
        master,
        job_token: Token::of_job(&run_id, env.get("TRAIN_JOB_SECRET")),
        run_id,
        restart_count: place.restart_count,
        bind_addr: match flags.bind_addr {
            Some(ip) => Some(ip),
            None => env.bind_addr()?,
        },
        listens_on_stdin: place.rank == 0 && env.has("TRAIN_RENDEZVOUS_ON_STDIN"),
        note: place.note,
    })
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.source == Source::Single {
            return f.write_str("one rank: no launcher");
        }
        let source = match self.source {
            Source::Flags => "--rank",
            Source::TrainLaunch => "train launch",
            Source::Torchrun => "torchrun",
            Source::OpenMpi => "Open MPI",
            Source::Pmi => "PMI",
            Source::Slurm => "Slurm",
            Source::Single => unreachable!("returned above"),
        };
        let emulated = if self.num_nodes == self.num_hosts {
            ""
        } else {
            " (emulated)"
        };
        write!(
            f,
            "ranks from {source}: rank {} of {}, local rank {} of {} on node {} of {}{emulated}",
            self.rank, self.world, self.local_rank, self.local_size, self.node, self.num_nodes
        )?;
        if let Some(master) = &self.master {
            write!(f, ", master {master}")?;
        }
        if self.restart_count > 0 {
            write!(f, ", restart {}", self.restart_count)?;
        }
        Ok(())
    }
}

/// Rank 0's address: flags, then the environment, then what the launcher implies.
fn master(flags: &LaunchFlags, env: &Environment, place: &mut Place) -> Result<Option<Master>> {
    let given = flags.master_addr.as_deref().or(env.get("MASTER_ADDR"));
    let addr = given.map(str::to_string).or(place.master_addr.take());
    let port = match flags.master_port {
        Some(port) => Some(port),
        None => env.parsed("MASTER_PORT", "a port, 1..65535")?,
    };
    if port == Some(0) {
        return Err(Error::Config(
            "MASTER_PORT = 0: expected a port, 1..65535, the same on every rank".into(),
        ));
    }
    if place.world == 1 {
        return Ok(None);
    }
    let by_torchrun = matches!(place.source, Source::Torchrun | Source::TrainLaunch);
    let Some(addr) = addr else {
        return Err(match place.source {
            Source::Torchrun | Source::TrainLaunch => env.missing("MASTER_ADDR", "RANK"),
            _ => Error::Config(format!(
                "MASTER_ADDR is not set and {} ranks run on {} nodes: set MASTER_ADDR to a host name or \
                 address of rank 0 (or pass --master-addr)",
                place.world, place.num_hosts
            )),
        });
    };
    let port = match port {
        Some(port) => port,
        None if by_torchrun => return Err(env.missing("MASTER_PORT", "RANK")),
        None if place.source == Source::Flags => {
            return Err(Error::Config(
                "--rank without a port: pass --master-port or set MASTER_PORT".into(),
            ));
        }
        None => port_of(&place.run_id),
    };
    let agent_store = place.source == Source::Torchrun
        && given.is_some()
        && env.get("TORCHELASTIC_USE_AGENT_STORE") == Some("True");
    Ok(Some(Master {
        addr,
        port,
        agent_store,
    }))
}

/// A port that ranks of a job agree on and other jobs on the same machine seldom have: 20000..29999,
/// below those the system gives to outgoing connections.
fn port_of(run_id: &str) -> u16 {
    if run_id == "mpi" {
        return DEFAULT_PORT;
    }
    let hash = Sha256::digest(run_id);
    20000 + u16::from_le_bytes([hash[0], hash[1]]) % 10000
}

/// Node, nodes, local rank and local size, with `--emulate-nodes` applied.
fn nodes(
    flags: &LaunchFlags,
    env: &Environment,
    place: &Place,
) -> Result<(usize, usize, usize, usize)> {
    let (name, emulated) = match flags.emulate_nodes {
        Some(nodes) => ("--emulate-nodes", Some(nodes)),
        None => ("TRAIN_EMULATE_NODES", env.number("TRAIN_EMULATE_NODES")?),
    };
    let Some(nodes) = emulated else {
        return Ok((
            place.host,
            place.num_hosts,
            place.host_rank,
            place.host_size,
        ));
    };
    if nodes == 0 || !place.world.is_multiple_of(nodes) {
        return Err(Error::Config(format!(
            "{name} = {nodes} does not divide the {} ranks",
            place.world
        )));
    }
    if !nodes.is_multiple_of(place.num_hosts) {
        return Err(Error::Config(format!(
            "{name} = {nodes} with {} machines: an emulated node would span two of them; expected a \
             multiple of {}",
            place.num_hosts, place.num_hosts
        )));
    }
    let local_size = place.world / nodes;
    Ok((
        place.rank / local_size,
        nodes,
        place.rank % local_size,
        local_size,
    ))
}

/// Whether a host name or address means this machine and nothing else.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}
