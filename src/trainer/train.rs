//! The training loop.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use sha2::{Digest, Sha256};

use super::folder::{RunFolder, Start};
use super::interrupt::Interrupt;
use super::recorder::{Recorder, Step};
use super::{ActivationCheckpointing, NonFinite};
use crate::checkpoint::{self, Checkpoint, Difference, Manifest, Position, Weights};
use crate::comm::Comm;
use crate::config::Plan;
use crate::data::{self, Dataset, Sampler, Windows};
use crate::metrics::logging;
use crate::model::{Gpt, Unit};
use crate::zero::{Engine, EngineOptions, MicroBatch, PrecisionConfig, StepOutcome, same_or};
use crate::{Error, Result, runtime};

/// Whether the run may start in its folder; nothing is touched.
///
/// # Errors
/// [`Error::Config`] when it holds another run and `start` says neither to resume nor to overwrite.
pub fn check(plan: &Plan, start: &Start) -> Result<()> {
    RunFolder::at(plan).check(start)
}

/// Trains as `plan` says, in its run folder, as one of the ranks of `comm`.
///
/// # Errors
/// [`Error::Config`], [`Error::Data`] and [`Error::Checkpoint`] before the first step;
/// [`Error::Policy`] when a loss or gradient is not finite and the policy is to stop;
/// [`Error::Peer`] when another rank fails.
pub fn train(plan: &Plan, start: Start, comm: Comm) -> Result<()> {
    let comm = Arc::new(comm);
    let result = train_as_rank(plan, &start, &comm);
    if let Err(error) = &result {
        // The others wait for this rank: they end with its reason, unless they know an earlier one.
        comm.abort(&error.to_string());
    }
    result
}

fn train_as_rank(plan: &Plan, start: &Start, comm: &Arc<Comm>) -> Result<()> {
    if comm.topology() != plan.topology {
        return Err(Error::Config(format!(
            "the launcher says {}, rank {}; the ranks that met are {}, rank {}: start all of them \
             with the same variables",
            plan.topology,
            plan.topology.rank,
            comm.topology(),
            comm.topology().rank
        )));
    }
    let folder = RunFolder::at(plan);
    runtime::start_workers(plan.threads)?;
    // No failures of a peer: starting again would not help.
    let asked = Sha256::digest(plan.resolved_toml() + &format!("{start:?}"));
    same_or(comm, "config and flags", &asked, Error::Config)?;
    // Everything that can be wrong with the input is found before an earlier run is deleted.
    let dataset = prepare(plan, comm)?;
    let found = Sha256::digest(&dataset.meta.hash);
    same_or(comm, "the data", &found, Error::Data)?;
    // From here on there is something to save: until now a signal ends the process.
    let interrupt = Interrupt::listen();
    let mut trainer = Trainer::new(plan, &dataset, folder, start, comm)?;
    trainer.run(&interrupt)
}

/// Rank 0 prepares the data first, then one rank of each other node (which finds it done where
/// they share a file system), then everybody reads it.
fn prepare(plan: &Plan, comm: &Comm) -> Result<Dataset> {
    let data = &plan.raw().data;
    let place = comm.topology();
    let mut dataset = None;
    for turn in 0..3 {
        let is_turn = match turn {
            0 => place.rank == 0,
            1 => place.local_rank() == 0,
            _ => true,
        };
        let work = || data::prepare(data, place.rank == 0);
        let prepared = comm.patiently((is_turn && dataset.is_none()).then_some(work))?;
        dataset = comm.agree(prepared.transpose())?.or(dataset);
    }
    dataset.ok_or_else(|| Error::Data("no data was prepared".into()))
}

struct Trainer<'a> {
    plan: &'a Plan,
    dataset: &'a Dataset,
    sampler: Sampler<'a>,
    engine: Engine,
    comm: Arc<Comm>,
    folder: RunFolder,
    /// Rank 0's.
    recorder: Option<Recorder>,
    position: Position,
    /// Step of the newest checkpoint, saved or resumed from, so that none is saved twice.
    saved_step: Option<u64>,
    started: Instant,
    /// Steps that were done before this process.
    first_step: u64,
}

