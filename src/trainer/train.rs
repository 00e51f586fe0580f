//! The training loop.

use std::time::Instant;

use super::folder::{RunFolder, Start};
use super::interrupt::Interrupt;
use super::recorder::{Recorder, Step};
use super::{ActivationCheckpointing, NonFinite};
use crate::checkpoint::{self, Checkpoint, Difference, Manifest, Position};
use crate::comm::Comm;
use crate::config::Plan;
use crate::data::{self, Dataset, Sampler, Windows};
use crate::metrics::logging;
use crate::model::Gpt;
use crate::zero::{Engine, EngineOptions, MicroBatch, StepOutcome};
use crate::{Error, Result, runtime};

/// Trains as `plan` says, in its run folder.
///
/// # Errors
/// [`Error::Config`], [`Error::Data`] and [`Error::Checkpoint`] before the first step;
/// [`Error::Policy`] when a loss or gradient is not finite and the policy is to stop.
pub fn train(plan: &Plan, start: Start) -> Result<()> {
    let folder = RunFolder::check(plan, &start)?;
    runtime::start_workers(plan.threads)?;
    // Everything that can be wrong with the input is found before an earlier run is deleted.
    let dataset = data::prepare(&plan.raw().data, true)?;
    // From here on there is something to save: until now a signal ends the process.
    let interrupt = Interrupt::listen();
    let mut trainer = Trainer::new(plan, &dataset, folder, &start)?;
    trainer.run(&interrupt)
}

struct Trainer<'a> {
    plan: &'a Plan,
    dataset: &'a Dataset,
    sampler: Sampler<'a>,
    engine: Engine,
    folder: RunFolder,
    recorder: Recorder,
    position: Position,
    /// Step of the newest checkpoint, saved or resumed from, so that none is saved twice.
    saved_step: Option<u64>,
}

impl<'a> Trainer<'a> {
    fn new(
        plan: &'a Plan,
        dataset: &'a Dataset,
        mut folder: RunFolder,
        start: &Start,
    ) -> Result<Self> {
        let raw = plan.raw();
        let vocab_size = plan.check_vocab(dataset.vocab_size)?;
        let seq_len = raw.model.seq_len;
        let sampler = Sampler::new(&dataset.train, raw.run.seed, seq_len)?;
        Windows::new(&dataset.val, seq_len)?;

        let model = Gpt::new(&raw.model, vocab_size);
        model.initialize(raw.run.seed)?;
        if let Start::New {
            weights: Some(path),
            ..
        } = start
        {
            checkpoint::load_weights(path, &model)?;
        }
        let options = EngineOptions {
            seed: raw.run.seed,
            grad_clip: raw.train.grad_clip,
            recompute_blocks: raw.train.activation_checkpointing == ActivationCheckpointing::Block,
            min_8bit_size: raw.optimizer.min_8bit_size,
        };
        let mut engine = Engine::new(model, &raw.optimizer, Comm::solo(), options)?;
        let mut position = Position::default();
        let mut resumed = None;
        let mut changes = Vec::new();
        if *start == Start::Resume
            && let Some(found) = checkpoint::latest(&folder.checkpoints())?
        {
            changes = check_same_run(&found, plan, vocab_size, dataset)?;
            found.load_model(engine.model())?;
            found.load_optimizer(&mut engine)?;
            position = found.manifest.position;
            resumed = Some(found.path().to_path_buf());
        }

        folder.create(plan, start)?;
        if let Some(tokenizer) = &dataset.tokenizer {
            tokenizer.save_as(&folder.path().join("tokenizer.json"))?;
        }
        logging::to_file(folder.path())?;
        let resumes = *start == Start::Resume;
        let mut recorder = Recorder::open(plan, &folder, vocab_size, position.step, resumes)?;
        let saved_step = resumed.is_some().then_some(position.step);
        match resumed {
            Some(path) => {
                tracing::info!("resuming at step {} from {}", position.step, path.display())
            }
            None if resumes => {
                tracing::info!("no checkpoint yet: starting at step 0")
            }
            None => {}
        }
        for change in changes {
            let change = change.to_string();
            tracing::warn!("the run goes on with other settings: {change}");
            recorder.event(position.step, "changed", &change)?;
        }
        tracing::info!(
            "{} parameters in {} units, {} of optimizer state, {} sequences of {} tokens a step \
             in {} microbatches, {} threads",
            engine.model().num_params(),
            engine.model().units().len(),
            mib(engine.state_bytes()),
            plan.global_batch,
            seq_len,
            plan.micro_steps,
            plan.threads,
        );
        tracing::info!("{}", dataset.describe());
        Ok(Self {
            plan,
            dataset,
            sampler,
            engine,
            folder,
            recorder,
            position,
            saved_step,
        })
    }

