//! Kills, damaged files, other configs, values that are not finite, wrong input: the exit status,
//! what the message names, and what stays.

mod common;

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use common::{Project, contents, copy_folder, ended, names, send};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use train::Error;
use train::checkpoint::{Checkpoint, latest};

/// Kills `child` and waits for its end.
fn kill(mut child: Child) {
    send(&child, "KILL");
    child.wait().unwrap();
}

/// Fails when a folder under a checkpoint's name is not a whole checkpoint.
#[track_caller]
fn all_complete(checkpoints: &Path) {
    if checkpoints.exists() {
        for name in names(checkpoints).iter().filter(|n| !n.starts_with('.')) {
            Checkpoint::open(&checkpoints.join(name)).unwrap();
        }
    }
}

/// Saves after every step, so that most of a run's time is spent saving.
const SAVE_ALWAYS: [&str; 2] = ["checkpoint.every=1", "train.steps=40"];

#[test]
fn a_run_killed_at_any_moment_resumes_to_the_same_end() {
    let project = Project::new();
    project.run("whole", &SAVE_ALWAYS).ok();
    let sets = [&SAVE_ALWAYS[..], &["--resume"]].concat();
    let checkpoints = project.run_folder("parts").join("checkpoints");
    for delay_ms in [1, 3, 5, 8, 12, 17, 23, 30, 40, 55] {
        let child = project.start("parts", &sets);
        std::thread::sleep(Duration::from_millis(delay_ms));
        kill(child);
        all_complete(&checkpoints);
    }
    project.run("parts", &sets).ok();
    assert_eq!(project.story("parts"), project.story("whole"));
    assert_eq!(project.tensors("parts", 40), project.tensors("whole", 40));
}

#[test]
fn a_run_killed_while_saving_leaves_nothing_half_written() {
    let project = Project::new();
    project.run("whole", &SAVE_ALWAYS).ok();
    let sets = [&SAVE_ALWAYS[..], &["--resume"]].concat();
    let checkpoints = project.run_folder("parts").join("checkpoints");
    let is_temporary = |name: &String| name.contains(".tmp-");
    let saving = || checkpoints.exists() && names(&checkpoints).iter().any(is_temporary);
    let mut left = 0;
    for _ in 0..6 {
        let child = project.start("parts", &sets);
        let deadline = Instant::now() + Duration::from_secs(20);
        while !saving() && Instant::now() < deadline {
            std::hint::spin_loop();
        }
        kill(child);
        all_complete(&checkpoints);
        left += names(&checkpoints)
            .iter()
            .filter(|n| is_temporary(n))
            .count();
    }
    assert!(left > 0, "no kill met a save");
    project.run("parts", &sets).ok();
    assert!(!names(&checkpoints).iter().any(is_temporary));
    assert_eq!(project.story("parts"), project.story("whole"));
    assert_eq!(project.tensors("parts", 40), project.tensors("whole", 40));
}

#[test]
fn an_overwrite_killed_at_any_moment_never_resumes_the_earlier_run() {
    let project = Project::new();
    project.run("whole", &["run.seed=2"]).ok();
    project
        .run("old", &["checkpoint.every=1", "checkpoint.keep=12"])
        .ok();
    for delay_ms in [2, 4, 6, 8, 10, 14] {
        let folder = project.run_folder("a");
        let _ = fs::remove_dir_all(&folder);
        copy_folder(&project.run_folder("old"), &folder);
        let child = project.start("a", &["run.seed=2", "--overwrite"]);
        std::thread::sleep(Duration::from_millis(delay_ms));
        kill(child);
        // Untouched yet, and refused for its seed; or the new run.
        let resumed = project.run("a", &["run.seed=2", "--resume"]);
        if resumed.code() == 0 {
            assert_eq!(project.story("a"), project.story("whole"));
        } else {
            resumed.fails(3, &["run.seed was 1337, now it is 2"]);
            assert_eq!(names(&folder.join("checkpoints")).len(), 12);
        }
    }
}

