//! `metrics.jsonl`: one object a line, each written at once, so that a killed run loses no line.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::record::{EvalRecord, EventRecord, TrainRecord};
use crate::{Error, Result};

/// Name of the file in the run folder.
pub const FILE_NAME: &str = "metrics.jsonl";

/// The log of a run.
pub struct Jsonl {
    path: PathBuf,
    file: File,
    /// Step of the last line of an evaluation.
    last_eval: Option<u64>,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Line<'a> {
    Train(&'a TrainRecord),
    Eval(&'a EvalRecord),
    Event(&'a EventRecord),
}

impl Jsonl {
    /// Starts the log of a new run in `run_dir`.
    ///
    /// # Errors
    /// [`Error::Config`] when the folder has a log already; [`Error::Io`].
    pub fn create(run_dir: &Path) -> Result<Self> {
        let path = run_dir.join(FILE_NAME);
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            Ok(file) => Ok(Self {
                path,
                file,
                last_eval: None,
            }),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Err(Error::Config(format!(
                "{} exists: continue that run with --resume, or choose another run.name",
                path.display()
            ))),
            Err(e) => Err(Error::io(path)(e)),
        }
    }

    /// Continues the log of `run_dir` from `step`, the index of the first step still to do (0 to
    /// start over).
    ///
    /// Lines of steps from `step` on are dropped, and so is a last line that a killed process left
    /// unfinished: the log becomes that of a run that never stopped. Without a file one is started.
    ///
    /// # Errors
    /// [`Error::Data`] naming the line that is no record; [`Error::Io`].
    pub fn resume(run_dir: &Path, step: u64) -> Result<Self> {
        let path = run_dir.join(FILE_NAME);
        let last_eval = match File::open(&path) {
            Ok(old) => rewrite(&path, BufReader::new(old), step)?,
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(Error::io(path)(e)),
        };
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .open(&path)
            .map_err(Error::io(&path))?;
        Ok(Self {
            path,
            file,
            last_eval,
        })
    }

    /// Step of the last line of an evaluation, also when an earlier process wrote it.
    pub fn last_eval(&self) -> Option<u64> {
        self.last_eval
    }

    /// Writes the line of a step. A value that is not finite is null there, and an event
    /// "non_finite" spells it out.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn train(&mut self, record: &TrainRecord) -> Result<()> {
        self.write(&Line::Train(record))?;
        let values = [("loss", record.loss), ("grad_norm", record.grad_norm)];
        self.non_finite(record.step, &values)
    }

    /// Writes the line of an evaluation, as [`Jsonl::train`] does.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn eval(&mut self, record: &EvalRecord) -> Result<()> {
        self.write(&Line::Eval(record))?;
        self.last_eval = Some(record.step);
        self.non_finite(record.step, &[("val_loss", record.val_loss)])
    }

    /// Writes the line of an event.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn event(&mut self, record: &EventRecord) -> Result<()> {
        self.write(&Line::Event(record))
    }

    fn non_finite(&mut self, step: u64, values: &[(&str, f32)]) -> Result<()> {
        match EventRecord::non_finite(step, values) {
            Some(event) => self.event(&event),
            None => Ok(()),
        }
    }

    fn write(&mut self, line: &Line) -> Result<()> {
        let mut text = serde_json::to_vec(line).map_err(|e| Error::io(&self.path)(e.into()))?;
        text.push(b'\n');
        self.file.write_all(&text).map_err(Error::io(&self.path))
    }
}

