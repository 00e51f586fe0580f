//! Ranks as real processes: they meet under every launcher, and failures and signals end as promised.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use common::Project;
use common::processes::{PATIENCE, can_make_namespaces, ends, free_port, kill, torchrun};

const TRAIN: &str = env!("CARGO_BIN_EXE_train");

/// `program` without any launcher's variables.
fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn train(args: &[&str]) -> Command {
    let mut command = command(TRAIN);
    command.args(args);
    command
}

/// How a process ended.
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }
}

impl Ended {
    #[track_caller]
    fn is(self, code: i32, parts: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "{}\n{}", self.stdout, self.stderr);
        for part in parts {
            let there = self.stderr.contains(part) || self.stdout.contains(part);
            assert!(there, "{part:?} not in {}\n{}", self.stdout, self.stderr);
        }
        assert!(!self.stderr.contains("panicked at"), "{}", self.stderr);
        self
    }

    /// Checks that `world` ranks said that they reached each other.
    #[track_caller]
    fn all_met(self, world: usize) -> Self {
        let ended = self.is(0, &[]);
        for rank in 0..world {
            let line = format!("rank {rank} of {world}: ");
            let line = ended.stdout.lines().find(|l| l.contains(&line));
            let met = line.is_some_and(|l| l.contains("all ranks reached"));
            assert!(met, "rank {rank}: {}\n{}", ended.stdout, ended.stderr);
        }
        ended
    }
}

fn run(mut command: Command) -> Ended {
    command.output().unwrap().into()
}

/// Runs all at once.
fn run_all(commands: Vec<Command>) -> Vec<Ended> {
    let start = |mut c: Command| c.spawn().unwrap();
    let children: Vec<Child> = commands.into_iter().map(start).collect();
    let wait = |c: Child| c.wait_with_output().unwrap().into();
    children.into_iter().map(wait).collect()
}

/// A running launcher whose standard output is read line by line.
struct Running {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let (send, lines) = channel();
        for stream in [
            Box::new(child.stdout.take().unwrap()) as Box<dyn Read + Send>,
            Box::new(child.stderr.take().unwrap()),
        ] {
            let send = send.clone();
            thread::spawn(move || {
                for line in BufReader::new(stream).lines() {
                    let _ = send.send(line.unwrap());
                }
            });
        }
        Self {
            child,
            lines,
            seen: Vec::new(),
        }
    }

    /// The next line that has `part`.
    #[track_caller]
    fn line(&mut self, part: &str) -> String {
        loop {
            let Ok(line) = self.lines.recv_timeout(PATIENCE) else {
                panic!("no {part:?} in {:#?}", self.seen);
            };
            self.seen.push(line.clone());
            if line.contains(part) {
                return line;
            }
        }
    }

    /// The processes of `world` ranks in rank order, once all have met in restart `restart`.
    #[track_caller]
    fn ranks(&mut self, world: usize, restart: u32) -> Vec<u32> {
        let mut pids = vec![None; world];
        while pids.contains(&None) {
            let line = self.line(&format!("restart {restart}, process "));
            let words: Vec<&str> = line.split(' ').collect();
            let at = words.iter().position(|w| *w == "rank").unwrap();
            let rank: usize = words[at + 1].parse().unwrap();
            pids[rank] = Some(words.last().unwrap().parse().unwrap());
        }
        pids.into_iter().map(Option::unwrap).collect()
    }

    /// Waits for the end: the status, and everything it said.
    fn end(mut self) -> Ended {
        let code = self.child.wait().unwrap().code();
        self.seen.extend(self.lines.iter());
        Ended {
            code,
            stdout: self.seen.join("\n"),
            stderr: String::new(),
        }
    }
}

fn launch(flags: &[&str], check: &[&str]) -> Command {
    train(&[&["launch"], flags, &["--", "launch-check"], check].concat())
}

#[test]
fn ranks_of_one_machine_meet() {
    let ended = run(launch(&["--nproc-per-node", "3"], &[])).all_met(3);
    assert!(
        ended.stdout.contains("[2] rank 2 of 3: 3 ranks on 1 node"),
        "{}",
        ended.stdout
    );
    assert!(
        ended
            .stderr
            .contains("ranks from train launch: rank 2 of 3"),
        "{}",
        ended.stderr
    );
    let one = run(launch(&["--nproc-per-node=1"], &[])).is(0, &["nobody to reach"]);
    assert!(
        !one.stdout.contains("reached:"),
        "one rank opens no socket: {}",
        one.stdout
    );
}

