//! A rank as a child process of the launcher: what it inherits, and how it follows the launcher's end.

use std::fs::OpenOptions;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use signal_hook::consts::SIGTERM;

use super::address::candidates;
use super::output::{Sink, Stream};
use super::supervisor::{Job, restart_args};
use crate::{Error, Result};

/// The socket on which rank 0 waits for the others. The launcher opens it and keeps it open over
/// restarts: its port cannot be lost to another process, and ranks that are early wait in its queue.
pub(super) struct RendezvousSocket {
    listener: Option<TcpListener>,
    /// Where it is.
    pub port: u16,
}

impl RendezvousSocket {
    /// Opens it on machine 0.
    ///
    /// # Errors
    /// [`Error::Config`] when the address is not this machine's or the port is taken.
    pub fn open(job: &Job) -> Result<Self> {
        let port = job.master_port.unwrap_or(0);
        if job.host != 0 {
            return Ok(Self {
                listener: None,
                port,
            });
        }
        let wrong = |e: String| {
            Error::Config(format!(
                "rank 0 cannot listen on {}:{port}: {e}; start node 0 on the machine that --master-addr \
                 names, with a --master-port that is free",
                job.master_addr
            ))
        };
        let addrs = match job.bind_addr {
            Some(ip) => vec![SocketAddr::new(ip, port)],
            None => candidates(&job.master_addr, port, job.num_hosts).map_err(wrong)?,
        };
        let listener = TcpListener::bind(&addrs[..]).map_err(|e| wrong(e.to_string()))?;
        let addr = listener.local_addr().map_err(|e| wrong(e.to_string()))?;
        Ok(Self {
            listener: Some(listener),
            port: addr.port(),
        })
    }

    /// Standard input of a rank: the socket for rank 0, nothing for others.
    fn stdin(&self, rank: usize) -> std::io::Result<Stdio> {
        match &self.listener {
            Some(listener) if rank == 0 => Ok(OwnedFd::from(listener.try_clone()?).into()),
            _ => Ok(Stdio::null()),
        }
    }
}

/// One running or ended rank.
pub(super) struct Rank {
    /// Its number among all ranks.
    pub rank: usize,
    /// The process.
    pub child: Child,
    /// Where its lines go.
    pub sink: Sink,
    /// The threads that copy them.
    pub copies: Vec<JoinHandle<()>>,
    /// How it ended.
    pub ended: Option<ExitStatus>,
}

impl Rank {
    /// Starts rank number `local` of this machine.
    ///
    /// # Errors
    /// [`Error::Config`] and [`Error::Io`], when the system refuses.
    pub fn start(
        job: &Job,
        socket: &RendezvousSocket,
        restart_count: u32,
        local: usize,
    ) -> Result<Self> {
        let rank = job.host * job.num_local + local;
        let file = match &job.log_dir {
            None => None,
            Some(dir) => {
                std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
                let path = dir.join(format!("rank_{rank}.log"));
                let file = OpenOptions::new().append(true).create(true).open(&path);
                Some(file.map_err(Error::io(&path))?)
            }
        };
        let sink = Sink::new(rank, file);
        let failed = |e: std::io::Error| {
            Error::Config(format!(
                "rank {rank}: cannot start {}: {e}",
                job.executable.display()
            ))
        };
        let args = match restart_count {
            0 => job.args.clone(),
            _ => restart_args(&job.args),
        };
        let mut command = Command::new(&job.executable);
        command.args(args);
        for (name, value) in [
            ("RANK", rank),
            ("WORLD_SIZE", job.num_local * job.num_hosts),
            ("LOCAL_RANK", local),
            ("LOCAL_WORLD_SIZE", job.num_local),
            ("GROUP_RANK", job.host),
            ("GROUP_WORLD_SIZE", job.num_hosts),
            ("MASTER_PORT", socket.port as usize),
            ("TORCHELASTIC_RESTART_COUNT", restart_count as usize),
            ("TORCHELASTIC_MAX_RESTARTS", job.max_restarts as usize),
            ("TRAIN_LAUNCHER_PID", std::process::id() as usize),
        ] {
            command.env(name, value.to_string());
        }
        command
            .env("MASTER_ADDR", &job.master_addr)
            .env("TRAIN_RUN_ID", &job.run_id)
            .env("TORCHELASTIC_RUN_ID", &job.run_id)
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .env_remove("TRAIN_RENDEZVOUS_ON_STDIN");
        if let Some(nodes) = job.emulate_nodes {
            command.env("TRAIN_EMULATE_NODES", nodes.to_string());
        }
        if let Some(ip) = job.bind_addr {
            command.env("TRAIN_BIND_ADDR", ip.to_string());
        }
        if rank == 0 {
            command.env("TRAIN_RENDEZVOUS_ON_STDIN", "1");
        }
        let mut child = command
            .stdin(socket.stdin(rank).map_err(failed)?)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let mut copies = Vec::new();
        if let Some(out) = child.stdout.take() {
            copies.push(sink.copy(out, Stream::Out).map_err(failed)?);
        }
        if let Some(err) = child.stderr.take() {
            copies.push(sink.copy(err, Stream::Err).map_err(failed)?);
        }
        Ok(Self {
            rank,
            child,
            sink,
            copies,
            ended: None,
        })
    }

    /// Notes the rank's end, if it has ended just now.
    pub fn ends_now(&mut self) -> bool {
        if self.ended.is_none() {
            // An error would mean that the child is nobody's: it has no status to wait for.
            self.ended = self
                .child
                .try_wait()
                .unwrap_or(Some(ExitStatus::from_raw(1 << 8)));
            return self.ended.is_some();
        }
        false
    }

    /// Sends `signal` if the rank still runs.
    pub fn signal(&self, signal: Signal) {
        if self.ended.is_none() {
            // Not waited for yet, so the number is still this child's.
            let _ = kill(Pid::from_raw(self.child.id() as i32), signal);
        }
    }
}

/// Makes this process die with the `train launch` that started it, however that ends. Does nothing in
/// other processes.
pub fn follow_launcher() {
    let launcher = std::env::var("TRAIN_LAUNCHER_PID");
    let Some(launcher) = launcher
        .ok()
        .and_then(|pid| pid.parse().ok())
        .map(Pid::from_raw)
    else {
        return;
    };
    if Pid::parent() != launcher {
        // A process that a rank started; or the launcher is gone since.
        if kill(launcher, None).is_err() {
            std::process::exit(128 + SIGTERM);
        }
        return;
    }
    #[cfg(target_os = "linux")]
    {
        if let Err(e) = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL) {
            eprintln!("this rank may outlive its launcher: {e}");
        }
        // The launcher may have died in between.
        if Pid::parent() != launcher {
            std::process::exit(128 + SIGTERM);
        }
    }
}