impl<'a> Trainer<'a> {
    fn new(
        plan: &'a Plan,
        dataset: &'a Dataset,
        mut folder: RunFolder,
        start: &Start,
        comm: &Arc<Comm>,
    ) -> Result<Self> {
        let raw = plan.raw();
        let vocab_size = plan.check_vocab(dataset.vocab_size)?;
        let seq_len = raw.model.seq_len;
        let sampler = Sampler::new(&dataset.train, raw.run.seed, seq_len)?;
        Windows::new(&dataset.val, seq_len)?;

        let resumes = *start == Start::Resume;
        let found = match resumes {
            true => latest(comm, &folder)?,
            false => None,
        };
        let changes = match &found {
            Some(found) => check_same_run(found, plan, vocab_size, dataset)?,
            None => Vec::new(),
        };
        let weights = match (start, &found) {
            (_, Some(found)) => Some(found.weights()?),
            (
                Start::New {
                    weights: Some(path),
                    ..
                },
                None,
            ) => Some(Weights::open(path)?),
            _ => None,
        };
        let model = Gpt::new(&raw.model, vocab_size);
        if let Some(weights) = &weights
            && comm.topology().rank == 0
        {
            weights.warn_of_others(&model)?;
        }
        let options = EngineOptions {
            seed: raw.run.seed,
            grad_clip: raw.train.grad_clip,
            recompute_blocks: raw.train.activation_checkpointing == ActivationCheckpointing::Block,
            min_8bit_size: raw.optimizer.min_8bit_size,
            zero: raw.zero.clone(),
            precision: raw.precision.clone(),
        };
        let fill = |unit: &Arc<dyn Unit>| match &weights {
            Some(weights) => weights.fill(unit),
            None => Ok(unit.buffer().initialize(raw.run.seed)?),
        };
        let mut engine = Engine::new(model, &raw.optimizer, comm.clone(), options, fill)?;
        let mut position = Position::default();
        if let Some(found) = &found {
            found.load_optimizer(&mut engine)?;
            position = found.manifest.position;
        }
        engine.check_agreement()?;

        let mut recorder = None;
        comm.lead(|| {
            folder.create(plan, start)?;
            if let Some(tokenizer) = &dataset.tokenizer {
                tokenizer.save_as(&folder.path().join("tokenizer.json"))?;
            }
            logging::to_file(folder.path())?;
            let step = position.step;
            recorder = Some(Recorder::open(plan, &folder, vocab_size, step, resumes)?);
            Ok(Vec::new())
        })?;
        let mut trainer = Self {
            plan,
            dataset,
            sampler,
            engine,
            comm: comm.clone(),
            recorder,
            folder,
            position,
            saved_step: found.is_some().then_some(position.step),
            started: Instant::now(),
            first_step: position.step,
        };
        match found {
            Some(found) => {
                let path = found.path().display();
                tracing::info!("resuming at step {} from {path}", position.step)
            }
            None if resumes => {
                tracing::info!("no checkpoint yet: starting at step 0")
            }
            None => {}
        }
        for change in changes {
            let change = change.to_string();
            trainer.warn(&format!("the run goes on with other settings: {change}"));
            trainer.event("changed", &change)?;
        }
        let memory = trainer.engine.memory();
        tracing::info!(
            "{} parameters in {} units, {} of optimizer state a rank, {} sequences of {} tokens a \
             step in {} microbatches, {} with {} threads each",
            trainer.engine.model().num_params(),
            trainer.engine.model().units().len(),
            mib(memory.optimizer_state_bytes),
            plan.global_batch,
            seq_len,
            plan.micro_steps,
            plan.topology,
            plan.threads,
        );
        tracing::info!("{}", dataset.describe());
        if plan.topology.world() == 1 && raw.precision != PrecisionConfig::default() {
            tracing::warn!("[precision] has no effect on one rank: nothing crosses between ranks");
        }
        if plan.topology.world() == 1 && raw.zero.qwz.enabled {
            tracing::warn!("zero.qwz has no effect on one rank: nothing crosses between ranks");
        }
        Ok(trainer)
    }

    /// Says on rank 0 what is so on all.
    fn warn(&self, what: &str) {
        if self.plan.topology.rank == 0 {
            tracing::warn!("{what}");
        }
    }

    /// Records something that happened at the current step.
    fn event(&mut self, event: &str, detail: &str) -> Result<()> {
        match &mut self.recorder {
            Some(recorder) => recorder.event(self.position.step, event, detail),
            None => Ok(()),
        }
    }