#[test]
fn emulated_nodes_are_the_topology() {
    let ended = run(launch(
        &["--nproc_per_node", "4", "--emulate-nodes", "2"],
        &[],
    ))
    .all_met(4);
    assert!(
        ended
            .stdout
            .contains("4 ranks on 2 nodes of 2, node 1, local rank 0"),
        "{}",
        ended.stdout
    );
    // As a flag of the command, and wrongly: every rank finds it, and it is not tried again.
    let flags = ["--nproc-per-node", "2", "--max-restarts", "3"];
    let wrong = run(launch(&flags, &["--emulate-nodes", "3"]));
    let wrong = wrong.is(
        2,
        &["does not divide the 2 ranks", "failed with exit status 2"],
    );
    assert!(!wrong.stderr.contains("restarting"), "{}", wrong.stderr);
}

#[test]
fn launchers_of_several_nodes_agree_through_the_master() {
    let port = free_port();
    let node = |rank| {
        let flags = [
            "--nproc-per-node",
            "2",
            "--nnodes",
            "2",
            "--node-rank",
            rank,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            &port,
        ];
        launch(&flags, &[])
    };
    let ended = run_all(vec![node("1"), node("0")]);
    let all = ended
        .into_iter()
        .fold(String::new(), |all, e| all + &e.is(0, &[]).stdout);
    for rank in 0..4 {
        let line = format!(
            "[{rank}] rank {rank} of 4: 4 ranks on 2 nodes of 2, node {}",
            rank / 2
        );
        assert!(all.contains(&line), "{line}: {all}");
    }
}

#[test]
fn the_first_rank_that_fails_gives_the_status() {
    let mut running = Running::start(launch(&["--nproc-per-node", "3"], &["--hold-s", "100"]));
    let ranks = running.ranks(3, 0);
    kill(ranks[1], "KILL");
    let ended = running
        .end()
        .is(128 + 9, &["error: rank 1 was ended by SIGKILL"]);
    assert!(
        ended.stdout.contains("its last lines:\n  [1] "),
        "{}",
        ended.stdout
    );
    ranks.into_iter().for_each(ends);
}

#[test]
fn a_killed_rank_restarts_all_up_to_the_limit() {
    let flags = ["--nproc-per-node", "2", "--max-restarts", "2"];
    let mut running = Running::start(launch(&flags, &["--hold-s", "100"]));
    for restart in 0..3 {
        let ranks = running.ranks(2, restart);
        kill(ranks[restart as usize % 2], "KILL");
    }
    running.end().is(
        128 + 9,
        &[
            "restart 1 of 2",
            "restart 2 of 2",
            "error: rank 0 was ended",
        ],
    );
}

/// The only child of process `pid`.
#[track_caller]
fn child_of(pid: u32) -> u32 {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.trim().parse().unwrap()
}

#[test]
fn a_run_killed_under_the_launcher_resumes_to_the_same_end() {
    let project = Project::new();
    let sets = [
        "train.steps=1500",
        "checkpoint.every=50",
        "train.eval_every=500",
    ];
    project.run("whole", &sets).ok();
    let mut args = vec![
        "launch",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "1",
        "--",
        "run",
        "run.toml",
    ];
    for set in ["run.name=parts"].iter().chain(&sets) {
        args.extend(["--set", set]);
    }
    let mut running = Running::start(project.command(&args));
    running.line("saved");
    kill(child_of(running.child.id()), "KILL");
    running.end().is(
        0,
        &[
            "was ended by SIGKILL: restarting",
            "resuming at step",
            "done: 1500 steps",
        ],
    );
    assert_eq!(project.story("parts"), project.story("whole"));
    // A first start never resumes: a run of the same name is refused, once.
    let again = run(project.command(&args)).is(2, &["already holds a run"]);
    assert!(!again.stderr.contains("restarting"), "{}", again.stderr);
}

