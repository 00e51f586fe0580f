//! The launcher: starts the ranks of this machine, watches, stops and restarts them.
//!
//! Ranks get torchrun's variables. Every rank has a process group of its own, so that a Ctrl-C at the
//! terminal reaches it once, through the launcher, and dies with the launcher.

use std::ffi::OsString;
use std::net::IpAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::Master;
use super::rank_process::{Rank, RendezvousSocket};
use crate::{Error, Result};

/// How often ranks and signals are looked at.
const POLL: Duration = Duration::from_millis(20);

/// A rank whose peer failed often ends before the peer does: how long to wait for the cause.
const SETTLE: Duration = Duration::from_secs(1);

/// How long output may keep coming after a rank's end (something it started may hold the pipe).
const DRAIN: Duration = Duration::from_secs(2);

/// Exit status of a rank whose peer or network failed.
const PEER_FAILED: u8 = 4;

/// What to start.
#[derive(Clone, Debug)]
pub struct Job {
    /// This program.
    pub executable: PathBuf,
    /// Its arguments in every rank.
    pub args: Vec<OsString>,
    /// Ranks on this machine.
    pub num_local: usize,
    /// Machines.
    pub num_hosts: usize,
    /// This one, `0..num_hosts`.
    pub host: usize,
    /// Host of rank 0.
    pub master_addr: String,
    /// Port on which rank 0 waits for the others; None for any that is free, on one machine.
    pub master_port: Option<u16>,
    /// What tells this job from others at the same port.
    pub run_id: String,
    /// Where rank 0 and the others listen instead of the interface that reaches rank 0.
    pub bind_addr: Option<IpAddr>,
    /// Passed on to the ranks.
    pub emulate_nodes: Option<usize>,
    /// How often all ranks may be started again.
    pub max_restarts: u32,
    /// Folder for the ranks' output.
    pub log_dir: Option<PathBuf>,
    /// How long ranks may take to end after SIGTERM.
    pub grace: Duration,
}

/// Runs the job until its ranks are done, or have failed for good.
///
/// # Errors
/// [`Error::Rank`] with the status of the first rank that failed; [`Error::Config`] when nothing can be
/// started.
pub fn supervise(job: &Job) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])
        .map_err(|e| Error::Config(format!("signals cannot be handled: {e}")))?;
    let socket = RendezvousSocket::open(job)?;
    for restart_count in 0.. {
        tracing::info!(
            "starting rank{} of {}, rank 0 at {}",
            match job.num_local {
                1 => format!(" {}", job.host),
                n => format!("s {}..{}", job.host * n, (job.host + 1) * n - 1),
            },
            job.num_local * job.num_hosts,
            Master {
                addr: job.master_addr.clone(),
                port: socket.port,
                agent_store: false,
            },
        );
        let mut ranks = LocalRanks::start(job, &socket, restart_count)?;
        let end = ranks.watch(job.grace, &mut signals);
        let Some(failure) = end.failure else {
            return Ok(());
        };
        let again = restart_count < job.max_restarts && is_restartable(failure.status);
        if end.interrupted || !again {
            return Err(ranks.error(&failure));
        }
        tracing::warn!(
            "rank {} {}: restarting all ranks of this machine (restart {} of {})",
            failure.rank,
            failure.how,
            restart_count + 1,
            job.max_restarts
        );
    }
    unreachable!("the restart count reaches its limit first")
}

/// Whether starting again may help. Not after a wrong config or command line (2), bad data (3), a stop
/// by policy (5) or a person's second Ctrl-C (130): the same would happen, or is not wanted.
pub fn is_restartable(status: u8) -> bool {
    !matches!(status, 0 | 2 | 3 | 5 | 130)
}

/// The arguments of a restart: `run` continues from the newest checkpoint, or at step 0 while there is
/// none.
pub fn restart_args(args: &[OsString]) -> Vec<OsString> {
    let mut args = args.to_vec();
    if args.first().is_some_and(|a| a == "run") && !args.iter().any(|a| a == "--resume") {
        args.insert(1, "--resume".into());
    }
    args
}

/// A rank that failed.
struct Failure {
    rank: usize,
    status: u8,
    how: String,
}

/// How a start of the job ended.
struct End {
    failure: Option<Failure>,
    interrupted: bool,
}

/// The ranks of this machine, in one start of the job.
struct LocalRanks {
    ranks: Vec<Rank>,
}

impl Drop for LocalRanks {
    /// Whatever happens to the launcher, no rank outlives it.
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        for rank in &mut self.ranks {
            if rank.ended.is_none() {
                let _ = rank.child.wait();
            }
        }
    }
}

