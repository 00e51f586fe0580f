//! What each launcher says: its variables, one function a launcher.

use super::discover::Source;
use super::slurm::{first_host, tasks_on_node};
use super::{Environment, LaunchFlags};
use crate::{Error, Result};

/// What the variables are called, for messages.
#[derive(Clone, Copy)]
pub struct Names {
    pub rank: &'static str,
    pub world: &'static str,
    pub local_rank: &'static str,
    pub local_size: &'static str,
    pub node: &'static str,
    pub num_nodes: &'static str,
}

/// A place among machines, as one launcher says it.
pub struct Place {
    pub rank: usize,
    pub world: usize,
    pub host_rank: usize,
    pub host_size: usize,
    pub host: usize,
    pub num_hosts: usize,
    pub source: Source,
    pub names: Names,
    pub run_id: String,
    pub restart_count: u32,
    /// Host of rank 0, where the launcher says it.
    pub master_addr: Option<String>,
    pub note: Option<String>,
}

impl Place {
    /// One rank, whatever else the environment holds.
    pub fn single(env: &Environment) -> Self {
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

/// Ranks started by hand.
///
/// # Errors
/// [`Error::Config`] naming the variable.
pub fn by_flags(flags: &LaunchFlags) -> Result<Place> {
    let (Some(rank), Some(world)) = (flags.rank, flags.world_size) else {
        return Err(Error::Config("--rank and --world-size go together".into()));
    };
    let host_size = flags.ranks_per_node.unwrap_or(world);
    if host_size == 0 || !world.is_multiple_of(host_size) {
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

/// torchrun, `train launch`, and others that set RANK and WORLD_SIZE.
///
/// # Errors
/// [`Error::Config`] naming the variable.
pub fn torchrun(env: &Environment) -> Result<Place> {
    let rank = env.required("RANK", "WORLD_SIZE")?;
    let world = env.required("WORLD_SIZE", "RANK")?;
    let is_train = env.has("TRAIN_LAUNCHER_PID");
    // RANK, WORLD_SIZE and MASTER_* alone, set by hand: fine where all ranks are on this machine.
    let on_loopback = env
        .get("MASTER_ADDR")
        .is_some_and(super::discover::is_loopback);
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
        None => world.div_ceil(host_size.max(1)).max(host.saturating_add(1)),
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

/// Open MPI's mpirun.
///
/// # Errors
/// [`Error::Config`] naming the variable.
pub fn open_mpi(env: &Environment) -> Result<Place> {
    let names = Names {
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        ..TORCHRUN
    };
    mpi(env, names, Source::OpenMpi)
}

/// MPICH's and Intel MPI's mpiexec.
///
/// # Errors
/// [`Error::Config`] naming the variable.
pub fn hydra(env: &Environment) -> Result<Place> {
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
pub fn is_srun(env: &Environment) -> Result<bool> {
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

/// Slurm's srun.
///
/// # Errors
/// [`Error::Config`] naming the variable.
pub fn srun(env: &Environment) -> Result<Place> {
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
