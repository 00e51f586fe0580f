//! Many ranks that are killed, asked to stop, or given what cannot work: all of them end, alike,
//! and the run goes on from where it was.

mod common;

use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use common::processes::{PATIENCE, all_ended, kill, ranks_of, wait_for};
use common::{Project, ended, names};
use train::checkpoint::Checkpoint;

const LAUNCH: [&str; 2] = ["--nproc-per-node", "3"];
const SETS: [&str; 5] = [
    "train.global_batch=6",
    "train.steps=60",
    "train.eval_every=20",
    "checkpoint.every=10",
    "checkpoint.keep=9",
];

/// Fails unless every checkpoint of run `name` is whole.
#[track_caller]
fn all_complete(project: &Project, name: &str) {
    let root = project.run_folder(name).join("checkpoints");
    if root.exists() {
        for name in names(&root).iter().filter(|n| !n.starts_with('.')) {
            Checkpoint::open(&root.join(name)).unwrap();
        }
    }
}

/// Kills `victim` of three ranks once it `is_time`; the others name it. Then the launcher resumes,
/// to the end that a run never killed has.
#[track_caller]
fn kill_and_resume(
    project: &Project,
    name: &str,
    sets: &[&str],
    victim: usize,
    is_time: impl Fn() -> bool,
) {
    let mut ranks = project.start_ranks(3, name, |_| sets.to_vec());
    wait_for(name, is_time);
    let mut killed = ranks.remove(victim);
    kill(killed.id(), "KILL");
    let start = Instant::now();
    killed.wait().unwrap();
    for ended in all_ended(ranks) {
        ended.fails(4, &[&format!("rank {victim}")]);
    }
    assert!(start.elapsed() < PATIENCE);
    all_complete(project, name);
    let again = [sets, &["--resume"]].concat();
    project.launch(&LAUNCH, name, &again).ok();
}

#[track_caller]
fn assert_same(project: &Project, name: &str, whole: &str, step: u64) {
    assert_eq!(project.story(name), project.story(whole), "{name}");
    let (a, b) = (project.tensors(name, step), project.tensors(whole, step));
    assert!(a == b, "{name}: other tensors");
}

#[test]
fn a_rank_killed_between_or_while_saving_ends_all_and_the_run_resumes() {
    let project = Project::new();
    project.launch(&LAUNCH, "whole", &SETS).ok();
    for (name, victim, lines) in [("first", 0, 3), ("middle", 1, 27), ("last", 2, 45)] {
        let is_time = || project.num_lines(name) >= lines;
        kill_and_resume(&project, name, &SETS, victim, is_time);
        assert_same(&project, name, "whole", 60);
    }
    for (name, victim) in [("saving_0", 0), ("saving_1", 1)] {
        kill_and_resume(&project, name, &SETS, victim, || project.is_saving(name));
        assert_same(&project, name, "whole", 60);
    }
}

#[test]
fn a_rank_killed_in_an_evaluation_ends_all_and_the_run_resumes() {
    let project = Project::new();
    project.write("text.txt", common::text().repeat(12));
    let sets = [
        "train.global_batch=6",
        "data.val_fraction=0.9",
        "train.steps=4",
        "train.eval_every=2",
        "checkpoint.every=1",
    ];
    project.launch(&LAUNCH, "whole", &sets).ok();
    for (name, victim) in [("lead", 0), ("other", 2)] {
        let is_time = || {
            let has_trained = project.num_lines(name) >= 2;
            thread::sleep(Duration::from_millis(10));
            has_trained
        };
        kill_and_resume(&project, name, &sets, victim, is_time);
        assert_same(&project, name, "whole", 4);
    }
}