#[test]
fn two_processes_never_train_in_one_folder() {
    let project = Project::new();
    let mut first = project.start("a", &["train.steps=3000"]);
    // It writes its steps into a pipe that nobody reads and so stays alive.
    while !project.run_folder("a").join("metrics.jsonl").exists() {
        assert!(first.try_wait().unwrap().is_none());
    }
    for how in ["--resume", "--overwrite"] {
        let parts = ["another process", "runs/a", "run.name"];
        project
            .run("a", &["train.steps=3000", how])
            .fails(2, &parts);
    }
    kill(first);
    project.run("a", &["--overwrite"]).ok();
}

/// A project with a run of 4 steps, two checkpoints, and folder `saved` to restore it from.
fn saved() -> Project {
    let project = Project::new();
    project
        .run("saved", &["train.steps=8", "checkpoint.every=4"])
        .ok();
    project
}

/// Restores the run `a` of `project` and changes one file of its newest checkpoint.
fn damage(project: &Project, file: &str, change: impl FnOnce(&Path)) {
    let folder = project.run_folder("a");
    let _ = fs::remove_dir_all(&folder);
    copy_folder(&project.run_folder("saved"), &folder);
    change(&project.checkpoint("a", 8).join(file));
}

const RESUME: [&str; 3] = ["train.steps=8", "checkpoint.every=4", "--resume"];
const FILES: [&str; 3] = [
    "manifest.json",
    "model.safetensors",
    "optimizer.safetensors",
];

#[test]
fn a_damaged_checkpoint_is_refused_with_what_to_do() {
    let project = saved();
    let flip = |at: fn(usize) -> usize| {
        move |path: &Path| {
            let mut bytes = fs::read(path).unwrap();
            let at = at(bytes.len());
            bytes[at] ^= 1;
            fs::write(path, bytes).unwrap();
        }
    };
    let cut = |path: &Path| {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    };
    type Change = Box<dyn Fn(&Path)>;
    let damages: [(&str, Change); 6] = [
        ("first byte", Box::new(flip(|_| 0))),
        ("middle byte", Box::new(flip(|n| n / 2))),
        ("last byte", Box::new(flip(|n| n - 1))),
        ("cut", Box::new(cut)),
        (
            "empty",
            Box::new(|path: &Path| fs::write(path, "").unwrap()),
        ),
        (
            "missing",
            Box::new(|path: &Path| fs::remove_file(path).unwrap()),
        ),
    ];
    for file in FILES {
        for (what, change) in &damages {
            damage(&project, file, change);
            let before = contents(&project.run_folder("a"));
            let named = format!("runs/a/checkpoints/step_00000008/{file}");
            let ended = project.run("a", &RESUME);
            assert_eq!(ended.code(), 3, "{what} of {file}: {}", ended.stderr);
            ended.fails(3, &[&named, "delete runs/a/checkpoints/step_00000008 "]);
            assert_eq!(
                contents(&project.run_folder("a")),
                before,
                "{what} of {file}"
            );
        }
    }
    // The remedy works.
    fs::remove_dir_all(project.checkpoint("a", 8)).unwrap();
    project.run("a", &RESUME).ok();
    assert_eq!(project.story("a"), project.story("saved"));
}

/// A manifest whose step or number of updates was changed would resume another run in silence.
#[test]
fn no_byte_of_a_manifest_can_change_unnoticed() {
    let project = saved();
    damage(&project, "", |_| {});
    let root = project.run_folder("a").join("checkpoints");
    let path = project.checkpoint("a", 8).join("manifest.json");
    let whole = fs::read(&path).unwrap();
    latest(&root).unwrap().unwrap();
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(&path, bytes).unwrap();
        match latest(&root).err() {
            Some(Error::Checkpoint(message)) => assert!(message.contains("manifest.json")),
            other => panic!("byte {at}: {other:?}"),
        }
    }
}

#[test]
fn another_format_version_is_named_and_not_called_damage() {
    let project = saved();
    for version in [
        json!({"format_version": 1}),
        json!({"format_version": 4, "new": []}),
    ] {
        damage(&project, "manifest.json", |path| {
            fs::write(path, version.to_string()).unwrap();
        });
        let found = format!("format_version is {}", version["format_version"]);
        let ended = project
            .run("a", &RESUME)
            .fails(3, &["manifest.json", &found, "reads 3"]);
        assert!(!ended.stderr.contains("delete"), "{}", ended.stderr);
    }
}

