//! Many ranks train what one trains, however they were started and whatever they resume from.
//! Real processes; `tests/zero_ranks.rs` has the same promises for ranks that are threads.

mod common;

use std::fs;
use std::process::{Child, Command, Stdio};

use common::processes::{
    all_ended, assert_close, can_make_namespaces, free_port, script, torchrun,
};
use common::{Project, copy_folder};
use serde_json::Value;

const TRAIN: &str = env!("CARGO_BIN_EXE_train");

/// Sizes that no number of ranks divides, and a global batch that 1, 2, 3 and 4 ranks can share.
const SETS: [&str; 3] = [
    "model.d_model=36",
    "train.global_batch=24",
    "train.steps=20",
];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&SETS[..], more].concat()
}

#[test]
fn any_number_of_ranks_trains_the_same_model() {
    let project = Project::new();
    project.run("one", &with(&[])).ok();
    let one = project.losses("one");
    for (ranks, nodes, local) in [
        ("1", "1", "auto"),
        ("2", "1", "shm"),
        ("2", "2", "tcp"),
        ("3", "1", "shm"),
        ("3", "1", "tcp"),
        ("4", "1", "shm"),
        ("4", "1", "tcp"),
        ("4", "2", "shm"),
        ("4", "2", "tcp"),
        ("4", "4", "tcp"),
    ] {
        let name = format!("{ranks}_on_{nodes}_{local}");
        let flags = ["--nproc-per-node", ranks, "--emulate-nodes", nodes];
        let local = format!("comm.local={local}");
        project.launch(&flags, &name, &with(&[&local])).ok();
        assert_close(&one, &project.losses(&name), 1e-5, &name);
    }
}

#[test]
fn eight_ranks_train_like_eight_microbatches() {
    let project = Project::new();
    let sets = [
        "train.micro_batch=1",
        "train.global_batch=8",
        "train.steps=20",
    ];
    project.run("one", &sets).ok();
    let (one, flags) = (project.losses("one"), ["--nproc-per-node", "8"]);
    for (name, more) in [("eight", "zero.stage=3"), ("whole", "zero.stage=0")] {
        project
            .launch(&flags, name, &[&sets[..], &[more]].concat())
            .ok();
        assert_close(&one, &project.losses(name), 1e-5, name);
    }
}

