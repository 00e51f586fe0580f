//! A project folder with a small text and config, and the `train` binary run in it.
#![allow(dead_code)] // every test binary uses a part

pub mod processes;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// One block over 23 characters, with everything that could depend on position: dropout,
/// accumulation, warmup and decay, evaluations.
const CONFIG: &str = r#"
[data]
text = ["text.txt"]
tokenizer = "char"

[model]
num_layers = 1
num_heads = 2
d_model = 32
seq_len = 16
stable_embedding = false
dropout = 0.1

[lr]
peak = 1e-2
min = 1e-3
warmup_steps = 2

[train]
steps = 12
micro_batch = 2
global_batch = 4
threads = 1
eval_every = 5
eval_batches = 4
"#;

/// 200 lines of a few words in an order that repeats late.
pub fn text() -> String {
    let words = [
        "the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "past", "old", "red",
        "barns", "near", "quiet", "rivers",
    ];
    let line = |i: usize| {
        let word = |j: usize| words[(i * i * 7 + i * 3 + j * j * 5 + i * j) % words.len()];
        (0..8).map(word).collect::<Vec<_>>().join(" ") + ".\n"
    };
    (0..200).map(line).collect()
}

/// A folder in which `train` runs.
pub struct Project {
    folder: TempDir,
}

/// How a process of `train` ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// The exit status; a process that a signal ended fails the test.
    #[track_caller]
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| panic!("{self:?}"))
    }

    /// Fails unless the process was successful.
    #[track_caller]
    pub fn ok(self) -> Self {
        self.fails(0, &[])
    }

    /// Fails unless the exit status is `code` and the error names every one of `parts`.
    #[track_caller]
    pub fn fails(self, code: i32, parts: &[&str]) -> Self {
        assert_eq!(self.code(), code, "{}", self.stderr);
        for part in parts {
            assert!(
                self.stderr.contains(part),
                "{part:?} not in {}",
                self.stderr
            );
        }
        self
    }
}

impl Project {
    pub fn new() -> Self {
        let project = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        project.write("text.txt", text());
        project.write("run.toml", CONFIG);
        project
    }

    /// A path in the project.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The run folder of `name`.
    pub fn run_folder(&self, name: &str) -> PathBuf {
        self.path("runs").join(name)
    }

    /// The checkpoint of `step` of run `name`.
    pub fn checkpoint(&self, name: &str, step: u64) -> PathBuf {
        let folder = format!("checkpoints/step_{step:08}");
        self.run_folder(name).join(folder)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    /// `train` with `args`, in the project's folder and with nothing in its environment.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_train"));
        command
            .args(args)
            .current_dir(self.folder.path())
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs `train` with `args`.
    pub fn train(&self, args: &[&str]) -> Ended {
        ended(self.command(args).spawn().unwrap())
    }

    /// `train run` as run `name` with `sets` ("key=value"; what starts with "--" is passed on).
    pub fn run(&self, name: &str, sets: &[&str]) -> Ended {
        ended(self.start(name, sets))
    }

    /// As [`Project::run`], without waiting.
    pub fn start(&self, name: &str, sets: &[&str]) -> Child {
        let name = format!("run.name={name}");
        let mut args = vec!["run", "run.toml", "--set", &name];
        let mut is_value = false;
        for set in sets {
            if !is_value && !set.starts_with("--") {
                args.push("--set");
            }
            args.push(set);
            is_value = *set == "--init-from";
        }
        self.command(&args).spawn().unwrap()
    }

    /// The lines of `metrics.jsonl` of run `name`.
    #[track_caller]
    pub fn metrics(&self, name: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.run_folder(name).join("metrics.jsonl")).unwrap();
        let parse = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        text.lines().map(parse).collect()
    }

    /// The train and eval lines of run `name` without what depends on the machine: a run has one
    /// such story, however often it was stopped.
    #[track_caller]
    pub fn story(&self, name: &str) -> Vec<String> {
        let mut lines = self.metrics(name);
        lines.retain(|line| line["kind"] != "event");
        lines.iter_mut().for_each(|line| {
            let line = line.as_object_mut().unwrap();
            for key in ["step_ms", "tokens_per_s", "tflops", "mfu", "memory", "comm"] {
                line.remove(key);
            }
        });
        lines.iter().map(Value::to_string).collect()
    }

    /// Names and contents of what a checkpoint holds.
    #[track_caller]
    pub fn tensors(&self, name: &str, step: u64) -> BTreeMap<String, Vec<u8>> {
        let folder = self.checkpoint(name, step);
        ["model.safetensors", "optimizer.safetensors"]
            .map(|file| (file.to_string(), fs::read(folder.join(file)).unwrap()))
            .into()
    }
}

/// Waits for a process of `train`. None may panic, however it ends.
#[track_caller]
pub fn ended(child: Child) -> Ended {
    let output = child.wait_with_output().unwrap();
    let ended = Ended {
        status: output.status,
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    };
    assert!(!ended.stderr.contains("panicked at"), "{}", ended.stderr);
    ended
}

/// Sends `signal` ("INT") to `child` once it has finished `step_done` steps, and again `more` times, late
/// enough to count, and waits for its end. The child cannot run far ahead: its output stays unread in a
/// pipe.
pub fn signal_after(mut child: Child, step_done: u64, signal: &str, more: usize) -> Ended {
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let (mut text, mut line) = (String::new(), String::new());
    // "step    3/1500 | loss ..."
    let is_reached = |line: &str| {
        let step = line.strip_prefix("step ").and_then(|l| l.split('/').next());
        step.is_some_and(|s| s.trim() == step_done.to_string())
    };
    while !is_reached(&line) {
        line.clear();
        if stderr.read_line(&mut line).unwrap() == 0 {
            panic!("no step {step_done}: {text}");
        }
        text += &line;
    }
    for i in 0..=more {
        send(&child, signal);
        if i < more {
            // The first one is known to have arrived when its message is out.
            while !text.contains("once more") && stderr.read_line(&mut text).unwrap() > 0 {}
            std::thread::sleep(std::time::Duration::from_millis(1200));
        }
    }
    std::io::Read::read_to_string(&mut stderr, &mut text).unwrap();
    let mut ended = ended(child);
    assert!(!text.contains("panicked at"), "{text}");
    ended.stderr = text;
    ended
}

/// Sends `signal` to `child`.
pub fn send(child: &Child, signal: &str) {
    let script = format!("kill -{signal} {}", child.id());
    let status = Command::new("sh").args(["-c", &script]).status().unwrap();
    assert!(status.success());
}

/// Copies a folder with everything in it.
pub fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let from = entry.unwrap().path();
        let to = to.join(from.file_name().unwrap());
        if from.is_dir() {
            copy_folder(&from, &to);
        } else {
            fs::copy(&from, &to).unwrap();
        }
    }
}

/// Every file under `folder` with its content.
pub fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(contents(&path));
        } else {
            files.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    files
}

/// Names in `folder`, sorted, hidden ones too.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