    fn run(&mut self, interrupt: &Interrupt) -> Result<()> {
        let raw = self.plan.raw();
        let num_steps = raw.train.steps;
        // A checkpoint comes after the evaluation of its step: a resumed run repeats neither.
        let due =
            |every: u64, step: u64| step == num_steps || (every > 0 && step.is_multiple_of(every));
        let step = self.position.step;
        // A signal may have cut the last evaluation short; rank 0 has the records.
        let has_eval = self.recorder.as_ref().is_some_and(|r| r.has_eval(step));
        let has_eval = self.comm.any(has_eval)?;
        let mut evaluate = step > 0 && due(raw.train.eval_every, step) && !has_eval;
        if step >= num_steps && !evaluate {
            tracing::info!("nothing to do: the run has its {num_steps} steps");
            return self.finish();
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
            // One rank's signal stops all after the same step.
            if self.comm.any(interrupt.requested())? && (evaluate || step < num_steps) {
                self.save()?;
                self.event("interrupted", "stopped by a signal")?;
                self.warn(&format!(
                    "stopped at step {step} of {num_steps}: --resume goes on"
                ));
                return self.finish();
            }
            let verify_every = raw.zero.verify_every;
            if verify_every > 0 && step.is_multiple_of(verify_every) {
                self.engine.check_agreement()?;
            }
        }
        self.finish()?;
        tracing::info!(
            "done: {} steps, validation loss {val_loss:.4} nats a token{}; {}",
            self.position.step,
            self.dataset.compare_with_bigram(val_loss),
            self.folder.path().display(),
        );
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.recorder.as_mut().map_or(Ok(()), Recorder::finish)?;
        let seconds = self.started.elapsed().as_secs_f64();
        let traffic = self.comm.with_ledger(|ledger| ledger.table(seconds));
        let has_trained = self.position.step > self.first_step;
        if has_trained && !traffic.is_empty() {
            let traffic = traffic.trim_end();
            tracing::info!(
                "what rank 0 received (busy: time of the communication thread; exposed: time the \
                 computation waited, as a share of {seconds:.1} s):\n{traffic}"
            );
        }
        Ok(())
    }

    /// One step of training, recorded.
    fn step(&mut self) -> Result<()> {
        let raw = self.plan.raw();
        let step = self.position.step;
        let lr = raw.lr.at(step, raw.train.steps);
        let start = Instant::now();
        // Evaluations and checkpoints are in the table of the run, not in the step after them.
        self.comm.take_step();
        let (sampler, micro_batch) = (&self.sampler, raw.train.micro_batch);
        let place = self.plan.topology;
        let batches = (0..self.plan.micro_steps).map(|i| {
            let first_sequence = ((i * place.world() + place.rank) * micro_batch) as u64;
            let (inputs, targets) = sampler.fill(step, first_sequence, micro_batch);
            MicroBatch {
                first_sequence,
                inputs,
                targets,
            }
        });
        let num_tokens = self.plan.tokens_per_step();
        let outcome = self.engine.train_step(step, lr, num_tokens, batches)?;
        let traffic = self.comm.take_step();
        if let Some(recorder) = &mut self.recorder {
            recorder.train(Step {
                step,
                lr,
                loss: outcome.loss,
                grad_norm: outcome.grad_norm,
                seconds: start.elapsed().as_secs_f64(),
                traffic,
                memory: self.engine.memory(),
            })?;
        }
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
                self.warn(&format!("{what}: skipped"));
                return self.event("skipped", &what);
            }
            NonFinite::Skip => format!("raise train.max_skips = {}", train.max_skips),
            NonFinite::Abort => "set train.non_finite = \"skip\"".into(),
        };
        self.event("stopped", &what)?;
        // The state is that of the last good step: keep it.
        self.save()?;
        self.finish()?;
        Err(self.comm.shared(Error::Policy(format!(
            "{what}; {} holds the state before it: lower lr.peak or {remedy}, then --resume",
            self.folder.checkpoints().display()
        ))))
    }

    /// Mean loss on the validation split, recorded; `None` when a signal cut it short.
    fn evaluate(&mut self, interrupt: &Interrupt) -> Result<Option<f64>> {
        let raw = self.plan.raw();
        let windows = Windows::new(&self.dataset.val, raw.model.seq_len)?;
        let limit = match raw.train.eval_batches {
            n if n > 0 && self.position.step < raw.train.steps => n,
            _ => usize::MAX,
        };
        let place = self.plan.topology;
        let batches = windows.batches(raw.train.micro_batch).take(limit);
        // Every rank takes its turn.
        let batches = batches.skip(place.rank).step_by(place.world());
        let val_loss = self.engine.evaluate(batches, || interrupt.requested())?;
        if let (Some(recorder), Some(val_loss)) = (&mut self.recorder, val_loss) {
            recorder.eval(self.position.step, val_loss)?;
        }
        Ok(val_loss)
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
        tracing::info!("saved {}", path.display());
        self.recorder.as_mut().map_or(Ok(()), Recorder::flush)
    }
}

/// The newest checkpoint. Rank 0 finds and checks it, and the others believe it.
fn latest(comm: &Comm, folder: &RunFolder) -> Result<Option<Checkpoint>> {
    let path = comm.lead(|| {
        let found = checkpoint::latest(&folder.checkpoints())?;
        Ok(found.map_or_else(Vec::new, |found| {
            found.path().to_string_lossy().into_owned().into_bytes()
        }))
    })?;
    match String::from_utf8_lossy(&path) {
        path if path.is_empty() => Ok(None),
        path => Checkpoint::open_unchecked(Path::new(&*path)).map(Some),
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