#[test]
fn a_half_written_checkpoint_is_passed_over_and_cleaned_up() {
    let project = saved();
    damage(&project, "", |_| {});
    fs::remove_dir_all(project.checkpoint("a", 8)).unwrap();
    let root = project.run_folder("a").join("checkpoints");
    let left_over = root.join(".step_00000008.tmp-12345");
    fs::create_dir(&left_over).unwrap();
    fs::write(left_over.join("model.safetensors"), "half").unwrap();
    project.train(&["sample", "runs/a", "--tokens", "1"]).ok();
    let ended = project.run("a", &RESUME).ok();
    assert!(
        ended.stderr.contains("resuming at step 4"),
        "{}",
        ended.stderr
    );
    assert_eq!(names(&root), ["step_00000004", "step_00000008"]);
    assert_eq!(project.story("a"), project.story("saved"));
}

#[test]
fn resume_as_another_run_is_refused_and_touches_nothing() {
    let project = Project::new();
    project.run("a", &[]).ok();
    let before = contents(&project.run_folder("a"));
    let cases: [(&[&str], &str); 8] = [
        (&["run.seed=2"], "run.seed was 1337, now it is 2"),
        (&["model.d_model=64"], "model.d_model was 32, now it is 64"),
        (
            &["model.bias=false"],
            "model.bias was true, now it is false",
        ),
        (
            &["model.dropout=0.25"],
            "model.dropout was 0.1, now it is 0.25",
        ),
        (
            &["optimizer.state=8bit"],
            "optimizer.state was \"f32\", now it is \"8bit\"",
        ),
        (
            &["optimizer.weight_decay=0.2"],
            "optimizer.weight_decay was 0.1, now it is 0.2",
        ),
        (
            &["optimizer.beta2=0.99"],
            "optimizer.beta2 was 0.95, now it is 0.99",
        ),
        (
            &["train.global_batch=8"],
            "train.global_batch was 4, now it is 8",
        ),
    ];
    for (sets, what) in cases {
        let parts = [what, "runs/a/checkpoints/step_00000012", "run.name"];
        project
            .run("a", &[sets, &["--resume"]].concat())
            .fails(3, &parts);
        assert_eq!(contents(&project.run_folder("a")), before, "{what}");
    }
    project
        .run("a", &["data.tokenizer=byte", "--resume"])
        .fails(3, &["was 20, now it is 256"]);
    // Other text with the same characters.
    let text = common::text();
    project.write(
        "text.txt",
        text.lines()
            .rev()
            .map(|l| format!("{l}\n"))
            .collect::<String>(),
    );
    project
        .run("a", &["--resume"])
        .fails(3, &["[data]", "was", "now it is"]);
    assert_eq!(contents(&project.run_folder("a")), before);
}

#[test]
fn resume_with_another_schedule_goes_on_and_says_so() {
    let project = Project::new();
    project.run("a", &[]).ok();
    let sets = ["lr.peak=5e-3", "train.grad_clip=0.5", "train.steps=14"];
    let ended = project.run("a", &[&sets[..], &["--resume"]].concat()).ok();
    let changes = [
        "lr.peak was 0.01, now it is 0.005",
        "train.steps was 12, now it is 14",
        "train.grad_clip was 1.0, now it is 0.5",
    ];
    let recorded = events(&project, "a", "changed");
    assert_eq!(recorded.len(), changes.len());
    for (change, event) in changes.iter().zip(&recorded) {
        assert!(ended.stderr.contains(change), "{}", ended.stderr);
        assert_eq!(
            (&event["detail"], &event["step"]),
            (&json!(change), &json!(12))
        );
    }
    // The checkpoint of step 14 has the new values.
    let ended = project.run("a", &[&sets[..], &["--resume"]].concat()).ok();
    assert!(!ended.stderr.contains("now it is"), "{}", ended.stderr);
}