#[test]
fn a_rank_killed_at_the_start_or_preparing_ends_all_and_the_run_starts_again() {
    let project = Project::new();
    project.write("text.txt", common::text().repeat(20));
    let short = [
        "train.global_batch=6",
        "train.steps=4",
        "train.eval_every=0",
        "comm.timeout_s=4",
    ];
    for victim in 0..3 {
        let name = format!("start_{victim}");
        kill_and_resume(&project, &name, &short, victim, || true);
    }
    for (name, victim, tokenizer) in [
        ("prepare_0", 0, "data.tokenizer=bpe:400"),
        ("prepare_1", 1, "data.tokenizer=bpe:500"),
    ] {
        let sets = [&short[..], &[tokenizer]].concat();
        // Every tokenizer has a folder of its own.
        let before = names(&project.path("data")).len();
        let is_time = || names(&project.path("data")).len() > before;
        kill_and_resume(&project, name, &sets, victim, is_time);
        let whole = format!("{name}_whole");
        project.launch(&LAUNCH, &whole, &sets).ok();
        assert_same(&project, name, &whole, 4);
    }
    assert_same(&project, "start_0", "start_2", 4);
}

#[test]
fn the_launcher_names_the_killed_rank_or_restarts_all() {
    let project = Project::new();
    project.launch(&LAUNCH, "whole", &SETS).ok();
    let start = |name: &str, flags: &[&str]| -> Child {
        let flags = [&LAUNCH[..], flags].concat();
        let launcher = project.launch_command(&flags, name, &SETS).spawn().unwrap();
        let ranks = ranks_of(launcher.id(), 3);
        wait_for("steps", || project.num_lines(name) > 25);
        kill(ranks[&1], "KILL");
        launcher
    };
    let ended = all_ended(vec![start("a", &[])]).remove(0);
    ended.fails(128 + 9, &["error: rank 1 was ended by SIGKILL"]);
    all_complete(&project, "a");
    let ended = all_ended(vec![start("b", &["--max-restarts", "1"])]).remove(0);
    ended.fails(
        0,
        &[
            "rank 1 was ended by SIGKILL: restarting",
            "resuming at step",
        ],
    );
    assert_same(&project, "b", "whole", 60);
}

/// Sends `signals` to processes of a launched run, chosen by launcher and ranks, in the middle of
/// it: all save after the same step, and the run resumes to the same end.
#[track_caller]
fn stop_and_resume(project: &Project, name: &str, signals: impl Fn(u32, &[u32])) {
    let sets = [&SETS[..], &["train.steps=400"]].concat();
    if !project.run_folder("whole").exists() {
        project.launch(&LAUNCH, "whole", &sets).ok();
    }
    let launcher = project
        .launch_command(&LAUNCH, name, &sets)
        .spawn()
        .unwrap();
    let ranks: Vec<u32> = ranks_of(launcher.id(), 3).into_values().collect();
    wait_for("steps", || project.num_lines(name) > 25);
    signals(launcher.id(), &ranks);
    let ended = all_ended(vec![launcher]).remove(0).ok();
    assert!(
        ended.stderr.contains("--resume goes on"),
        "{}",
        ended.stderr
    );
    all_complete(project, name);
    project
        .launch(&LAUNCH, name, &[&sets[..], &["--resume"]].concat())
        .ok();
    assert_same(project, name, "whole", 400);
}

#[test]
fn a_signal_to_the_launcher_or_to_one_rank_stops_all_after_the_same_step() {
    let project = Project::new();
    stop_and_resume(&project, "int", |launcher, _| kill(launcher, "INT"));
    stop_and_resume(&project, "term", |launcher, _| kill(launcher, "TERM"));
    stop_and_resume(&project, "lead", |_, ranks| kill(ranks[0], "INT"));
    stop_and_resume(&project, "other", |_, ranks| kill(ranks[2], "TERM"));
}

#[test]
fn a_signal_that_arrives_twice_is_one_request() {
    let project = Project::new();
    // scancel signals every process, and the launcher passes its signal on.
    stop_and_resume(&project, "scancel", |launcher, ranks| {
        ranks.iter().for_each(|rank| kill(*rank, "TERM"));
        kill(launcher, "TERM");
    });
}

#[test]
fn configs_that_differ_are_told_to_all_ranks() {
    let project = Project::new();
    let common = ["train.global_batch=12", "train.steps=3"];
    for (name, other) in [
        ("lr", "lr.peak=2e-2"),
        ("batch", "train.micro_batch=1"),
        ("seed", "run.seed=2"),
        ("flag", "--resume"),
    ] {
        let sets = |rank| match rank {
            1 => [&common[..], &[other]].concat(),
            _ => common.to_vec(),
        };
        for ended in all_ended(project.start_ranks(3, name, sets)) {
            ended.fails(2, &["config and flags of ranks [1] differ from rank 0's"]);
        }
        assert!(!project.run_folder(name).exists());
    }
}

