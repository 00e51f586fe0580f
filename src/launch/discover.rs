//! Who am I: rank, world, node and rank 0's address, from flags or a launcher's variables.

use std::fmt;
use std::net::IpAddr;

use sha2::{Digest, Sha256};

use super::slurm::{first_host, tasks_on_node};
use super::{Environment, LaunchFlags, Token};
use crate::{Error, Result};

/// Port of rank 0 where nothing else says one (MPI without a job id).
const DEFAULT_PORT: u16 = 29551;

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
    range(names.rank, place.rank, names.world, place.world)?;
    range(
        names.local_rank,
        place.host_rank,
        names.local_size,
        place.host_size,
    )?;
    range(names.node, place.host, names.num_nodes, place.num_hosts)?;
    if place.host_size > place.world {
        return Err(Error::Config(format!(
            "{} = {} and {} = {}: a node cannot have more ranks than the job",
            names.local_size, place.host_size, names.world, place.world
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
            None => env.parsed(
                "TRAIN_BIND_ADDR",
                "an IP address such as 10.0.0.1 or 0.0.0.0",
            )?,
        },
        listens_on_stdin: place.rank == 0 && env.has("TRAIN_RENDEZVOUS_ON_STDIN"),
        note: place.note,
    })
}

impl Launch {
    /// Compute threads of a rank when `train.threads` says nothing: an equal share of the machine's
    /// `cores`. OMP_NUM_THREADS is not asked: torchrun sets it to 1 for PyTorch's sake.
    pub fn default_threads(&self, cores: usize) -> usize {
        (cores / self.host_size).max(1)
    }
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
            write!(f, ", master {}:{}", master.addr, master.port)?;
        }
        if self.restart_count > 0 {
            write!(f, ", restart {}", self.restart_count)?;
        }
        Ok(())
    }
}

/// What the variables are called, for messages.
#[derive(Clone, Copy)]
struct Names {
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    node: &'static str,
    num_nodes: &'static str,
}

/// A place among machines, as one launcher says it.
struct Place {
    rank: usize,
    world: usize,
    host_rank: usize,
    host_size: usize,
    host: usize,
    num_hosts: usize,
    source: Source,
    names: Names,
    run_id: String,
    restart_count: u32,
    /// Host of rank 0, where the launcher says it.
    master_addr: Option<String>,
    note: Option<String>,
}

impl Place {
    fn single(env: &Environment) -> Self {
        // A batch script runs once, whatever the job's size.
        let tasks = env.get("SLURM_NTASKS").filter(|tasks| *tasks != "1");
        let note = tasks.map(|tasks| {
            format!(
                "a Slurm job of {tasks} tasks, but not started by srun: this is a run of one rank"
            )
        });
        Self {
            rank: 0,
            world: 1,
            host_rank: 0,
            host_size: 1,
            host: 0,
            num_hosts: 1,
            source: Source::Single,
            names: TORCHRUN,
            run_id: "single".into(),
            restart_count: 0,
            master_addr: None,
            note,
        }
    }
}

const TORCHRUN: Names = Names {
    rank: "RANK",
    world: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_size: "LOCAL_WORLD_SIZE",
    node: "GROUP_RANK",
    num_nodes: "GROUP_WORLD_SIZE",
};

fn by_flags(flags: &LaunchFlags) -> Result<Place> {
    let (Some(rank), Some(world)) = (flags.rank, flags.world_size) else {
        return Err(Error::Config("--rank and --world-size go together".into()));
    };
    let host_size = flags.ranks_per_node.unwrap_or(world);
    if host_size == 0 || world % host_size != 0 {
        return Err(Error::Config(format!(
            "--ranks-per-node {host_size} does not divide --world-size {world}"
        )));
    }
    Ok(Place {
        rank,
        world,
        host_rank: rank % host_size,
        host_size,
        host: rank / host_size,
        num_hosts: world / host_size,
        source: Source::Flags,
        names: Names {
            rank: "--rank",
            world: "--world-size",
            ..TORCHRUN
        },
        run_id: "flags".into(),
        restart_count: 0,
        master_addr: None,
        note: None,
    })
}

fn torchrun(env: &Environment) -> Result<Place> {
    let rank = env.required("RANK", "WORLD_SIZE")?;
    let world = env.required("WORLD_SIZE", "RANK")?;
    let is_train = env.has("TRAIN_LAUNCHER_PID");
    // RANK, WORLD_SIZE and MASTER_* alone, set by hand: fine where all ranks are on this machine.
    let on_loopback = env.get("MASTER_ADDR").is_some_and(is_loopback);
    let all_here = world == 1 || (on_loopback && !env.has("LOCAL_RANK"));
    let local = |name, here| match env.number(name)? {
        Some(value) => Ok(value),
        None if all_here => Ok(here),
        None => Err(env.missing(name, "RANK")),
    };
    let host_rank = local("LOCAL_RANK", rank)?;
    let host_size = local("LOCAL_WORLD_SIZE", world)?;
    // Nodes may differ in size and come in any order: only the launcher knows.
    let host = match env.number("GROUP_RANK")? {
        Some(host) => host,
        None if host_size == world => 0,
        None => return Err(env.missing("GROUP_RANK", "RANK")),
    };
    let num_hosts = match env.number("GROUP_WORLD_SIZE")? {
        Some(num_hosts) => num_hosts,
        None => world.div_ceil(host_size.max(1)).max(host + 1),
    };
    Ok(Place {
        rank,
        world,
        host_rank,
        host_size,
        host,
        num_hosts,
        source: if is_train {
            Source::TrainLaunch
        } else {
            Source::Torchrun
        },
        names: TORCHRUN,
        run_id: env.get("TORCHELASTIC_RUN_ID").unwrap_or("none").into(),
        restart_count: env
            .parsed("TORCHELASTIC_RESTART_COUNT", "a whole number, 0 or more")?
            .unwrap_or(0),
        master_addr: None,
        note: None,
    })
}