/// `model.safetensors` of a checkpoint with `value` written at `at` of tensor `name`.
fn poisoned(file: &Path, name: &str, at: usize, value: f32) -> Vec<u8> {
    let bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let poison = |(key, view): (String, TensorView)| {
        let mut data = view.data().to_vec();
        if key == name {
            data[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
        }
        (key, view.shape().to_vec(), data)
    };
    let changed: Vec<_> = tensors.tensors().into_iter().map(poison).collect();
    assert!(changed.iter().any(|(key, ..)| key == name), "{name}");
    let views = changed.iter().map(|(key, shape, data)| {
        let view = TensorView::new(safetensors::Dtype::F32, shape.clone(), data).unwrap();
        (key.clone(), view)
    });
    safetensors::serialize(views, None).unwrap()
}

/// Every tensor of a safetensors file by name.
fn tensors(file: &Path) -> Vec<(String, Vec<u8>)> {
    let bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<_> = tensors
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.data().to_vec()))
        .collect();
    all.sort();
    all
}

/// Lines of `metrics.jsonl` that are the event `event`.
fn events(project: &Project, run: &str, event: &str) -> Vec<Value> {
    let mut lines = project.metrics(run);
    lines.retain(|line| line["event"] == event);
    lines
}

#[test]
fn a_poisoned_weight_stops_the_run_before_it_is_used_in_an_update() {
    let project = Project::new();
    project.run("a", &["train.steps=3"]).ok();
    let model = project.checkpoint("a", 3).join("model.safetensors");
    let cases = [
        ("h.0.mlp.c_fc.weight", f32::NAN),
        ("h.0.attn.c_attn.bias", f32::INFINITY),
        ("ln_f.weight", f32::NEG_INFINITY),
        ("wpe.weight", f32::NAN),
    ];
    for (i, (name, value)) in cases.into_iter().enumerate() {
        project.write("weights.safetensors", poisoned(&model, name, 5, value));
        let run = format!("b{i}");
        let parts = [
            name,
            "not finite at step 0",
            "was not applied",
            "non_finite",
            "lr.peak",
        ];
        project
            .run(&run, &["--init-from", "weights.safetensors"])
            .fails(5, &parts);
        let saved = project.checkpoint(&run, 0).join("model.safetensors");
        assert_eq!(
            tensors(&saved),
            tensors(&project.path("weights.safetensors")),
            "{name}"
        );
        let stopped = events(&project, &run, "stopped");
        assert_eq!(stopped.len(), 1);
        assert!(stopped[0]["detail"].as_str().unwrap().contains(name));
        assert!(!events(&project, &run, "non_finite").is_empty());
        let losses: Vec<_> = project.metrics(&run);
        assert_eq!(losses[0]["kind"], "train");
        assert!(losses[0]["loss"].is_null() || losses[0]["grad_norm"].is_null());
    }
}

#[test]
fn a_diverged_run_stops_with_the_state_before_and_resumes_from_it() {
    let project = Project::new();
    let sets = ["lr.peak=1e30", "lr.warmup_steps=0", "checkpoint.keep=9"];
    let ended = project
        .run("a", &sets)
        .fails(5, &["not finite at step 1", "was not applied"]);
    assert!(
        ended
            .stderr
            .contains("runs/a/checkpoints holds the state before it")
    );
    assert_eq!(
        names(&project.run_folder("a").join("checkpoints")),
        ["step_00000001"]
    );
    project
        .run("b", &[&sets[..], &["checkpoint.every=1"]].concat())
        .fails(5, &[]);
    assert_eq!(project.tensors("a", 1), project.tensors("b", 1));
    // The same again: the same end, and nothing is written twice.
    let manifest = project.checkpoint("a", 1).join("manifest.json");
    let written = fs::metadata(&manifest).unwrap().modified().unwrap();
    let again = [&sets[..], &["--resume"]].concat();
    project.run("a", &again).fails(5, &["not finite at step 1"]);
    assert_eq!(
        fs::metadata(&manifest).unwrap().modified().unwrap(),
        written
    );
    assert_eq!(project.story("a"), project.story("b"));
}

#[test]
fn a_run_that_diverges_at_its_first_step_can_be_resumed() {
    let project = Project::new();
    project.run("a", &["train.steps=3"]).ok();
    let model = project.checkpoint("a", 3).join("model.safetensors");
    project.write(
        "weights.safetensors",
        poisoned(&model, "ln_f.bias", 0, f32::NAN),
    );
    project
        .run("b", &["--init-from", "weights.safetensors"])
        .fails(5, &[]);
    project
        .run("b", &["--resume"])
        .fails(5, &["ln_f.bias is not finite at step 0"]);
    let skip = ["train.non_finite=skip", "train.max_skips=2", "--resume"];
    project
        .run("b", &skip)
        .fails(5, &["at step 2", "train.max_skips = 2"]);
}

