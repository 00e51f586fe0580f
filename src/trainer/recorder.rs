//! Where the numbers of a run go: metrics.jsonl, TensorBoard, the terminal.

use serde_json::json;

use super::folder::RunFolder;
use crate::Result;
use crate::comm::Traffic;
use crate::config::Plan;
use crate::metrics::flops;
use crate::metrics::jsonl::Jsonl;
use crate::metrics::progress::Progress;
use crate::metrics::tensorboard::TensorBoard;
use crate::metrics::{EvalRecord, EventRecord, MemoryRecord, TrainRecord, memory};
use crate::zero::Memory;

/// What the loop knows of a step.
pub struct Step {
    /// Index of the step, from 0.
    pub step: u64,
    /// Its learning rate.
    pub lr: f32,
    /// Mean loss over the global batch.
    pub loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// Wall time.
    pub seconds: f64,
    /// What moved between ranks.
    pub traffic: Traffic,
    /// What this rank holds.
    pub memory: Memory,
}

/// Writes records of a run.
pub struct Recorder {
    jsonl: Jsonl,
    tensorboard: Option<TensorBoard>,
    progress: Progress,
    log_every: u64,
    num_steps: u64,
    tokens_per_step: u64,
    /// Of one rank.
    flops_per_step: f64,
    peak_tflops: Option<f64>,
}

impl Recorder {
    /// Opens the run's files at `step`; a run that `resumes` drops the records of later steps.
    pub fn open(
        plan: &Plan,
        folder: &RunFolder,
        vocab_size: usize,
        step: u64,
        resumes: bool,
    ) -> Result<Self> {
        let raw = plan.raw();
        let path = folder.path();
        let shape = flops::Shape::new(&raw.model, vocab_size, plan.global_batch);
        Ok(Self {
            jsonl: if resumes {
                Jsonl::resume(path, step)?
            } else {
                Jsonl::create(path)?
            },
            tensorboard: match raw.metrics.tensorboard {
                true => Some(TensorBoard::create(path, resumes.then_some(step))?),
                false => None,
            },
            progress: Progress::new(raw.train.steps, step),
            log_every: raw.metrics.log_every.max(1),
            num_steps: raw.train.steps,
            tokens_per_step: plan.tokens_per_step() as u64,
            flops_per_step: shape.model_flops() / plan.topology.world() as f64,
            peak_tflops: raw.hardware.peak_tflops,
        })
    }

    /// Records a step where `metrics.log_every` asks for it, and the last one always.
    pub fn train(&mut self, step: Step) -> Result<()> {
        let tflops = flops::tflops(self.flops_per_step, step.seconds);
        let resident = memory::resident();
        let record = TrainRecord {
            step: step.step,
            tokens: (step.step + 1) * self.tokens_per_step,
            loss: step.loss,
            lr: step.lr,
            grad_norm: step.grad_norm,
            step_ms: step.seconds * 1e3,
            tokens_per_s: self.tokens_per_step as f64 / step.seconds,
            tflops,
            mfu: flops::mfu(tflops, self.peak_tflops),
            flops_formula: flops::FORMULA,
            comm: step.traffic,
            memory: MemoryRecord {
                rss_bytes: resident.now_bytes,
                peak_rss_bytes: resident.peak_bytes,
                held: step.memory,
            },
        };
        let is_last = step.step + 1 == self.num_steps;
        let odd = !step.loss.is_finite() || !step.grad_norm.is_finite();
        if step.step.is_multiple_of(self.log_every) || is_last || odd {
            self.jsonl.train(&record)?;
            if let Some(tensorboard) = &mut self.tensorboard {
                tensorboard.train(&record)?;
            }
            self.progress.step(&record);
        }
        Ok(())
    }

    /// Records an evaluation after `num_steps` steps.
    pub fn eval(&mut self, num_steps: u64, val_loss: f64) -> Result<()> {
        let record = EvalRecord {
            step: num_steps.saturating_sub(1),
            val_loss: val_loss as f32,
        };
        self.jsonl.eval(&record)?;
        if let Some(tensorboard) = &mut self.tensorboard {
            tensorboard.eval(&record)?;
        }
        tracing::info!("after {num_steps} steps: validation loss {val_loss:.4}");
        Ok(())
    }

    /// Whether the evaluation after `num_steps` steps is on record.
    pub fn has_eval(&self, num_steps: u64) -> bool {
        self.jsonl
            .last_eval()
            .is_some_and(|step| step + 1 == num_steps)
    }

    /// Records something that happened at `step`.
    pub fn event(&mut self, step: u64, event: &str, detail: &str) -> Result<()> {
        self.jsonl
            .event(&EventRecord::new(step, event, json!({ "detail": detail })))
    }

    /// Brings everything to the disk and leaves the terminal as it is.
    pub fn finish(&mut self) -> Result<()> {
        self.progress.finish();
        self.flush()
    }

    /// Brings everything to the disk, so that a kill loses nothing from before a checkpoint.
    pub fn flush(&mut self) -> Result<()> {
        match &mut self.tensorboard {
            Some(tensorboard) => tensorboard.flush(),
            None => Ok(()),
        }
    }
}