/// Starts 2 x 2 ranks by hand, `env` and more arguments of each by its rank.
fn by_hand(
    project: &Project,
    name: &str,
    env: impl Fn(usize) -> Vec<(&'static str, String)>,
    more: impl Fn(usize) -> Vec<String>,
) {
    let start = |rank| -> Child {
        let mut command = project.command(&[]);
        command
            .args(Project::run_args(name, &SETS))
            .args(more(rank))
            .envs(env(rank));
        command.spawn().unwrap()
    };
    for ended in all_ended((0..4).map(start).collect()) {
        ended.ok();
    }
}

/// Runs a program that needs the caller's PATH.
#[track_caller]
fn run_elsewhere(project: &Project, mut command: Command) {
    command
        .current_dir(project.path(""))
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .stdin(Stdio::null());
    if let Some(torchrun) = torchrun() {
        command.env("TRAIN_TEST_TORCHRUN", torchrun);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

#[test]
fn every_launcher_starts_the_same_run_bit_for_bit() {
    let project = Project::new();
    let flags = ["--nproc-per-node", "4", "--emulate-nodes", "2"];
    project.launch(&flags, "launch", &SETS).ok();
    let same = |name: &str| {
        assert_eq!(project.losses(name), project.losses("launch"), "{name}");
        assert_eq!(
            project.tensors(name, 20),
            project.tensors("launch", 20),
            "{name}"
        );
    };
    let no_flags = |_| Vec::new();

    let port = free_port();
    let flags = |rank: usize| {
        let flags = format!(
            "--rank {rank} --world-size 4 --ranks-per-node 2 --master-addr 127.0.0.1 --master-port {port}"
        );
        flags.split(' ').map(String::from).collect()
    };
    by_hand(&project, "flags", |_| Vec::new(), flags);
    same("flags");

    let slurm = |rank: usize| {
        vec![
            ("SLURM_JOB_ID", std::process::id().to_string()),
            ("SLURM_STEP_ID", "0".into()),
            ("SLURM_NTASKS", "4".into()),
            ("SLURM_PROCID", rank.to_string()),
            ("SLURM_LOCALID", (rank % 2).to_string()),
            ("SLURM_NODEID", (rank / 2).to_string()),
            ("SLURM_NNODES", "2".into()),
            ("SLURM_TASKS_PER_NODE", "2(x2)".into()),
            ("SLURM_JOB_NODELIST", "localhost,other".into()),
        ]
    };
    by_hand(&project, "slurm", slurm, no_flags);
    same("slurm");

    let port = free_port();
    let mpi = |rank: usize| {
        vec![
            ("OMPI_COMM_WORLD_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_SIZE", "4".into()),
            ("OMPI_COMM_WORLD_LOCAL_RANK", (rank % 2).to_string()),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2".into()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", port.clone()),
        ]
    };
    by_hand(&project, "mpi", mpi, no_flags);
    same("mpi");

    let nodes = |torchrun: Option<std::path::PathBuf>, name: &str| {
        let mut command = Command::new(script("netns_cluster"));
        command.args(["2", "2", "200mbit", "--", TRAIN]);
        command.args(Project::run_args(name, &SETS));
        command.envs(torchrun.map(|torchrun| ("TORCHRUN", torchrun)));
        command
    };
    let torchrun = torchrun();
    if let Some(torchrun) = &torchrun {
        let mut command = Command::new(torchrun);
        command
            .args([
                "--standalone",
                "--nproc-per-node",
                "4",
                "--no-python",
                TRAIN,
            ])
            .args(Project::run_args("torchrun", &SETS))
            .args(["--emulate-nodes", "2"]);
        run_elsewhere(&project, command);
        same("torchrun");
    }
    if can_make_namespaces() {
        run_elsewhere(&project, nodes(None, "nodes"));
        same("nodes");
        if torchrun.is_some() {
            let mut command = nodes(None, "torchrun_nodes");
            command.env_clear();
            let script = "TORCHRUN=$TRAIN_TEST_TORCHRUN exec \"$@\"";
            let mut shell = Command::new("sh");
            shell.args(["-c", script, "sh"]).arg(command.get_program());
            shell.args(command.get_args());
            run_elsewhere(&project, shell);
            same("torchrun_nodes");
        }
    }
}

/// Resumes a copy of run `from` on `ranks` after its checkpoint of step 6, as run `name`.
#[track_caller]
fn resume(project: &Project, from: &str, name: &str, ranks: &str, sets: &[&str]) {
    copy_folder(&project.run_folder(from), &project.run_folder(name));
    for later in [12, 18, 20] {
        let _ = fs::remove_dir_all(project.checkpoint(name, later));
    }
    let flags = ["--nproc-per-node", ranks];
    let ended = project
        .launch(&flags, name, &with(&[sets, &["--resume"]].concat()))
        .ok();
    let message = "resuming at step 6 from";
    assert!(ended.stderr.contains(message), "{}", ended.stderr);
}

const SAVE: [&str; 2] = ["checkpoint.every=6", "checkpoint.keep=9"];

#[test]
fn a_checkpoint_of_any_number_of_ranks_resumes_on_any_other() {
    let project = Project::new();
    // A rate of 0 moves no weight: what the next step saves is what was loaded.
    let still = ["lr.peak=0", "lr.min=0", "train.steps=7"];
    let weights = |name: &str, step: u64| {
        fs::read(project.checkpoint(name, step).join("model.safetensors")).unwrap()
    };
    for (saved_on, stage, resumed_on) in [
        ("4", "zero.stage=3", &["1", "2", "3", "4"][..]),
        ("2", "zero.stage=0", &["4", "3"]),
        ("1", "zero.stage=3", &["4"]),
    ] {
        let whole = format!("on_{saved_on}");
        let flags = ["--nproc-per-node", saved_on];
        project
            .launch(&flags, &whole, &with(&[&SAVE[..], &[stage]].concat()))
            .ok();
        for ranks in resumed_on {
            for other in ["zero.stage=3", "zero.stage=0"] {
                let name = format!("{whole}_then_{ranks}_{other}");
                let sets = [&SAVE[..], &[other]].concat();
                resume(&project, &whole, &name, ranks, &sets);
                assert_close(&project.losses(&whole), &project.losses(&name), 1e-5, &name);
                if ranks == &saved_on && stage == other {
                    assert_eq!(project.story(&whole), project.story(&name));
                    assert_eq!(project.tensors(&whole, 20), project.tensors(&name, 20));
                }
            }
            let name = format!("{whole}_then_{ranks}_still");
            resume(
                &project,
                &whole,
                &name,
                ranks,
                &[&SAVE[..], &still].concat(),
            );
            assert_eq!(weights(&name, 7), weights(&whole, 6), "{name}");
        }
    }
}

#[test]
fn eight_bit_state_resumes_on_other_ranks() {
    let project = Project::new();
    let sets = [&SAVE[..], &["optimizer.state=8bit"]].concat();
    project
        .launch(&["--nproc-per-node", "4"], "whole", &with(&sets))
        .ok();
    resume(&project, "whole", "same", "4", &sets);
    assert_eq!(project.story("same"), project.story("whole"));
    assert_eq!(project.tensors("same", 20), project.tensors("whole", 20));
    for ranks in ["1", "3"] {
        resume(&project, "whole", ranks, ranks, &sets);
        // Rounding of a sum may move a code to its neighbour.
        assert_close(
            &project.losses("whole"),
            &project.losses(ranks),
            1e-3,
            ranks,
        );
    }
}

#[test]
fn four_ranks_hold_a_quarter_and_move_the_same_every_step() {
    let project = Project::new();
    // Large enough that padding to whole blocks is little.
    let sets = [
        "model.d_model=128",
        "train.micro_batch=1",
        "train.steps=6",
        "train.eval_every=2",
    ];
    project.run("one", &sets).ok();
    let flags = ["--nproc-per-node", "4", "--emulate-nodes", "2"];
    project.launch(&flags, "four", &sets).ok();
    let steps = |name: &str| -> Vec<Value> {
        let mut lines = project.metrics(name);
        lines.retain(|line| line["kind"] == "train");
        lines
    };
    let (one, four) = (steps("one"), steps("four"));
    for key in ["master_bytes", "optimizer_state_bytes", "gradient_bytes"] {
        let bytes = |line: &Value| line["memory"][key].as_u64().unwrap() as f64;
        let share = bytes(&four[5]) / bytes(&one[5]);
        assert!((0.25..0.27).contains(&share), "{key}: {share}");
    }
    for line in &four {
        let memory = line["memory"].as_object().unwrap();
        for key in [
            "peak_gathered_bytes",
            "peak_activation_bytes",
            "rss_bytes",
            "peak_rss_bytes",
        ] {
            assert!(memory[key].as_u64() > Some(0), "{key} of {line}");
        }
    }
    // A step whose evaluation came before it books that too: compare those without.
    let comm = |step: usize| &four[step]["comm"];
    assert!(comm(1)["inter_bytes"].as_u64() > Some(0), "{}", four[1]);
    assert!(comm(1)["intra_bytes"].as_u64() > Some(0), "{}", four[1]);
    for (a, b) in [(1, 3), (3, 5), (2, 4)] {
        for key in ["intra_bytes", "inter_bytes"] {
            assert_eq!(
                comm(a)[key],
                comm(b)[key],
                "{key} of {} and {}",
                four[a],
                four[b]
            );
        }
    }
    for line in &one {
        let comm = &line["comm"];
        assert_eq!(
            (&comm["intra_bytes"], &comm["inter_bytes"]),
            (&0.into(), &0.into())
        );
    }
}