#[test]
fn skip_applies_nothing_and_gives_up_after_max_skips() {
    let project = Project::new();
    project.run("a", &["train.steps=3"]).ok();
    let model = project.checkpoint("a", 3).join("model.safetensors");
    let bytes = poisoned(&model, "h.0.ln_1.weight", 0, f32::NAN);
    project.write("weights.safetensors", bytes);
    let skip = ["train.non_finite=skip", "train.max_skips=3"];
    let sets = [&skip[..], &["--init-from", "weights.safetensors"]].concat();
    let parts = [
        "h.0.ln_1.weight is not finite at step 3",
        "raise train.max_skips = 3",
    ];
    project.run("b", &sets).fails(5, &parts);
    assert_eq!(events(&project, "b", "skipped").len(), 3);
    assert_eq!(events(&project, "b", "stopped").len(), 1);
    let saved = project.checkpoint("b", 3);
    let position = Checkpoint::open(&saved).unwrap().manifest.position;
    assert_eq!(
        (position.step, position.num_updates, position.num_skipped),
        (3, 0, 3)
    );
    let model = saved.join("model.safetensors");
    assert_eq!(
        tensors(&model),
        tensors(&project.path("weights.safetensors"))
    );
    let moments = tensors(&saved.join("optimizer.safetensors"));
    assert!(
        moments
            .iter()
            .all(|(_, bytes)| bytes.iter().all(|b| *b == 0))
    );
    // One more skip allowed is one more step.
    let more = ["train.non_finite=skip", "train.max_skips=4", "--resume"];
    project.run("b", &more).fails(5, &["at step 4"]);
    assert_eq!(events(&project, "b", "skipped").len(), 4);
}

/// Batches with a rare character meet a NaN in its embedding, all others do not.
#[test]
fn skipped_steps_leave_the_others_as_they_were() {
    let project = Project::new();
    let mut text = common::text();
    for at in [1000, 2500, 4000] {
        text.replace_range(at..at + 1, "~");
    }
    project.write("text.txt", text);
    let sets = [
        "model.tie_embeddings=false",
        "train.steps=40",
        "train.grad_clip=0",
    ];
    project
        .run("a", &[&sets[..], &["train.steps=3"]].concat())
        .ok();
    let model = project.checkpoint("a", 3).join("model.safetensors");
    // The last character of the vocabulary.
    let width = 32;
    let bytes = fs::read(&model).unwrap();
    let shape = SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensor("wte.weight")
        .unwrap()
        .shape()[0];
    let poison = poisoned(&model, "wte.weight", (shape - 1) * width, f32::NAN);
    project.write("weights.safetensors", poison);

    let skip = ["train.non_finite=skip", "train.max_skips=40"];
    let start = [&sets[..], &skip, &["--init-from", "weights.safetensors"]].concat();
    project.run("whole", &start).ok();
    let lines = project.metrics("whole");
    let odd: Vec<&Value> = lines
        .iter()
        .filter(|l| l["kind"] == "train" && l["loss"].is_null())
        .collect();
    let skipped = events(&project, "whole", "skipped");
    assert!((1..40).contains(&skipped.len()), "{}", skipped.len());
    let steps = |lines: Vec<&Value>| lines.iter().map(|l| l["step"].clone()).collect::<Vec<_>>();
    assert_eq!(steps(odd), steps(skipped.iter().collect()));
    let position = Checkpoint::open(&project.checkpoint("whole", 40))
        .unwrap()
        .manifest
        .position;
    assert_eq!(position.num_skipped, skipped.len() as u64);
    assert_eq!(position.num_updates + position.num_skipped, 40);
    let last = tensors(&project.checkpoint("whole", 40).join("model.safetensors"));
    let first = tensors(&project.path("weights.safetensors"));
    let is_finite = |bytes: &[u8]| {
        bytes
            .chunks(4)
            .filter(|b| f32::from_le_bytes((*b).try_into().unwrap()).is_nan())
            .count()
    };
    for ((name, before), (_, after)) in first.iter().zip(&last) {
        assert_ne!(before, after, "{name} learned nothing");
        let poison = if name == "wte.weight" { 1 } else { 0 };
        assert_eq!(is_finite(after), poison, "{name}");
    }

    // Skips are counted over a stop.
    project
        .run(
            "parts",
            &[&start[..], &["checkpoint.every=15", "checkpoint.keep=9"]].concat(),
        )
        .ok();
    for step in [30, 40] {
        fs::remove_dir_all(project.checkpoint("parts", step)).unwrap();
    }
    project
        .run("parts", &[&sets[..], &skip, &["--resume"]].concat())
        .ok();
    assert_eq!(project.story("parts"), project.story("whole"));
    assert_eq!(project.tensors("parts", 40), project.tensors("whole", 40));
}