fn open_mpi(env: &Environment) -> Result<Place> {
    let names = Names {
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        ..TORCHRUN
    };
    mpi(env, names, Source::OpenMpi)
}

fn hydra(env: &Environment) -> Result<Place> {
    let names = Names {
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        ..TORCHRUN
    };
    mpi(env, names, Source::Pmi)
}

fn mpi(env: &Environment, names: Names, source: Source) -> Result<Place> {
    let rank = env.required(names.rank, names.world)?;
    let world = env.required(names.world, names.rank)?;
    let (host_rank, host_size) = if world == 1 {
        (0, 1)
    } else {
        (
            env.required(names.local_rank, names.rank)?,
            env.required(names.local_size, names.rank)?,
        )
    };
    // MPI does not number machines. Ranks placed machine by machine (the default) say it themselves.
    let (host, num_hosts) = match (rank.checked_sub(host_rank), host_size) {
        (Some(first), 1..) if first % host_size == 0 && world % host_size == 0 => {
            (first / host_size, world / host_size)
        }
        _ => {
            return Err(Error::Config(format!(
                "{} = {rank}, {} = {world}, {} = {host_rank}, {} = {host_size}: expected the same \
                 number of ranks on every machine, numbered machine by machine \
                 (mpirun --map-by slot)",
                names.rank, names.world, names.local_rank, names.local_size
            )));
        }
    };
    let job = [
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "PMI_JOBID",
        "SLURM_JOB_ID",
    ];
    let run_id = job.iter().find_map(|name| env.get(name)).unwrap_or("mpi");
    Ok(Place {
        rank,
        world,
        host_rank,
        host_size,
        host,
        num_hosts,
        source,
        names,
        run_id: run_id.into(),
        restart_count: 0,
        // Loopback reaches everybody when there is one machine.
        master_addr: (num_hosts == 1).then(|| "127.0.0.1".into()),
        note: None,
    })
}

/// Whether srun started this process as one of several. A batch script and an interactive shell carry
/// the job's variables too: the one as task 0 without a step, the other without a task.
fn is_srun(env: &Environment) -> Result<bool> {
    let tasks = slurm_tasks(env)?;
    if !env.has("SLURM_PROCID") || tasks == Some(1) {
        return Ok(false);
    }
    /// Steps above are Slurm's own: batch script, interactive shell, external.
    const LAST_STEP: u64 = 0xffff_fff0;
    let step: Option<u64> = env.get("SLURM_STEP_ID").and_then(|step| step.parse().ok());
    let in_step = step.is_some_and(|step| step < LAST_STEP);
    Ok(in_step || env.get("ENVIRONMENT") != Some("BATCH"))
}

/// Tasks of the step, which may have fewer than the job.
fn slurm_tasks(env: &Environment) -> Result<Option<usize>> {
    match env.number("SLURM_STEP_NUM_TASKS")? {
        Some(tasks) => Ok(Some(tasks)),
        None => env.number("SLURM_NTASKS"),
    }
}

fn srun(env: &Environment) -> Result<Place> {
    let rank = env.required("SLURM_PROCID", "SLURM_NTASKS")?;
    let world = slurm_tasks(env)?.ok_or_else(|| env.missing("SLURM_NTASKS", "SLURM_PROCID"))?;
    let host_rank = env.required("SLURM_LOCALID", "SLURM_PROCID")?;
    let host = env.required("SLURM_NODEID", "SLURM_PROCID")?;
    let num_hosts = match env.number("SLURM_STEP_NUM_NODES")? {
        Some(nodes) => nodes,
        None => env.required("SLURM_NNODES", "SLURM_PROCID")?,
    };
    let listed = |name: &str, e: String| Error::Config(format!("{name} in the environment: {e}"));
    let lists = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    let host_size = match lists.iter().find_map(|name| Some((name, env.get(name)?))) {
        Some((name, list)) => tasks_on_node(list, host).map_err(|e| listed(name, e))?,
        None => match env.number("SLURM_NTASKS_PER_NODE")? {
            Some(tasks) => tasks,
            None => world.div_ceil(num_hosts.max(1)),
        },
    };
    let lists = [
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
    ];
    let nodelist = lists.iter().find_map(|name| Some((name, env.get(name)?)));
    let master_addr = match nodelist {
        _ if num_hosts == 1 => Some("127.0.0.1".into()),
        Some((name, list)) => Some(first_host(list).map_err(|e| listed(name, e))?),
        None => None,
    };
    let job = env.get("SLURM_JOB_ID").unwrap_or("slurm");
    Ok(Place {
        rank,
        world,
        host_rank,
        host_size,
        host,
        num_hosts,
        source: Source::Slurm,
        names: Names {
            rank: "SLURM_PROCID",
            world: "SLURM_NTASKS",
            local_rank: "SLURM_LOCALID",
            local_size: "SLURM_TASKS_PER_NODE",
            node: "SLURM_NODEID",
            num_nodes: "SLURM_NNODES",
        },
        run_id: match env.get("SLURM_STEP_ID") {
            Some(step) => format!("{job}.{step}"),
            None => job.into(),
        },
        restart_count: env
            .parsed("SLURM_RESTART_COUNT", "a whole number, 0 or more")?
            .unwrap_or(0),
        master_addr,
        note: None,
    })
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
    if nodes == 0 || place.world % nodes != 0 {
        return Err(Error::Config(format!(
            "{name} = {nodes} does not divide the {} ranks",
            place.world
        )));
    }
    if nodes % place.num_hosts != 0 {
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
