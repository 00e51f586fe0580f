//! `train launch`.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Parser;
use clap::builder::RangedU64ValueParser;

use super::{Args, Command};
use crate::launch::Environment;
use crate::launch::supervisor::{Job, supervise};
use crate::{Error, Result};

/// Arguments of `train launch`. torchrun's spellings with underscores work too.
#[derive(clap::Args)]
pub struct LaunchArgs {
    /// Ranks to start on this machine.
    #[arg(long, alias = "nproc_per_node", value_name = "N", value_parser = count())]
    nproc_per_node: usize,
    /// Machines; run the same command on each, with its own --node-rank.
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = count())]
    nnodes: usize,
    /// This machine's number, 0 to M - 1.
    #[arg(long, alias = "node_rank", value_name = "R", default_value_t = 0)]
    node_rank: usize,
    /// Host name or address of machine 0 [default: 127.0.0.1 for one machine].
    #[arg(long, alias = "master_addr", value_name = "HOST")]
    master_addr: Option<String>,
    /// Port on machine 0 where the ranks meet [default: a free one for one machine].
    #[arg(long, alias = "master_port", value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,
    /// Treat the ranks as K nodes: hierarchical collectives and per-link bytes on one machine.
    #[arg(long, value_name = "K", value_parser = count())]
    emulate_nodes: Option<usize>,
    /// Address to listen on (0.0.0.0 for all) instead of the interface that reaches --master-addr; wins
    /// over TRAIN_BIND_ADDR.
    #[arg(long, value_name = "IP")]
    bind_addr: Option<IpAddr>,
    /// How often to start all ranks again when one failed; `run` then continues from its newest
    /// checkpoint. Not after exit status 2, 3 or 5, which would come again.
    #[arg(long, alias = "max_restarts", value_name = "R", default_value_t = 0)]
    max_restarts: u32,
    /// Folder for the ranks' output, rank_R.log each; rank 0's is shown too.
    #[arg(long, alias = "log_dir", value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Seconds between asking ranks to stop and killing them, after one of them failed.
    #[arg(long, value_name = "S", default_value_t = 30)]
    grace_s: u64,
    /// What tells this job from others at the same address; the same on every machine.
    #[arg(long, value_name = "ID")]
    run_id: Option<String>,
    /// What every rank does: `run CONFIG ...`, `sample RUN ...`, `bench step ...` or `launch-check`.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

fn count() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=65536)
}

/// Starts the ranks and waits for them.
pub fn launch(args: &LaunchArgs) -> Result<()> {
    supervise(&job(args)?)
}

fn job(args: &LaunchArgs) -> Result<Job> {
    check_command(args)?;
    let wrong = |what: String| Err(Error::Config(what));
    let world = args.nproc_per_node * args.nnodes;
    if args.node_rank >= args.nnodes {
        return wrong(format!(
            "--node-rank {} with --nnodes {}: expected 0 to {}",
            args.node_rank,
            args.nnodes,
            args.nnodes - 1
        ));
    }
    if let Some(nodes) = args.emulate_nodes
        && !world.is_multiple_of(nodes)
    {
        return wrong(format!(
            "--emulate-nodes {nodes} does not divide the {world} ranks"
        ));
    }
    let (master_addr, run_id) = match (args.nnodes, &args.master_addr, args.master_port) {
        (1, addr, _) => (
            addr.clone().unwrap_or_else(|| "127.0.0.1".into()),
            unique_id(),
        ),
        // The same on every machine without asking.
        (_, Some(addr), Some(port)) => (addr.clone(), format!("{addr}:{port}")),
        _ => {
            return wrong(format!(
                "--nnodes {} needs --master-addr and --master-port, the same on every machine",
                args.nnodes
            ));
        }
    };
    let executable = std::env::current_exe()
        .map_err(|e| Error::Config(format!("this program does not find itself: {e}")))?;
    Ok(Job {
        executable,
        args: args.command.clone(),
        num_local: args.nproc_per_node,
        num_hosts: args.nnodes,
        host: args.node_rank,
        master_addr,
        master_port: args.master_port,
        run_id: args.run_id.clone().unwrap_or(run_id),
        bind_addr: match args.bind_addr {
            Some(ip) => Some(ip),
            None => Environment::of_process().bind_addr()?,
        },
        emulate_nodes: args.emulate_nodes,
        max_restarts: args.max_restarts,
        log_dir: args.log_dir.clone(),
        grace: Duration::from_secs(args.grace_s),
    })
}

/// Finds a wrong command line here once, not in every rank.
fn check_command(args: &LaunchArgs) -> Result<()> {
    let words = std::iter::once(OsString::from("train")).chain(args.command.iter().cloned());
    let parsed = Args::try_parse_from(words)
        .map_err(|e| Error::Config(format!("the command after `--`: {}", e.render())))?;
    match parsed.command {
        Command::LaunchCheck(_) | Command::Sample(_) => {}
        // Before the first checkpoint a restart could not tell an old run from this one, or would start
        // from random weights.
        Command::Run(_) if args.max_restarts > 0 => {
            for flag in ["--overwrite", "--init-from"] {
                if args
                    .command
                    .iter()
                    .any(|a| a.to_string_lossy().starts_with(flag))
                {
                    return Err(Error::Config(format!(
                        "{flag} and --max-restarts: a restart resumes, and could not repeat what {flag} \
                         does; {}",
                        match flag {
                            "--overwrite" => "delete the run folder instead",
                            _ => "start once with --max-restarts 0 and go on with --resume",
                        }
                    )));
                }
            }
        }
        Command::Run(_) => {}
        Command::Bench(bench) if bench.runs_on_ranks() => {}
        _ => {
            return Err(Error::Config(format!(
                "the command after `--` is {:?}: expected run, sample, bench step or launch-check",
                args.command[0]
            )));
        }
    }
    Ok(())
}

/// A name that no other launch on this machine has.
fn unique_id() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let nanos = now.map_or(0, |since| since.as_nanos());
    format!("launch-{}-{nanos}", std::process::id())
}