#[test]
fn wrong_input_ends_with_a_status_and_a_remedy() {
    let project = Project::new();
    let missing = project.train(&["run", "absent.toml"]);
    missing.fails(2, &["absent.toml"]);
    project.train(&["run"]).fails(2, &["CONFIG"]);
    project.train(&["rum", "run.toml"]).fails(2, &["rum"]);
    project
        .train(&["run", "run.toml", "--resume", "--overwrite"])
        .fails(2, &["--overwrite"]);
    project
        .run("a", &["train.step=3"])
        .fails(2, &["train.step", "train.steps"]);
    project
        .run("a", &["train.steps=many"])
        .fails(2, &["train.steps", "many"]);
    project
        .run("a", &["model.num_heads=3"])
        .fails(2, &["model.num_heads", "model.d_model"]);
    project
        .run("a", &["model.vocab_size=5"])
        .fails(2, &["model.vocab_size = 5", "20 tokens"]);
    project
        .run("a", &["data.text=absent.txt"])
        .fails(2, &["data.text", "absent.txt"]);
    project
        .run("a", &["data.tokenizer=absent"])
        .fails(2, &["data.tokenizer", "absent"]);
    project
        .run("a", &["model.seq_len=800"])
        .fails(3, &["model.seq_len = 800", "shorter"]);
    project
        .run("a", &["model.seq_len=100000"])
        .fails(3, &["model.seq_len", "more text"]);
    project.write("empty.txt", "");
    project
        .run("a", &["data.text=empty.txt"])
        .fails(3, &["empty"]);
    project.write("latin1.txt", b"caf\xe9 au lait");
    project
        .run("a", &["data.text=latin1.txt"])
        .fails(3, &["latin1.txt", "UTF-8"]);
    project
        .run("a", &["run.dir=text.txt"])
        .fails(3, &["text.txt/a"]);
    assert!(
        !project.path("runs").exists(),
        "nothing of it left a run folder"
    );

    project
        .train(&["sample", "runs/a"])
        .fails(3, &["runs/a", "run folder"]);
    fs::create_dir_all(project.run_folder("a").join("checkpoints")).unwrap();
    project
        .train(&["sample", "runs/a"])
        .fails(3, &["runs/a", "holds no checkpoint"]);
    let bench = ["bench", "step", "--shape", "1,30,4,16,2,97"];
    project.train(&bench).fails(2, &["--shape", "L,D,H,S,B,V"]);
    for (option, value) in [
        ("--log2-n", "35"),
        ("--threads", "0"),
        ("--threads", "1025"),
    ] {
        let bench = ["bench", "quantize", option, value];
        project.train(&bench).fails(2, &[option, value]);
    }
    let sample = ["sample", "runs/a", "--threads", "0"];
    project.train(&sample).fails(2, &["--threads"]);
}