#[test]
fn all_nodes_restart_together() {
    let port = free_port();
    let node = |rank| {
        let flags = [
            "--nproc-per-node",
            "1",
            "--nnodes",
            "2",
            "--node-rank",
            rank,
            "--master-addr",
            "localhost",
            "--master-port",
            &port,
            "--max-restarts",
            "1",
        ];
        Running::start(launch(&flags, &["--hold-s", "100"]))
    };
    let (mut first, mut second) = (node("0"), node("1"));
    let pid = |running: &mut Running, restart: u32| {
        let line = running.line(&format!("restart {restart}, process "));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let (_, b) = (pid(&mut first, 0), pid(&mut second, 0));
    kill(b, "KILL");
    // The rank of the other node notices by itself.
    second.line("restart 1 of 1");
    first.line("restart 1 of 1");
    let (a, _) = (pid(&mut first, 1), pid(&mut second, 1));
    kill(a, "TERM");
    first.end().is(0, &[]);
    second.end().is(0, &[]);
}

#[test]
fn a_node_that_restarts_alone_brings_the_waiting_ones_along() {
    // Node 1's rank waits for rank 0 in restart 0, when rank 0 is in restart 1 already.
    let port = free_port();
    let rank = |rank, restart, world: &str| {
        let mut command = train(&["launch-check"]);
        command
            .envs([
                ("RANK", rank),
                ("WORLD_SIZE", world),
                ("MASTER_ADDR", "127.0.0.1"),
            ])
            .envs([
                ("MASTER_PORT", port.as_str()),
                ("TORCHELASTIC_RESTART_COUNT", restart),
            ]);
        command
    };
    let rank_0 = Running::start(rank("0", "1", "3"));
    let late = run(rank("1", "0", "3"));
    late.is(
        4,
        &["rank 1 is in restart 0 and rank 0 in restart 1 already"],
    );
    // A wrong world and a duplicate are told so, and change nothing.
    run(rank("1", "1", "4")).is(2, &["started with 4 ranks, rank 0 with 3"]);
    run(rank("0", "1", "3")).is(4, &["rank 0 cannot listen", "another job has the port"]);
    let ended = run_all(vec![rank("1", "1", "3"), rank("2", "1", "3")]);
    ended
        .into_iter()
        .for_each(|e| drop(e.is(0, &["all ranks reached"])));
    rank_0.end().is(0, &["all ranks reached"]);
}

#[test]
fn strangers_and_other_jobs_do_not_end_a_job() {
    let port = free_port();
    let rank = |rank, secret: &str| {
        let mut command = train(&["launch-check", "--timeout-s", "20"]);
        command
            .envs([
                ("RANK", rank),
                ("WORLD_SIZE", "2"),
                ("MASTER_ADDR", "127.0.0.1"),
            ])
            .envs([("MASTER_PORT", port.as_str()), ("TRAIN_JOB_SECRET", secret)]);
        command
    };
    let rank_0 = Running::start(rank("0", "right"));
    let connect = || loop {
        match TcpStream::connect(format!("127.0.0.1:{port}")) {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    };
    let silent = connect();
    connect().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    connect().write_all(b"TRN1\xff\xff\xff\xff").unwrap();
    connect().write_all(b"TRN1\x05\0\0\0{\"a\":").unwrap();
    let mut other = train(&["launch-check", "--timeout-s", "2"]);
    other
        .envs([
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
        ])
        .envs([
            ("MASTER_PORT", port.as_str()),
            ("TRAIN_JOB_SECRET", "wrong"),
        ]);
    run(other).is(4, &["TRAIN_JOB_SECRET differs"]);
    run(rank("1", "right")).is(0, &["all ranks reached"]);
    rank_0
        .end()
        .is(0, &["all ranks reached", "a stranger from 127.0.0.1"]);
    drop(silent);
}

#[test]
fn missing_ranks_are_named_everywhere() {
    let port = free_port();
    let rank = |rank, timeout_s| {
        let mut command = train(&["launch-check", "--timeout-s", timeout_s]);
        command
            .envs([
                ("RANK", rank),
                ("WORLD_SIZE", "4"),
                ("MASTER_ADDR", "127.0.0.1"),
            ])
            .envs([("MASTER_PORT", port.as_str())]);
        command
    };
    for ended in run_all(vec![rank("0", "3"), rank("2", "30")]) {
        ended.is(4, &["ranks 1, 3 of 4 did not arrive within 3 s"]);
    }
    run(rank("1", "1")).is(4, &["rank 1 did not reach rank 0 at 127.0.0.1", "refused"]);
}

#[test]
fn ragged_nodes_are_refused_on_every_rank() {
    let port = free_port();
    let rank = |rank, local, size, node| {
        let mut command = train(&["launch-check"]);
        command
            .envs([
                ("RANK", rank),
                ("WORLD_SIZE", "3"),
                ("LOCAL_RANK", local),
                ("LOCAL_WORLD_SIZE", size),
            ])
            .envs([
                ("GROUP_RANK", node),
                ("GROUP_WORLD_SIZE", "2"),
                ("MASTER_ADDR", "127.0.0.1"),
            ])
            .envs([("MASTER_PORT", port.as_str())]);
        command
    };
    let all = vec![
        rank("0", "0", "2", "0"),
        rank("1", "1", "2", "0"),
        rank("2", "0", "1", "1"),
    ];
    for ended in run_all(all) {
        ended.is(
            2,
            &["WORLD_SIZE = 3", "the same number of ranks on every node"],
        );
    }
}

#[test]
fn a_place_is_printed_when_a_launcher_gave_it() {
    let run_one = |env: &[(&str, &str)]| {
        let mut command = train(&["run", "no such config.toml"]);
        command.envs(env.iter().copied());
        run(command)
    };
    let found = "ranks from torchrun: rank 0 of 1";
    run_one(&[("RANK", "0"), ("WORLD_SIZE", "1")]).is(2, &[found]);
    let alone = run_one(&[]).is(2, &[]);
    assert!(!alone.stderr.contains("rank"), "{}", alone.stderr);
}

#[test]
fn a_signal_reaches_every_rank_once_and_a_second_kills() {
    for signal in ["INT", "TERM"] {
        let mut running = Running::start(launch(&["--nproc-per-node", "2"], &["--hold-s", "100"]));
        let ranks = running.ranks(2, 0);
        kill(running.child.id(), signal);
        running.end().is(0, &["passed on to the ranks"]);
        ranks.into_iter().for_each(ends);
    }
    let mut running = Running::start(launch(&["--nproc-per-node", "2"], &["--hold-s", "100"]));
    // A stopped rank hears nothing but SIGKILL.
    let ranks = running.ranks(2, 0);
    kill(ranks[0], "STOP");
    kill(running.child.id(), "TERM");
    running.line("passed on");
    kill(running.child.id(), "TERM");
    running.end().is(128 + 9, &["rank 0 was ended by SIGKILL"]);
}

#[test]
fn ranks_that_do_not_stop_are_killed_after_the_grace() {
    let flags = ["--nproc-per-node", "2", "--grace-s", "0"];
    let mut running = Running::start(launch(&flags, &["--hold-s", "100"]));
    let ranks = running.ranks(2, 0);
    kill(ranks[1], "STOP");
    kill(ranks[0], "KILL");
    running
        .end()
        .is(128 + 9, &["rank 0 was ended by SIGKILL", "killing them"]);
    ranks.into_iter().for_each(ends);
}

#[test]
fn ranks_die_with_their_launcher() {
    let mut running = Running::start(launch(&["--nproc-per-node", "2"], &["--hold-s", "100"]));
    let ranks = running.ranks(2, 0);
    kill(running.child.id(), "KILL");
    assert_eq!(running.end().code, None);
    ranks.into_iter().for_each(ends);
}

#[test]
fn output_goes_to_files_and_rank_0_stays_on_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let logs = dir.path().join("logs");
    let flags = ["--nproc-per-node", "2", "--log-dir", logs.to_str().unwrap()];
    let ended = run(launch(&flags, &[])).is(0, &[]);
    assert!(
        ended.stdout.contains("[0] rank 0 of 2") && !ended.stdout.contains("[1]"),
        "{}",
        ended.stdout
    );
    for rank in 0..2 {
        let text = fs::read_to_string(logs.join(format!("rank_{rank}.log"))).unwrap();
        assert!(text.contains(&format!("\nrank {rank} of 2: ")), "{text}");
        assert!(text.contains("ranks from train launch"), "{text}");
    }
}

#[test]
fn bench_step_measures_all_ranks_and_rank_0_prints() {
    for stage in ["0", "3"] {
        let bench = ["--", "bench", "step", "--shape", "1,32,2,16,2,97"];
        let options = ["--threads", "1", "--steps", "1", "--stage", stage];
        let ranks = ["launch", "--nproc-per-node", "2"];
        let ended = run(train(&[&ranks[..], &bench, &options].concat()));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let mut rows = ended.stdout.lines();
        let row = rows.next().unwrap().strip_prefix("[0] ").unwrap();
        let row: serde_json::Value = serde_json::from_str(row).unwrap();
        assert_eq!(row["world"], 2);
        assert_eq!(row["stage"].to_string(), stage);
        assert!(row["comm_busy_ms"].as_f64().unwrap() > 0.0, "{row}");
        let tokens = row["tokens_per_s"].as_f64().unwrap() * row["step_ms"].as_f64().unwrap() / 1e3;
        assert_eq!(tokens.round(), 64.0, "2 ranks, 2 sequences of 16");
        assert_eq!(rows.next(), None);
    }
}

#[test]
fn other_commands_than_run_start_on_ranks() {
    let sample = [
        "launch",
        "--nproc-per-node",
        "2",
        "--",
        "sample",
        "no such run",
    ];
    run(train(&sample)).is(3, &["starting ranks 0..1 of 2", "holds no checkpoint"]);
}

#[test]
fn wrong_command_lines_start_nothing() {
    for (args, parts) in [
        (
            &["--nproc-per-node", "2", "--", "bench", "optimizer"][..],
            &["expected run, sample, bench step or launch-check"][..],
        ),
        (
            &["--nproc-per-node", "2", "--", "run"],
            &["after `--`", "CONFIG"],
        ),
        (
            &[
                "--nproc-per-node",
                "2",
                "--nnodes",
                "2",
                "--",
                "launch-check",
            ],
            &["--master-addr and --master-port"],
        ),
        (
            &[
                "--nproc-per-node",
                "2",
                "--node-rank",
                "1",
                "--",
                "launch-check",
            ],
            &["expected 0 to 0"],
        ),
        (
            &[
                "--nproc-per-node",
                "3",
                "--emulate-nodes",
                "2",
                "--",
                "launch-check",
            ],
            &["does not divide"],
        ),
        (
            &["--nproc-per-node", "0", "--", "launch-check"],
            &["--nproc-per-node"],
        ),
        (
            &[
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "1",
                "--",
                "run",
                "a.toml",
                "--overwrite",
            ],
            &["--overwrite and --max-restarts", "delete the run folder"],
        ),
    ] {
        let ended = run(train(&[&["launch"], args].concat())).is(2, parts);
        assert!(!ended.stderr.contains("starting rank"), "{}", ended.stderr);
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = run(launch(
        &["--nproc-per-node", "2", "--master-port", &port],
        &[],
    ));
    ended.is(
        2,
        &[
            "rank 0 cannot listen on 127.0.0.1",
            "--master-port that is free",
        ],
    );
}

#[test]
fn slurm_tasks_meet() {
    let id = format!("{}", std::process::id());
    let task = |rank| {
        let mut command = train(&["launch-check"]);
        command
            .envs([
                ("SLURM_JOB_ID", id.as_str()),
                ("SLURM_STEP_ID", "0"),
                ("SLURM_NTASKS", "2"),
            ])
            .envs([
                ("SLURM_PROCID", rank),
                ("SLURM_LOCALID", rank),
                ("SLURM_NODEID", "0"),
            ])
            .envs([("SLURM_NNODES", "1"), ("SLURM_JOB_NODELIST", "node[01-02]")]);
        command
    };
    for ended in run_all(vec![task("0"), task("1")]) {
        ended.is(
            0,
            &["ranks from Slurm", "2 ranks on 1 node", "all ranks reached"],
        );
    }
}

#[test]
fn ranks_meet_under_torchrun() {
    let Some(torchrun) = torchrun() else { return };
    let start = |flags: &[&str], check: &[&str]| {
        let mut command = command(&torchrun);
        command
            .args(flags)
            .args(["--no-python", TRAIN, "launch-check"])
            .args(check);
        command
    };
    let published = "published in torchrun's store";
    let port = free_port();
    run(start(
        &["--nproc-per-node", "3", "--master-port", &port],
        &[],
    ))
    .all_met(3)
    .is(0, &[published]);
    let standalone = ["--standalone", "--nproc-per-node", "2"];
    run(start(&standalone, &["--emulate-nodes", "2"]))
        .all_met(2)
        .is(0, &[published, "2 ranks on 2 nodes"]);
    // Two agents that find each other by c10d, which numbers nodes as they come.
    let endpoint = format!("127.0.0.1:{}", free_port());
    let flags = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "job",
        "--rdzv-endpoint",
        &endpoint,
    ];
    let ended = run_all(vec![start(&flags, &[]), start(&flags, &[])]);
    let all = ended
        .into_iter()
        .fold(String::new(), |all, e| all + &e.is(0, &[]).stdout);
    assert_eq!(all.matches("4 ranks on 2 nodes of 2").count(), 4, "{all}");
}

#[test]
fn a_rank_killed_under_torchrun_restarts_in_the_same_store() {
    let Some(torchrun) = torchrun() else { return };
    let mut start = command(&torchrun);
    start
        .args([
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
            "--no-python",
            TRAIN,
        ])
        .args(["launch-check", "--hold-s", "100"]);
    let mut running = Running::start(start);
    let ranks = running.ranks(2, 0);
    kill(ranks[0], "KILL");
    for rank in running.ranks(2, 1) {
        kill(rank, "TERM");
    }
    running.end().is(0, &[]);
}

#[test]
fn ranks_meet_beside_a_store_that_does_not_answer() {
    // Something that accepts and closes, as a store of another protocol would.
    let store = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = store.local_addr().unwrap().port().to_string();
    thread::spawn(move || store.incoming().for_each(drop));
    let rank = |rank| {
        let mut command = train(&["launch-check"]);
        command
            .envs([
                ("RANK", rank),
                ("WORLD_SIZE", "2"),
                ("MASTER_ADDR", "127.0.0.1"),
            ])
            .envs([
                ("MASTER_PORT", port.as_str()),
                ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ]);
        command
    };
    for ended in run_all(vec![rank("0"), rank("1")]) {
        ended.is(
            0,
            &["torchrun's store does not answer", "all ranks reached"],
        );
    }
}

fn cluster() -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/netns_cluster");
    let mut command = command(script);
    command.args(["2", "2", "200mbit", "--", TRAIN, "launch-check"]);
    command
}

