//! Ranks as processes: starting them in every way, finding them, ending them.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use super::{Ended, Project, ended, names};

/// Longer than anything here takes; a test that needs it has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A port that was free a moment ago.
pub fn free_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port().to_string()
}

/// Sends `signal` ("KILL") to process `pid`.
pub fn kill(pid: u32, signal: &str) {
    let script = format!("kill -{signal} {pid}");
    assert!(
        Command::new("sh")
            .args(["-c", &script])
            .status()
            .unwrap()
            .success()
    );
}

/// Waits until `pid` is gone or a zombie that somebody else has to collect.
#[track_caller]
pub fn ends(pid: u32) {
    let start = Instant::now();
    let runs = || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(')')
            .next()
            .is_some_and(|s| !s.is_empty() && !s.trim_start().starts_with('Z'))
    };
    while runs() {
        assert!(start.elapsed() < PATIENCE, "process {pid} still runs");
        thread::sleep(Duration::from_millis(10));
    }
}

/// TRAIN_TEST_TORCHRUN, or torchrun from PATH.
pub fn torchrun() -> Option<PathBuf> {
    let told = std::env::var_os("TRAIN_TEST_TORCHRUN").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = || {
        std::env::split_paths(&path)
            .map(|dir| dir.join("torchrun"))
            .find(|p| p.is_file())
    };
    let torchrun = told.or_else(found);
    if torchrun.is_none() {
        eprintln!("skipped: no torchrun in PATH or TRAIN_TEST_TORCHRUN");
    }
    torchrun
}

/// Whether this process may make network namespaces with what `netns_cluster` puts into them.
pub fn can_make_namespaces() -> bool {
    let name = format!("try{}", std::process::id());
    let does = |program: &str, args: &[&str]| {
        let done = Command::new(program).args(args).output();
        done.is_ok_and(|done| done.status.success())
    };
    let inside = |args: &[&str]| does("ip", &[&["netns", "exec", &name], args].concat());
    let tbf = "tc qdisc add dev v0 root tbf rate 1mbit burst 16kb latency 50ms";
    let can = does("ip", &["netns", "add", &name])
        && inside(&["ip", "link", "add", "b0", "type", "bridge"])
        && inside(&["ip", "link", "add", "v0", "type", "veth", "peer", "v1"])
        && inside(&tbf.split(' ').collect::<Vec<_>>());
    does("ip", &["netns", "del", &name]);
    if !can {
        eprintln!("skipped: no right to make network namespaces");
    }
    can
}

/// Processes of a job by rank, once `world` children of the launcher `pid` run.
#[track_caller]
pub fn ranks_of(pid: u32, world: usize) -> BTreeMap<usize, u32> {
    let mut found = BTreeMap::new();
    wait_for("ranks", || {
        let path = format!("/proc/{pid}/task/{pid}/children");
        let children = fs::read_to_string(path).unwrap_or_default();
        found.clear();
        for child in children.split_whitespace() {
            let env = fs::read(format!("/proc/{child}/environ")).unwrap_or_default();
            let mut variables = env.split(|b| *b == 0);
            let rank = variables.find_map(|v| v.strip_prefix(b"RANK="));
            if let Some(rank) = rank.and_then(|r| std::str::from_utf8(r).ok()) {
                found.insert(rank.parse().unwrap(), child.parse().unwrap());
            }
        }
        found.len() == world
    });
    found
}

/// Waits until `is_so`.
#[track_caller]
pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "waited too long for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the end of all; none may take longer than [`PATIENCE`].
#[track_caller]
pub fn all_ended(children: Vec<Child>) -> Vec<Ended> {
    for child in &children {
        let pid = child.id();
        // A rank whose output nobody reads could not end: `ended` reads what was said after this.
        thread::spawn(move || {
            thread::sleep(PATIENCE);
            let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            if comm.trim() == "train" {
                kill(pid, "ABRT");
            }
        });
    }
    let waiting: Vec<_> = children
        .into_iter()
        .map(|child| thread::spawn(move || ended(child)))
        .collect();
    waiting.into_iter().map(|w| w.join().unwrap()).collect()
}

impl Project {
    /// The arguments of `train run` as run `name`.
    pub fn run_args(name: &str, sets: &[&str]) -> Vec<String> {
        let mut args = vec!["run".to_string(), "run.toml".into()];
        for set in [&[format!("run.name={name}").as_str()], sets].concat() {
            if !set.starts_with("--") {
                args.push("--set".into());
            }
            args.push(set.into());
        }
        args
    }

    /// `train launch` with `flags` on run `name`, not started yet.
    pub fn launch_command(&self, flags: &[&str], name: &str, sets: &[&str]) -> Command {
        let mut command = self.command(&["launch"]);
        command
            .args(flags)
            .arg("--")
            .args(Self::run_args(name, sets));
        command
    }

    /// `train launch` with `flags` on run `name`, to its end.
    pub fn launch(&self, flags: &[&str], name: &str, sets: &[&str]) -> Ended {
        ended(self.launch_command(flags, name, sets).spawn().unwrap())
    }

    /// Starts `world` ranks of run `name` by hand; `sets` of each by its rank.
    pub fn start_ranks<'a>(
        &self,
        world: usize,
        name: &str,
        sets: impl Fn(usize) -> Vec<&'a str>,
    ) -> Vec<Child> {
        let port = free_port();
        (0..world)
            .map(|rank| {
                let mut command = self.command(&[]);
                command
                    .args(Self::run_args(name, &sets(rank)))
                    .envs([
                        ("RANK", rank.to_string()),
                        ("WORLD_SIZE", world.to_string()),
                    ])
                    .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
                command.spawn().unwrap()
            })
            .collect()
    }

    /// Losses, gradient norms and validation losses of run `name`, with the step they belong to.
    #[track_caller]
    pub fn losses(&self, name: &str) -> Vec<(String, f64)> {
        let mut losses = Vec::new();
        for line in self.metrics(name) {
            for key in ["loss", "grad_norm", "val_loss"] {
                if let Some(value) = line[key].as_f64() {
                    losses.push((format!("{key} of step {}", line["step"]), value));
                }
            }
        }
        assert!(!losses.is_empty());
        losses
    }

    /// Lines of metrics.jsonl of run `name` so far.
    pub fn num_lines(&self, name: &str) -> usize {
        let path = self.run_folder(name).join("metrics.jsonl");
        fs::read(path).map_or(0, |text| text.iter().filter(|b| **b == b'\n').count())
    }

    /// Whether run `name` is writing a checkpoint.
    pub fn is_saving(&self, name: &str) -> bool {
        let folder = self.run_folder(name).join("checkpoints");
        folder.exists() && names(&folder).iter().any(|n| n.contains(".tmp-"))
    }
}

/// Fails unless both say the same of the same steps, up to `tolerance`, relative.
#[track_caller]
pub fn assert_close(a: &[(String, f64)], b: &[(String, f64)], tolerance: f64, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}: {a:?} {b:?}");
    for ((of, a), (other, b)) in a.iter().zip(b) {
        assert_eq!(of, other, "{what}");
        let off = (a - b).abs() / a.abs().max(b.abs());
        assert!(
            off <= tolerance,
            "{what}: {of} is {a} and {b}, off by {off:e}"
        );
    }
}

/// The scripts of the repository.
pub fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("scripts")
        .join(name)
}