#[test]
fn what_cannot_work_ends_every_rank_with_the_same_status() {
    let project = Project::new();
    let world = |name: &str, sets: &[&str], code: i32, parts: &[&str]| {
        for ended in all_ended(project.start_ranks(2, name, |_| sets.to_vec())) {
            ended.fails(code, parts);
        }
    };
    let batch = ["train.global_batch=6"];
    world(
        "a",
        &batch,
        2,
        &[
            "train.global_batch = 6",
            "train.micro_batch x ranks = 2 x 2",
        ],
    );
    project.write("latin1.txt", b"caf\xe9 au lait");
    world("a", &["data.text=latin1.txt"], 3, &["latin1.txt", "UTF-8"]);
    world("a", &["model.seq_len=4000"], 3, &["model.seq_len"]);
    world("a", &["data.text=absent.txt"], 2, &["absent.txt"]);
    assert!(!project.run_folder("a").exists());

    project
        .launch(&["--nproc-per-node", "2"], "a", &["train.steps=4"])
        .ok();
    world(
        "a",
        &["train.steps=4"],
        2,
        &["already holds a run", "--overwrite"],
    );
    let damaged = project.checkpoint("a", 4).join("model.safetensors");
    std::fs::write(&damaged, "").unwrap();
    world(
        "a",
        &["train.steps=8", "--resume"],
        3,
        &["model.safetensors", "delete"],
    );

    // One of two nodes has one rank more.
    let port = common::processes::free_port();
    let ranks = [
        ["0", "0", "2", "0"],
        ["1", "1", "2", "0"],
        ["2", "0", "1", "1"],
    ];
    let start = |[rank, local, size, node]: [&str; 4]| {
        let mut command = project.command(&["run", "run.toml", "--set", "train.global_batch=6"]);
        command
            .envs([("RANK", rank), ("WORLD_SIZE", "3"), ("LOCAL_RANK", local)])
            .envs([("LOCAL_WORLD_SIZE", size), ("GROUP_RANK", node)])
            .envs([("GROUP_WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
            .env("MASTER_PORT", &port);
        command.spawn().unwrap()
    };
    for ended in all_ended(ranks.map(start).into()) {
        ended.fails(2, &["the same number of ranks on every node"]);
    }
}

#[test]
fn a_loss_that_is_not_finite_stops_or_skips_on_all_ranks_alike() {
    let project = Project::new();
    let bad = [
        "lr.peak=1e30",
        "lr.min=0",
        "lr.warmup_steps=0",
        "train.steps=12",
    ];
    let ranks = project.start_ranks(2, "abort", |_| bad.to_vec());
    for ended in all_ended(ranks) {
        ended.fails(5, &["is not finite at step", "lower lr.peak"]);
    }
    assert_eq!(
        names(&project.run_folder("abort").join("checkpoints")).len(),
        1
    );
    all_complete(&project, "abort");

    let skip = [&bad[..], &["train.non_finite=skip", "train.max_skips=3"]].concat();
    let launch = ["--nproc-per-node", "2"];
    let ended = project.launch(&launch, "skip", &skip);
    ended.fails(
        5,
        &["train.max_skips = 3", "rank 0 failed with exit status 5"],
    );
    let skips = project.metrics("skip");
    let skips = skips.iter().filter(|line| line["event"] == "skipped");
    assert_eq!(skips.count(), 3);
    all_complete(&project, "skip");
    // What the second half did on one rank is what two did.
    ended_with_skips(&project, &skip);
}

/// One rank skips the same steps.
#[track_caller]
fn ended_with_skips(project: &Project, sets: &[&str]) {
    ended(project.start("one", sets)).fails(5, &["train.max_skips = 3"]);
    let position = |name: &str| {
        let root = project.run_folder(name).join("checkpoints");
        let newest = names(&root).pop().unwrap();
        Checkpoint::open(&root.join(newest))
            .unwrap()
            .manifest
            .position
    };
    assert_eq!(position("one"), position("skip"));
}