impl LocalRanks {
    fn start(job: &Job, socket: &RendezvousSocket, restart_count: u32) -> Result<Self> {
        // What has started is stopped when another does not start.
        let mut started = Self { ranks: Vec::new() };
        for local in 0..job.num_local {
            let rank = Rank::start(job, socket, restart_count, local)?;
            started.ranks.push(rank);
        }
        Ok(started)
    }

    fn signal(&self, signal: Signal) {
        for rank in &self.ranks {
            rank.signal(signal);
        }
    }

    /// Waits for the ranks: passes signals on, and stops all when one fails.
    fn watch(&mut self, grace: Duration, signals: &mut Signals) -> End {
        let mut num_signals = 0;
        let mut failures: Vec<Failure> = Vec::new();
        let mut first_failed: Option<Instant> = None;
        let mut kill_at: Option<Instant> = None;
        let mut cause: Option<Failure> = None;
        loop {
            for number in signals.pending() {
                num_signals += 1;
                let Ok(signal) = Signal::try_from(number) else {
                    continue;
                };
                if num_signals == 1 {
                    tracing::info!("{signal}: passed on to the ranks; once more kills them");
                    self.signal(signal);
                } else {
                    self.signal(Signal::SIGKILL);
                }
            }
            for rank in &mut self.ranks {
                if rank.ends_now() && cause.is_none() {
                    failures.extend(failure(rank));
                }
            }
            if !failures.is_empty() && cause.is_none() {
                let since = *first_failed.get_or_insert_with(Instant::now);
                let root = failures.iter().position(|f| f.status != PEER_FAILED);
                let all_ended = self.ranks.iter().all(|r| r.ended.is_some());
                if root.is_some() || all_ended || since.elapsed() > SETTLE {
                    cause = Some(failures.remove(root.unwrap_or(0)));
                    kill_at = Some(Instant::now() + grace);
                    // After a person's signal ranks are stopping already: a second would cut them short.
                    if num_signals == 0 {
                        self.signal(Signal::SIGTERM);
                    }
                }
            }
            if kill_at.is_some_and(|at| Instant::now() > at) {
                kill_at = None;
                tracing::warn!("ranks still run after {} s: killing them", grace.as_secs());
                self.signal(Signal::SIGKILL);
            }
            if self.ranks.iter().all(|r| r.ended.is_some()) {
                break;
            }
            thread::sleep(POLL);
        }
        self.drain();
        End {
            failure: cause,
            interrupted: num_signals > 0,
        }
    }

    /// Waits for the last lines.
    fn drain(&mut self) {
        let deadline = Instant::now() + DRAIN;
        let copies = || self.ranks.iter().flat_map(|rank| &rank.copies);
        while copies().any(|copy| !copy.is_finished()) && Instant::now() < deadline {
            thread::sleep(POLL / 4);
        }
    }

    fn error(&self, failure: &Failure) -> Error {
        let Failure { rank, status, how } = failure;
        let lines = self.ranks.iter().find(|r| r.rank == *rank);
        let lines = lines.map(|r| r.sink.last_lines()).unwrap_or_default();
        let mut message = format!("rank {rank} {how}");
        if !lines.is_empty() {
            message += "; its last lines:";
        }
        for line in lines {
            message += &format!("\n  [{rank}] {line}");
        }
        Error::Rank {
            message,
            status: *status,
        }
    }
}

/// What is wrong with a rank's end, if anything.
fn failure(rank: &Rank) -> Option<Failure> {
    let ended = rank.ended?;
    let (status, how) = match (ended.code(), ended.signal()) {
        (Some(0), _) => return None,
        (Some(code), _) => (code as u8, format!("failed with exit status {code}")),
        (None, Some(number)) => {
            let name =
                Signal::try_from(number).map_or_else(|_| number.to_string(), |s| s.to_string());
            ((128 + number) as u8, format!("was ended by {name}"))
        }
        (None, None) => (1, "ended in an unknown way".into()),
    };
    Some(Failure {
        rank: rank.rank,
        status,
        how,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(list: &[&str]) -> Vec<OsString> {
        list.iter().map(OsString::from).collect()
    }

    #[test]
    fn a_restarted_run_resumes_once() {
        let restarted = restart_args(&args(&["run", "a.toml", "--set", "train.steps=3"]));
        assert_eq!(
            restarted,
            args(&["run", "--resume", "a.toml", "--set", "train.steps=3"])
        );
        assert_eq!(restart_args(&restarted), restarted);
        assert_eq!(
            restart_args(&args(&["launch-check"])),
            args(&["launch-check"])
        );
    }

    #[test]
    fn what_would_fail_again_is_not_restarted() {
        for (status, again) in [
            (0, false),
            (1, true),
            (2, false),
            (3, false),
            (4, true),
            (5, false),
        ] {
            assert_eq!(is_restartable(status), again, "{status}");
        }
        assert!(is_restartable(128 + 9) && !is_restartable(130));
    }
}