    fn run(&mut self, interrupt: &Interrupt) -> Result<()> {
        let raw = self.plan.raw();
        let num_steps = raw.train.steps;
        // A checkpoint comes after the evaluation of its step: a resumed run repeats neither.
        let due =
            |every: u64, step: u64| step == num_steps || (every > 0 && step.is_multiple_of(every));
        // A signal may have cut the last evaluation short.
        let step = self.position.step;
        let mut evaluate =
            step > 0 && due(raw.train.eval_every, step) && !self.recorder.has_eval(step);
        if step >= num_steps && !evaluate {
            tracing::info!("nothing to do: the run has its {num_steps} steps");
            return self.recorder.finish();
        }
        let mut val_loss = f64::NAN;
        while evaluate || self.position.step < num_steps {
            if !evaluate {
                self.step()?;
                evaluate = due(raw.train.eval_every, self.position.step);
            }
            let step = self.position.step;
            if evaluate && let Some(loss) = self.evaluate(interrupt)? {
                val_loss = loss;
                evaluate = false;
            }
            if due(raw.checkpoint.every, step) {
                self.save()?;
            }
            if interrupt.requested() && (evaluate || step < num_steps) {
                self.save()?;
                self.recorder
                    .event(step, "interrupted", "stopped by a signal")?;
                tracing::warn!("stopped at step {step} of {num_steps}: --resume goes on");
                return self.recorder.finish();
            }
        }
        self.recorder.finish()?;
        tracing::info!(
            "done: {} steps, validation loss {val_loss:.4} nats a token{}; {}",
            self.position.step,
            self.dataset.compare_with_bigram(val_loss),
            self.folder.path().display(),
        );
        Ok(())
    }

    /// One step of training, recorded.
    fn step(&mut self) -> Result<()> {
        let raw = self.plan.raw();
        let step = self.position.step;
        let lr = raw.lr.at(step, raw.train.steps);
        let start = Instant::now();
        let (sampler, micro_batch) = (&self.sampler, raw.train.micro_batch);
        let batches = (0..self.plan.micro_steps as u64).map(|i| {
            let first_sequence = i * micro_batch as u64;
            let (inputs, targets) = sampler.fill(step, first_sequence, micro_batch);
            MicroBatch {
                first_sequence,
                inputs,
                targets,
            }
        });
        let num_tokens = self.plan.tokens_per_step();
        let outcome = self.engine.train_step(step, lr, num_tokens, batches)?;
        self.recorder.train(&Step {
            step,
            lr,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            seconds: start.elapsed().as_secs_f64(),
            optimizer_state_bytes: self.engine.state_bytes(),
        })?;
        if let Some(tensor) = &outcome.non_finite {
            self.not_finite(&outcome, tensor)?;
        }
        self.position.step = step + 1;
        self.position.num_updates = self.engine.num_updates();
        Ok(())
    }

    /// Follows the policy for a step whose loss or gradient is not finite; nothing was updated.
    fn not_finite(&mut self, outcome: &StepOutcome, tensor: &str) -> Result<()> {
        let train = &self.plan.raw().train;
        let step = self.position.step;
        let what = format!(
            "{tensor} is not finite at step {step} (loss {}, gradient norm {}); the step was not applied",
            outcome.loss, outcome.grad_norm
        );
        let remedy = match train.non_finite {
            NonFinite::Skip if self.position.num_skipped < train.max_skips => {
                self.position.num_skipped += 1;
                tracing::warn!("{what}: skipped");
                return self.recorder.event(step, "skipped", &what);
            }
            NonFinite::Skip => format!("raise train.max_skips = {}", train.max_skips),
            NonFinite::Abort => "set train.non_finite = \"skip\"".into(),
        };
        self.recorder.event(step, "stopped", &what)?;
        // The state is that of the last good step: keep it.
        self.save()?;
        self.recorder.finish()?;
        Err(Error::Policy(format!(
            "{what}; {} holds the state before it: lower lr.peak or {remedy}, then --resume",
            self.folder.checkpoints().display()
        )))
    }

    /// Mean loss on the validation split, recorded; `None` when a signal cut it short.
    fn evaluate(&mut self, interrupt: &Interrupt) -> Result<Option<f64>> {
        let raw = self.plan.raw();
        let windows = Windows::new(&self.dataset.val, raw.model.seq_len)?;
        let limit = match raw.train.eval_batches {
            n if n > 0 && self.position.step < raw.train.steps => n,
            _ => usize::MAX,
        };
        let batches = windows.batches(raw.train.micro_batch).take(limit);
        let batches = batches.take_while(|_| !interrupt.requested());
        let val_loss = self.engine.evaluate(batches);
        if interrupt.requested() {
            return Ok(None);
        }
        let val_loss = val_loss?;
        self.recorder.eval(self.position.step, val_loss)?;
        Ok(Some(val_loss))
    }

    fn save(&mut self) -> Result<()> {
        if self.saved_step == Some(self.position.step) {
            return Ok(());
        }
        let raw = self.plan.raw();
        let manifest = Manifest::new(
            self.position,
            self.plan,
            self.engine.model().vocab_size(),
            &self.dataset.meta.hash,
        );
        let root = self.folder.checkpoints();
        let path = checkpoint::save(&root, &mut self.engine, manifest, raw.checkpoint.keep)?;
        self.saved_step = Some(self.position.step);
        self.recorder.flush()?;
        tracing::info!("saved {}", path.display());
        Ok(())
    }
}

/// A resumed run is the run that never stopped, so what defines it must be the same. Returns what
/// may change, and did.
fn check_same_run(
    found: &Checkpoint,
    plan: &Plan,
    vocab_size: usize,
    dataset: &Dataset,
) -> Result<Vec<Difference>> {
    let now = Manifest::new(
        found.manifest.position,
        plan,
        vocab_size,
        &dataset.meta.hash,
    );
    match found.manifest.first_difference(&now) {
        None => Ok(found.manifest.changes(&now)),
        Some(what) => Err(Error::Checkpoint(format!(
            "{}: {what}; resume with the config of the run, or start another with --set run.name=NAME",
            found.path().display()
        ))),
    }
}

fn mib(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}