/// Replaces `path` by the lines of `old` that belong to steps below `step`, byte for byte, and
/// returns the step of the last evaluation among them.
fn rewrite(path: &Path, mut old: impl BufRead, step: u64) -> Result<Option<u64>> {
    let mut last_eval = None;
    // In the same folder, so that the rename is atomic: a kill in between leaves one whole file.
    let temporary = path.with_extension("jsonl.tmp");
    let new = File::create(&temporary).map_err(Error::io(&temporary))?;
    let mut new = BufWriter::new(new);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if old.read_until(b'\n', &mut line).map_err(Error::io(path))? == 0 {
            break;
        }
        if line.last() != Some(&b'\n') {
            // Lines are written with their end: this one is unfinished, whatever it parses as.
            break;
        }
        let record: Option<Value> = serde_json::from_slice(&line).ok();
        let Some(at) = record.as_ref().and_then(|r| r.get("step")?.as_u64()) else {
            return Err(Error::Data(format!(
                "{}:{number} is no record (an object with a step): remove the line to resume",
                path.display()
            )));
        };
        if at < step {
            new.write_all(&line).map_err(Error::io(&temporary))?;
            if record.is_some_and(|r| r["kind"] == "eval") {
                last_eval = Some(at);
            }
        }
    }
    let new = new
        .into_inner()
        .map_err(|e| Error::io(&temporary)(e.into_error()))?;
    new.sync_all().map_err(Error::io(&temporary))?;
    std::fs::rename(&temporary, path).map_err(Error::io(path))?;
    Ok(last_eval)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::comm::Traffic;
    use crate::metrics::record::MemoryRecord;

    fn train(step: u64, loss: f32) -> TrainRecord {
        TrainRecord {
            step,
            tokens: (step + 1) * 512,
            loss,
            lr: 0.95,
            grad_norm: 1.5,
            step_ms: 10.0,
            tokens_per_s: 51200.0,
            tflops: 0.1,
            mfu: None,
            flops_formula: crate::metrics::flops::FORMULA,
            comm: Traffic::default(),
            memory: MemoryRecord::default(),
        }
    }

    fn write_steps(log: &mut Jsonl, steps: std::ops::Range<u64>) {
        for step in steps {
            log.train(&train(step, 4.0)).unwrap();
            if step % 2 == 1 {
                log.eval(&EvalRecord {
                    step,
                    val_loss: 3.5,
                })
                .unwrap();
            }
        }
    }

    fn read(dir: &Path) -> String {
        std::fs::read_to_string(dir.join(FILE_NAME)).unwrap()
    }

    #[test]
    fn records_have_the_documented_keys() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Jsonl::create(dir.path()).unwrap();
        log.train(&train(7, 4.25)).unwrap();
        log.eval(&EvalRecord {
            step: 7,
            val_loss: 0.1,
        })
        .unwrap();
        log.event(&EventRecord::new(7, "restart", json!({"attempt": 2})))
            .unwrap();
        let text = read(dir.path());
        let lines: Vec<Value> = text
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        let keys: Vec<&String> = lines[0].as_object().unwrap().keys().collect();
        let mut documented = [
            "kind",
            "step",
            "tokens",
            "loss",
            "lr",
            "grad_norm",
            "step_ms",
            "tokens_per_s",
            "tflops",
            "mfu",
            "flops_formula",
            "comm",
            "memory",
        ];
        documented.sort();
        assert_eq!(keys, documented);
        assert_eq!(lines[0]["kind"], "train");
        assert_eq!(lines[0]["mfu"], Value::Null);
        assert_eq!(lines[0]["flops_formula"], "megatron");
        assert_eq!(
            lines[1].to_string(),
            r#"{"kind":"eval","step":7,"val_loss":0.1}"#
        );
        assert_eq!(
            lines[2],
            json!({"kind": "event", "step": 7, "event": "restart", "attempt": 2})
        );
        // f32 in few digits, not as the f64 next to it.
        assert!(text.contains(r#""lr":0.95,"#));
    }

    #[test]
    fn a_loss_that_is_not_finite_is_null_and_an_event() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Jsonl::create(dir.path()).unwrap();
        log.train(&train(3, f32::NAN)).unwrap();
        log.eval(&EvalRecord {
            step: 3,
            val_loss: f32::NEG_INFINITY,
        })
        .unwrap();
        let text = read(dir.path());
        let lines: Vec<Value> = text
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        assert_eq!(lines.len(), 4);
        assert_eq!(lines[0]["loss"], Value::Null);
        let event = |fields: Value| {
            let mut event = json!({"kind": "event", "step": 3, "event": "non_finite"});
            event
                .as_object_mut()
                .unwrap()
                .extend(fields.as_object().unwrap().clone());
            event
        };
        assert_eq!(lines[1], event(json!({"loss": "NaN"})));
        assert_eq!(lines[3], event(json!({"val_loss": "-inf"})));
    }

    #[test]
    fn a_resumed_log_is_that_of_a_run_that_never_stopped() {
        let whole = tempfile::tempdir().unwrap();
        write_steps(&mut Jsonl::create(whole.path()).unwrap(), 0..10);
        for (stopped, resumed) in [(7, 4), (7, 7), (3, 0)] {
            let dir = tempfile::tempdir().unwrap();
            write_steps(&mut Jsonl::create(dir.path()).unwrap(), 0..stopped);
            write_steps(
                &mut Jsonl::resume(dir.path(), resumed).unwrap(),
                resumed..10,
            );
            assert_eq!(read(dir.path()), read(whole.path()));
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        }
    }

    #[test]
    fn a_last_line_cut_anywhere_is_dropped() {
        let whole = tempfile::tempdir().unwrap();
        write_steps(&mut Jsonl::create(whole.path()).unwrap(), 0..3);
        let text = read(whole.path());
        let second = text.lines().next().unwrap().len() + 1;
        let third = second + text[second..].find('\n').unwrap();
        let dir = tempfile::tempdir().unwrap();
        for cut in second..=third {
            std::fs::write(dir.path().join(FILE_NAME), &text[..cut]).unwrap();
            write_steps(&mut Jsonl::resume(dir.path(), 1).unwrap(), 1..3);
            assert_eq!(read(dir.path()), text);
        }
    }

    #[test]
    fn a_line_that_is_no_record_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for wrong in [
            "{\"step\":0}\nhello\n",
            "{\"step\":0}\n{\"kind\":\"train\"}\n",
        ] {
            std::fs::write(dir.path().join(FILE_NAME), wrong).unwrap();
            match Jsonl::resume(dir.path(), 5) {
                Err(Error::Data(message)) => assert!(message.contains("jsonl:2"), "{message}"),
                other => panic!("{:?}", other.map(|_| ())),
            }
            assert_eq!(read(dir.path()), wrong);
        }
    }

    #[test]
    fn a_new_run_does_not_overwrite_an_old_log() {
        let dir = tempfile::tempdir().unwrap();
        write_steps(&mut Jsonl::create(dir.path()).unwrap(), 0..2);
        let before = read(dir.path());
        assert!(matches!(Jsonl::create(dir.path()), Err(Error::Config(_))));
        assert_eq!(read(dir.path()), before);
    }
}