#[test]
fn weights_that_do_not_fit_are_named() {
    let project = Project::new();
    project.run("a", &["model.d_model=64"]).ok();
    let weights = project.checkpoint("a", 12).join("model.safetensors");
    fs::copy(weights, project.path("wide.safetensors")).unwrap();
    let init = |file: &str| project.run("b", &["--init-from", file]);
    init("absent.safetensors").fails(3, &["absent.safetensors"]);
    init("wide.safetensors").fails(
        3,
        &["wide.safetensors", "wte.weight", "[20, 64]", "[20, 32]"],
    );
    project.run("c", &["model.tie_embeddings=false"]).ok();
    let untied = "runs/c/checkpoints/step_00000012/model.safetensors";
    let ended = project.run("d", &["--init-from", untied]).ok();
    let warning = "the model has no lm_head.weight: not loaded";
    assert!(ended.stderr.contains(warning), "{}", ended.stderr);
    // It is no checkpoint of the run: deleting its folder would be bad advice.
    let ended = init("text.txt").fails(3, &["text.txt"]);
    assert!(!ended.stderr.contains("delete"), "{}", ended.stderr);
    assert!(!project.run_folder("b").exists());
}

#[test]
fn a_damaged_token_file_is_refused() {
    let project = Project::new();
    project.run("a", &[]).ok();
    let prepared = names(&project.path("data"))
        .into_iter()
        .find(|n| !n.starts_with('.'))
        .unwrap();
    for name in ["train.bin", "val.bin"] {
        fs::copy(
            project.path("data").join(&prepared).join(name),
            project.path(name),
        )
        .unwrap();
    }
    let whole = fs::read(project.path("train.bin")).unwrap();
    let table = "data.shards={ train = \"train.bin\", val = \"val.bin\", vocab_size = 20 }";
    let shards = |run: &str| project.run(run, &["data.text=[]", table]);
    shards("b").ok();
    project
        .train(&["sample", "runs/b"])
        .fails(3, &["tokenizer.json", "token files", "data.tokenizer"]);

    project.write("train.bin", &whole[..whole.len() - 3]);
    shards("c").fails(3, &["train.bin"]);
    let mut past_vocabulary = whole.clone();
    past_vocabulary[1024 + 100] = 77;
    project.write("train.bin", &past_vocabulary);
    shards("c").fails(3, &["train.bin", "77"]);
    let mut other_version = whole.clone();
    other_version[4] = 9;
    project.write("train.bin", &other_version);
    shards("c").fails(3, &["train.bin"]);
    fs::remove_file(project.path("train.bin")).unwrap();
    shards("c").fails(2, &["data.shards.train", "train.bin"]);
}

#[test]
fn prepared_data_that_was_damaged_is_made_again() {
    let project = Project::new();
    project.run("a", &[]).ok();
    let prepared = names(&project.path("data"))
        .into_iter()
        .find(|n| !n.starts_with('.'))
        .unwrap();
    let shard = project.path("data").join(prepared).join("train.bin");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[2000] ^= 1;
    fs::write(&shard, bytes).unwrap();
    let ended = project.run("b", &[]).ok();
    assert!(ended.stderr.contains("made again"), "{}", ended.stderr);
    assert_eq!(project.story("b"), project.story("a"));
}

#[test]
fn a_damaged_log_stops_a_resume_before_it_is_rewritten() {
    let project = Project::new();
    project.run("a", &["checkpoint.every=6"]).ok();
    let metrics = project.run_folder("a").join("metrics.jsonl");
    let lines = fs::read_to_string(&metrics).unwrap();
    let broken = lines.replacen("{\"kind\"", "{kind", 1);
    fs::write(&metrics, &broken).unwrap();
    fs::remove_dir_all(project.checkpoint("a", 12)).unwrap();
    project
        .run("a", &["--resume"])
        .fails(3, &["metrics.jsonl:1", "remove the line"]);
    assert_eq!(fs::read_to_string(&metrics).unwrap(), broken);
    // A last line that a power cut left unfinished is no damage.
    fs::write(&metrics, &lines[..lines.len() - 9]).unwrap();
    project.run("a", &["--resume"]).ok();
    project.run("b", &["checkpoint.every=6"]).ok();
    assert_eq!(project.story("a"), project.story("b"));
}

/// Keeps `ended` the one place that looks for panics.
#[test]
fn help_and_version_are_no_errors() {
    let project = Project::new();
    for args in [
        &["--help"][..],
        &["--version"],
        &["run", "--help"],
        &["bench", "--help"],
    ] {
        let child = project.command(args).spawn().unwrap();
        assert!(!ended(child).ok().stdout.is_empty());
    }
}