/// What the script leaves behind: namespaces and links by its process's number.
fn leftovers(pid: u32) -> String {
    let list = |args: &[&str]| {
        String::from_utf8(Command::new("ip").args(args).output().unwrap().stdout).unwrap()
    };
    let all = list(&["netns", "list"]) + &list(&["-o", "link"]);
    let is_ours = |l: &&str| {
        ["tn", "tv", "tb"]
            .iter()
            .any(|p| l.contains(&format!("{p}{pid}")))
    };
    all.lines().filter(is_ours).collect()
}

#[test]
fn machines_meet_over_a_network() {
    if !can_make_namespaces() {
        return;
    }
    let ended = run(cluster()).all_met(4);
    let line = ended
        .stdout
        .lines()
        .find(|l| l.contains("rank 3 of 4"))
        .unwrap();
    assert!(
        line.starts_with("node 1: [3] rank 3 of 4: 4 ranks on 2 nodes of 2"),
        "{line}"
    );
    assert!(
        !line.contains("127.0.0.1") && line.matches(".1:").count() == 2,
        "{line}"
    );
    let mut wrong = cluster();
    wrong.args(["--emulate-nodes", "3"]);
    run(wrong).is(2, &["does not divide"]);
    let Some(torchrun) = torchrun() else { return };
    let mut by_torchrun = cluster();
    by_torchrun.env("TORCHRUN", torchrun);
    run(by_torchrun).all_met(4);
}

#[test]
fn a_cluster_of_namespaces_is_cleaned_up_after_a_signal() {
    if !can_make_namespaces() {
        return;
    }
    let mut command = cluster();
    command.args(["--hold-s", "100"]);
    let mut running = Running::start(command);
    let ranks = running.ranks(4, 0);
    let pid = running.child.id();
    assert!(!leftovers(pid).is_empty());
    kill(pid, "TERM");
    running.end().is(0, &["passed on to the ranks"]);
    ranks.into_iter().for_each(ends);
    assert_eq!(leftovers(pid), "");
}
