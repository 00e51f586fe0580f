//! The normal life of a run, through the binary.

mod common;

use std::fs;

use common::{Project, contents, names, signal_after};
use serde_json::Value;

#[test]
fn a_run_leaves_a_complete_folder_and_learns() {
    let project = Project::new();
    let ended = project.run("a", &["train.steps=60"]).ok();
    for part in ["saved", "done: 60 steps", "bigram"] {
        assert!(ended.stderr.contains(part), "{}", ended.stderr);
    }
    let folder = project.run_folder("a");
    let expected = [
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "tensorboard",
        "tokenizer.json",
        "train.log",
    ];
    let visible: Vec<_> = names(&folder)
        .into_iter()
        .filter(|n| !n.starts_with('.'))
        .collect();
    assert_eq!(visible, expected);
    assert_eq!(names(&folder.join("checkpoints")), ["step_00000060"]);
    let files = [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
    ];
    assert_eq!(names(&project.checkpoint("a", 60)), files);
    let events = names(&folder.join("tensorboard"));
    assert!(events.len() == 1 && events[0].starts_with("events.out.tfevents."));
    let log = fs::read_to_string(folder.join("train.log")).unwrap();
    assert!(log.contains("done: 60 steps"), "{log}");

    let lines = project.metrics("a");
    let of = |kind: &str| {
        lines
            .iter()
            .filter(|l| l["kind"] == kind)
            .collect::<Vec<&Value>>()
    };
    let train = of("train");
    assert_eq!(train.len(), 60);
    for (step, line) in train.iter().enumerate() {
        assert_eq!(line["step"], step);
        assert_eq!(line["tokens"], (step + 1) * 4 * 16);
        for key in [
            "loss",
            "lr",
            "grad_norm",
            "step_ms",
            "tokens_per_s",
            "tflops",
        ] {
            assert!(line[key].as_f64().unwrap() > 0.0, "{key} of {line}");
        }
        assert!(line["mfu"].is_null() && line["flops_formula"].is_string());
        assert!(line["memory"]["optimizer_state_bytes"].as_u64() > Some(0));
    }
    let evals = of("eval");
    let steps: Vec<u64> = evals.iter().map(|e| e["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=12).map(|i| 5 * i - 1).collect::<Vec<_>>());
    let loss = |line: &Value, key: &str| line[key].as_f64().unwrap();
    assert!(loss(train[0], "loss") > 3.0 && loss(train[59], "loss") < 2.4);
    assert!(loss(evals[11], "val_loss") < loss(evals[0], "val_loss") - 0.2);
}

#[test]
fn the_resolved_config_repeats_the_run() {
    let project = Project::new();
    project
        .run("a", &["lr.peak=7e-3", "optimizer.state=8bit"])
        .ok();
    let story = project.story("a");
    project
        .train(&["run", "runs/a/config.toml", "--overwrite"])
        .ok();
    assert_eq!(project.story("a"), story);
}

#[test]
fn an_earlier_run_is_never_mixed_with_a_new_one() {
    let project = Project::new();
    project.run("a", &["train.steps=6"]).ok();
    let before = contents(&project.run_folder("a"));
    let remedies = ["runs/a", "--resume", "--overwrite", "run.name"];
    project.run("a", &["run.seed=2"]).fails(2, &remedies);
    assert_eq!(contents(&project.run_folder("a")), before);

    // Checkpoints alone are a run too: a new one would count its own among them.
    fs::remove_file(project.run_folder("a").join("metrics.jsonl")).unwrap();
    project.run("a", &["run.seed=2"]).fails(2, &remedies);
    assert_eq!(
        names(&project.run_folder("a").join("checkpoints")),
        ["step_00000006"]
    );
}

#[test]
fn overwrite_starts_over_and_leaves_other_files() {
    let project = Project::new();
    project.run("fresh", &["run.seed=2"]).ok();
    project
        .run("a", &["train.steps=30", "checkpoint.every=10"])
        .ok();
    fs::write(project.run_folder("a").join("notes.txt"), "mine").unwrap();
    project.run("a", &["run.seed=2", "--overwrite"]).ok();
    assert_eq!(project.story("a"), project.story("fresh"));
    let folder = project.run_folder("a");
    assert_eq!(names(&folder.join("checkpoints")), ["step_00000012"]);
    assert_eq!(names(&folder.join("tensorboard")).len(), 1);
    assert_eq!(
        fs::read_to_string(folder.join("notes.txt")).unwrap(),
        "mine"
    );
}

#[test]
fn an_overwrite_that_cannot_start_deletes_nothing() {
    let project = Project::new();
    project.run("a", &[]).ok();
    let before = contents(&project.run_folder("a"));
    project
        .run("a", &["--overwrite", "data.text=absent.txt"])
        .fails(2, &["absent.txt"]);
    project
        .run("a", &["--overwrite", "model.seq_len=4000"])
        .fails(3, &["model.seq_len"]);
    project
        .run("a", &["--overwrite", "--init-from", "absent"])
        .fails(3, &["absent"]);
    assert_eq!(contents(&project.run_folder("a")), before);
}

#[test]
fn the_seed_decides_the_run_and_threads_do_not() {
    let project = Project::new();
    // Rows are cut into chunks of 64: a microbatch has six.
    let sets = [
        "train.steps=6",
        "model.d_model=64",
        "model.seq_len=96",
        "train.micro_batch=4",
        "train.global_batch=8",
    ];
    let run = |name: &str, more: &[&str]| {
        project.run(name, &[&sets[..], more].concat()).ok();
        (project.story(name), project.tensors(name, 6))
    };
    let first = run("a", &[]);
    assert_eq!(first, run("b", &[]));
    assert_eq!(first, run("c", &["train.threads=2"]));
    assert_eq!(first, run("d", &["train.threads=3"]));
    let other = run("e", &["run.seed=2"]);
    assert!(first.0.iter().zip(&other.0).all(|(a, b)| a != b));
}

#[test]
fn logging_changes_no_bit() {
    let project = Project::new();
    project.run("a", &[]).ok();
    let quiet = [
        "metrics.log_every=5",
        "metrics.tensorboard=false",
        "train.eval_every=0",
    ];
    project.run("b", &quiet).ok();
    assert_eq!(project.tensors("a", 12), project.tensors("b", 12));
    let (all, some) = (project.story("a"), project.story("b"));
    assert_eq!(
        some.len(),
        5,
        "steps 0, 5, 10, the last, and its evaluation: {some:?}"
    );
    assert!(some.iter().all(|line| all.contains(line)));
    assert!(!project.run_folder("b").join("tensorboard").exists());
}

/// A run stopped by Ctrl-C and resumed is bitwise the run that never stopped: batches, dropout,
/// learning rate, optimizer state, metrics.
#[track_caller]
fn stop_and_resume(sets: &[&str]) {
    let project = Project::new();
    let sets = [
        &[
            "train.steps=1500",
            "train.eval_every=100",
            "checkpoint.keep=100",
        ],
        sets,
    ]
    .concat();
    project.run("whole", &sets).ok();

    let ended = signal_after(project.start("parts", &sets), 40, "INT", 0).ok();
    let checkpoints = project.run_folder("parts").join("checkpoints");
    let stopped: u64 = names(&checkpoints)[0]["step_".len()..].parse().unwrap();
    assert!((40..1500).contains(&stopped));
    for part in [&format!("stopped at step {stopped} of 1500"), "--resume"] {
        assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
    }
    let line = project.metrics("parts").pop().unwrap();
    assert_eq!(
        (&line["event"], &line["step"]),
        (&"interrupted".into(), &stopped.into())
    );

    let again = [&sets[..], &["--resume"]].concat();
    let ended = project.run("parts", &again).ok();
    assert!(
        ended
            .stderr
            .contains(&format!("resuming at step {stopped}")),
        "{}",
        ended.stderr
    );
    assert_eq!(project.story("parts"), project.story("whole"));
    assert_eq!(
        project.tensors("parts", 1500),
        project.tensors("whole", 1500)
    );
}

#[test]
fn a_run_resumed_after_ctrl_c_equals_the_run_that_never_stopped() {
    stop_and_resume(&[]);
}

#[test]
fn a_resumed_run_replays_no_batch_under_8_bit_state() {
    stop_and_resume(&[
        "optimizer.state=8bit",
        "model.stable_embedding=true",
        "train.threads=2",
    ]);
}

#[test]
fn ctrl_c_cuts_an_evaluation_short_and_the_resumed_run_makes_it() {
    let project = Project::new();
    // An evaluation takes much longer than a signal.
    project.write("text.txt", common::text().repeat(30));
    let sets = [
        "data.val_fraction=0.9",
        "train.steps=3",
        "train.eval_every=2",
    ];
    for (name, eval_batches, step) in [
        ("during", "train.eval_batches=0", 2),
        ("last", "train.eval_batches=1", 3),
    ] {
        let sets = [&sets[..], &[eval_batches]].concat();
        let whole = format!("{name}_whole");
        project.run(&whole, &sets).ok();
        let ended = signal_after(project.start(name, &sets), step, "INT", 0).ok();
        let message = format!("stopped at step {step} of 3");
        assert!(ended.stderr.contains(&message), "{}", ended.stderr);
        let steps = project.story(name).len() as u64;
        assert_eq!(
            steps,
            if step == 2 { 2 } else { 4 },
            "the evaluation is on record"
        );
        project.run(name, &[&sets[..], &["--resume"]].concat()).ok();
        assert_eq!(project.story(name), project.story(&whole));
        assert_eq!(project.tensors(name, 3), project.tensors(&whole, 3));
    }
}

#[test]
fn the_last_evaluation_scores_the_whole_split() {
    let project = Project::new();
    let val_loss = |name: &str, step: u64| {
        let lines = project.metrics(name);
        let of_step = |l: &&Value| l["kind"] == "eval" && l["step"] == step;
        lines.iter().find(of_step).unwrap()["val_loss"].clone()
    };
    let sets = ["train.steps=10", "train.eval_every=5"];
    for (name, eval_batches) in [
        ("part", "train.eval_batches=1"),
        ("all", "train.eval_batches=0"),
    ] {
        project
            .run(name, &[&sets[..], &[eval_batches]].concat())
            .ok();
    }
    assert_ne!(val_loss("part", 4), val_loss("all", 4));
    assert_eq!(val_loss("part", 9), val_loss("all", 9));
}

#[test]
fn a_run_resumed_from_any_checkpoint_equals_the_run_that_never_stopped() {
    for state in ["f32", "8bit"] {
        let project = Project::new();
        let state = format!("optimizer.state={state}");
        let sets = [state.as_str(), "checkpoint.every=3", "checkpoint.keep=9"];
        project.run("whole", &sets).ok();
        let story = project.story("whole");
        let last = project.tensors("whole", 12);
        assert!(last["optimizer.safetensors"].len() > 1000);
        for step in [9, 6, 3] {
            for later in (step + 1..=12).filter(|s| s % 3 == 0) {
                fs::remove_dir_all(project.checkpoint("whole", later)).unwrap();
            }
            project
                .run("whole", &[&sets[..], &["--resume"]].concat())
                .ok();
            assert_eq!(project.story("whole"), story, "from step {step}");
            assert_eq!(project.tensors("whole", 12), last, "from step {step}");
        }
    }
}

#[test]
fn a_run_killed_before_its_first_checkpoint_can_be_resumed() {
    let project = Project::new();
    project.run("whole", &[]).ok();
    project.run("parts", &[]).ok();
    fs::remove_dir_all(project.run_folder("parts").join("checkpoints")).unwrap();
    let ended = project.run("parts", &["--resume"]).ok();
    assert!(
        ended.stderr.contains("starting at step 0"),
        "{}",
        ended.stderr
    );
    assert_eq!(project.story("parts"), project.story("whole"));
    assert_eq!(project.tensors("parts", 12), project.tensors("whole", 12));
}

#[test]
fn resume_without_a_run_starts_one() {
    let project = Project::new();
    project.run("whole", &[]).ok();
    project.run("a", &["--resume"]).ok();
    assert_eq!(project.story("a"), project.story("whole"));
}

#[test]
fn resuming_a_finished_run_repeats_nothing() {
    let project = Project::new();
    project.run("a", &[]).ok();
    let (lines, manifest) = (
        project.metrics("a"),
        project.checkpoint("a", 12).join("manifest.json"),
    );
    let written = fs::metadata(&manifest).unwrap().modified().unwrap();
    let ended = project.run("a", &["--resume"]).ok();
    assert!(ended.stderr.contains("12 steps"), "{}", ended.stderr);
    assert_eq!(project.metrics("a"), lines);
    assert_eq!(
        fs::metadata(&manifest).unwrap().modified().unwrap(),
        written
    );
}

#[test]
fn a_second_ctrl_c_stops_at_once() {
    let project = Project::new();
    // A step takes longer than copies of a signal may, so the second signal meets a running step.
    let sets = ["train.steps=100000", "train.global_batch=40000"];
    let ended = signal_after(project.start("a", &sets), 1, "INT", 1);
    assert_eq!(ended.code(), 130, "{}", ended.stderr);
    let sets = [
        "train.steps=1",
        "lr.warmup_steps=0",
        "train.global_batch=40000",
    ];
    let resumed = project.run("a", &[&sets[..], &["--resume"]].concat());
    resumed.ok();
}

#[test]
fn sigterm_saves_like_ctrl_c() {
    let project = Project::new();
    let ended = signal_after(project.start("a", &["train.steps=3000"]), 3, "TERM", 0).ok();
    assert!(
        ended.stderr.contains("--resume goes on"),
        "{}",
        ended.stderr
    );
    assert_eq!(names(&project.run_folder("a").join("checkpoints")).len(), 1);
}

#[test]
fn exactly_the_newest_checkpoints_stay() {
    let project = Project::new();
    project
        .run("a", &["checkpoint.every=2", "checkpoint.keep=2"])
        .ok();
    let checkpoints = project.run_folder("a").join("checkpoints");
    assert_eq!(names(&checkpoints), ["step_00000010", "step_00000012"]);
    project
        .run(
            "a",
            &["checkpoint.every=5", "checkpoint.keep=1", "--overwrite"],
        )
        .ok();
    assert_eq!(names(&checkpoints), ["step_00000012"]);
    project
        .run(
            "a",
            &["checkpoint.every=5", "checkpoint.keep=9", "--overwrite"],
        )
        .ok();
    assert_eq!(
        names(&checkpoints),
        ["step_00000005", "step_00000010", "step_00000012"]
    );
}

#[test]
fn init_from_takes_the_weights_and_nothing_else() {
    let project = Project::new();
    project.run("a", &[]).ok();
    let weights = "runs/a/checkpoints/step_00000012/model.safetensors";
    project.run("b", &["--init-from", weights]).ok();
    let (a, b) = (project.metrics("a"), project.metrics("b"));
    let trained = a.iter().rev().find(|l| l["kind"] == "train").unwrap();
    assert_eq!(b[0]["lr"], a[0]["lr"]);
    let loss = |line: &Value| line["loss"].as_f64().unwrap();
    assert!((loss(&b[0]) - loss(trained)).abs() < 0.3 && loss(&b[0]) < loss(&a[0]) - 0.3);
    // Overwriting the run that the weights come from reads them first.
    project
        .run("a", &["--overwrite", "--init-from", weights])
        .ok();
    assert_eq!(project.story("a"), project.story("b"));
}

#[test]
fn sample_writes_text_that_depends_on_the_seed_alone() {
    let project = Project::new();
    project.run("a", &["train.steps=200"]).ok();
    let sample = |more: &[&str]| {
        let args = [
            &["sample", "runs/a", "--prompt", "the ", "--tokens", "60"],
            more,
        ]
        .concat();
        project.train(&args).ok().stdout
    };
    let first = sample(&[]);
    assert!(first.starts_with("the "));
    assert_eq!(first.chars().count(), 4 + 60 + 1, "{first:?}");
    assert!(first.chars().all(|c| common::text().contains(c)));
    assert_eq!(first, sample(&["--threads", "1"]));
    assert_ne!(first, sample(&["--seed", "2"]));
    let greedy = sample(&["--temperature", "0"]);
    assert_eq!(greedy, sample(&["--temperature", "0", "--seed", "2"]));
    assert_eq!(greedy, sample(&["--top-k", "1", "--seed", "3"]));
}

#[test]
fn sample_names_what_is_wrong_with_the_prompt() {
    let project = Project::new();
    project.run("a", &[]).ok();
    let sample = |more: &[&str]| project.train(&[&["sample", "runs/a"], more].concat());
    let ended = sample(&["--prompt", "the ß"]).fails(2, &["--prompt", "ß"]);
    assert_eq!(ended.stdout, "");
    sample(&["--prompt", ""]).fails(2, &["--prompt"]);
    sample(&["--temperature=-1"]).fails(2, &["--temperature"]);
    sample(&["--temperature", "nan"]).fails(2, &["--temperature"]);
}

#[test]
fn sample_of_bytes_prints_whole_characters() {
    let project = Project::new();
    // Untrained: most tokens are no UTF-8.
    project
        .run(
            "a",
            &["data.tokenizer=byte", "train.steps=1", "lr.warmup_steps=0"],
        )
        .ok();
    for seed in ["1", "2", "3"] {
        let args = [
            "sample", "runs/a", "--prompt", "ü", "--tokens", "100", "--seed", seed,
        ];
        let text = project.train(&args).ok().stdout;
        assert!(
            text.starts_with('ü') && text.chars().count() > 30,
            "{text:?}"
        );
    }
}

#[test]
fn prepare_prints_the_baselines_once_and_run_reuses_its_data() {
    let project = Project::new();
    let ended = project.train(&["prepare", "run.toml"]).ok();
    let number = |name: &str| {
        let (_, rest) = ended.stdout.split_once(name).unwrap();
        rest.split([',', ' '])
            .nth(1)
            .unwrap()
            .parse::<f64>()
            .unwrap()
    };
    assert!(0.0 < number("bigram") && number("bigram") < number("unigram"));
    let before = contents(&project.path("data"));
    assert_eq!(
        project.train(&["prepare", "run.toml"]).ok().stdout,
        ended.stdout
    );
    project.run("a", &[]).ok();
    assert_eq!(contents(&project.path("data")), before);
}

#[test]
fn the_config_reference_has_every_section_and_key() {
    let project = Project::new();
    let reference = project.train(&["config-reference"]).ok().stdout;
    let sections = [
        "run",
        "data",
        "model",
        "optimizer",
        "lr",
        "train",
        "checkpoint",
        "metrics",
        "hardware",
    ];
    for section in sections {
        assert!(
            reference.contains(&format!("[{section}]")),
            "{section}: {reference}"
        );
    }
    project.run("a", &[]).ok();
    let resolved = fs::read_to_string(project.run_folder("a").join("config.toml")).unwrap();
    for line in resolved.lines() {
        let key = line.split(" = ").next().unwrap();
        assert!(reference.contains(key), "{key}");
    }
}

#[test]
fn a_closed_standard_output_is_no_panic() {
    let project = Project::new();
    for args in [
        &["config-reference"][..],
        &["prepare", "run.toml"],
        &["bench", "quantize", "--log2-n", "12"],
        &["bench", "quantize", "--log2-n", "12", "--json"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = project.command(args).stdout(writer).spawn().unwrap();
        common::ended(child).ok();
    }
}

#[test]
fn resident_memory_is_flat_over_200_steps_of_a_run() {
    let project = Project::new();
    let sets = [
        "train.steps=260",
        "train.micro_batch=8",
        "train.global_batch=16",
    ];
    project.run("a", &sets).ok();
    let lines = project.metrics("a");
    let resident = |step: u64| {
        let line = lines.iter().find(|l| l["step"] == step).unwrap();
        line["memory"]["rss_bytes"].as_i64().unwrap()
    };
    // A step's activations have above 1 MB.
    let grown = resident(259) - resident(59);
    assert!(grown < 8 << 20, "{grown} bytes in 200 steps");
}

/// The rows that `train bench` prints with `--json`.
fn bench(args: &[&str]) -> Vec<Value> {
    let project = Project::new();
    let args = [&["bench"], args, &["--json"]].concat();
    let stdout = project.train(&args).ok().stdout;
    serde_json::from_str(&stdout).unwrap()
}

#[test]
fn bench_step_prints_one_json_array() {
    let rows = bench(&["step", "--shape", "1,32,2,16,2,97", "--steps", "1"]);
    assert_eq!(rows.len(), 1);
    let sizes = [
        ("num_layers", 1),
        ("d_model", 32),
        ("seq_len", 16),
        ("micro_batch", 2),
    ];
    for (key, value) in sizes {
        assert_eq!(rows[0][key], value);
    }
    for key in ["gflops", "gemm_limit_gflops"] {
        assert!(rows[0][key].as_f64().unwrap() > 0.0, "{key}");
    }
}

#[test]
fn bench_optimizer_and_quantize_print_one_json_array() {
    let rows = bench(&["optimizer", "--log2-n", "12"]);
    let states: Vec<_> = rows.iter().map(|r| r["state"].as_str().unwrap()).collect();
    assert!(states.contains(&"f32") && states.contains(&"8bit"));
    for row in &rows {
        assert!(row["name"].is_string() && row["num_params"] == 4096);
        assert!(row["ns_per_param"].as_f64().unwrap() > 0.0);
        assert_eq!(row["block"].is_null(), row["state"] == "f32");
    }
    let rows = bench(&["quantize", "--log2-n", "12"]);
    assert!(!rows.is_empty() && rows.iter().all(|r| r["name"].is_string()));
    for key in ["gb_s_in", "gb_s_out", "memcpy_gb_s"] {
        assert!(rows.iter().all(|r| r[key].as_f64().unwrap() > 0.0), "{key}");
    }
}
