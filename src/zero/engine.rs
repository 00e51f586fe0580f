//! The training step over units: gather, forward, backward, reduce, clip, update.
//!
//! A rank that owns every unit whole (alone, or under stage 0) has nothing to gather or release.

use std::iter::once;
use std::sync::Arc;

use super::agree::{Fnv, check_weights, same_everywhere};
use super::gather::{Gather, Request};
use super::memory::Memory;
use super::norm;
use super::pool::Pools;
use super::reduce::Reduce;
use super::states::UnitStates;
use super::walk::Walk;
use super::{PrecisionConfig, ZeroConfig};
use crate::comm::{Comm, Purpose};
use crate::model::{Gpt, Pass, Unit};
use crate::optim::{OptimizerConfig, StepInputs};
use crate::quant::F32;
use crate::{Error, Result};

/// How the engine trains.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// Seed of the run, for dropout.
    pub seed: u64,
    /// Largest global gradient norm; larger gradients are scaled down to it. 0 for no limit.
    pub grad_clip: f32,
    /// Whether blocks run their forward pass again instead of keeping activations.
    pub recompute_blocks: bool,
    /// Parameters with fewer elements keep f32 optimizer state.
    pub min_8bit_size: usize,
    /// How model states are spread over ranks.
    pub zero: ZeroConfig,
    /// Float formats between ranks.
    pub precision: PrecisionConfig,
}

/// Sequences that go through the model at once.
#[derive(Clone, Debug, PartialEq)]
pub struct MicroBatch {
    /// Index in the global batch of the first sequence.
    pub first_sequence: u64,
    /// Token ids, (B, S).
    pub inputs: Vec<u32>,
    /// Next tokens, (B, S).
    pub targets: Vec<u32>,
}

/// What a step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// Mean loss over the tokens of the global batch.
    pub loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// The first tensor with a value that is not finite; then nothing was updated.
    pub non_finite: Option<String>,
}

/// A model with this rank's part of its states, and the ranks that share them.
pub struct Engine {
    model: Gpt,
    states: Vec<UnitStates>,
    comm: Arc<Comm>,
    gather: Gather,
    reduce: Reduce,
    pools: Pools,
    /// Gathers in flight ahead of the one waited for.
    ahead: usize,
    options: EngineOptions,
    /// Whether this rank holds a part of each unit, and not all of it.
    is_sharded: bool,
    /// Updates so far. Skipped steps do not count.
    num_updates: u64,
    /// Bytes of activations that a walk held at most.
    peak_activation_bytes: usize,
}

impl Engine {
    /// An engine over `model` with fresh optimizer state. `fill` gives a unit its first weights; of
    /// one unit at a time a rank then holds all of them.
    ///
    /// # Errors
    /// As `fill`; [`Error::Tensor`] on a bug.
    pub fn new(
        model: Gpt,
        optimizer: &OptimizerConfig,
        comm: Arc<Comm>,
        options: EngineOptions,
        mut fill: impl FnMut(&Arc<dyn Unit>) -> Result<()>,
    ) -> Result<Self> {
        let place = comm.topology();
        let is_sharded = place.world() > 1 && options.zero.stage == 3;
        let mut states = Vec::new();
        // Of what every rank was given, before it keeps its part: afterwards nobody could tell.
        let mut first_weights = Fnv::default();
        for unit in model.units() {
            fill(unit)?;
            if place.world() > 1 {
                unit.buffer().with_weights(|weights| {
                    first_weights.add_all(&weights[..unit.buffer().layout().num_elements]);
                    Ok(())
                })?;
            }
            let min = options.min_8bit_size;
            states.push(UnitStates::new(unit, place, is_sharded, optimizer, min)?);
        }
        let zero = &options.zero;
        let (ahead, in_flight) = match zero.overlap {
            true => (zero.prefetch, 1),
            false => (0, 0),
        };
        same_everywhere(
            &comm,
            "the first weights",
            &first_weights.value().to_le_bytes(),
        )?;
        let pools = Pools::default();
        Ok(Self {
            model,
            states,
            gather: Gather::new(zero.gather_codec(&options.precision), ahead, pools.clone()),
            reduce: Reduce::new(options.precision.reduce.codec(), in_flight, pools.clone()),
            pools,
            ahead,
            comm,
            options,
            is_sharded,
            num_updates: 0,
            peak_activation_bytes: 0,
        })
    }

    /// The model.
    pub fn model(&self) -> &Gpt {
        &self.model
    }

    /// The ranks.
    pub fn comm(&self) -> &Arc<Comm> {
        &self.comm
    }

    /// This rank's states of every unit, to save or to load.
    pub fn states(&mut self) -> &mut [UnitStates] {
        &mut self.states
    }

    /// Updates so far.
    pub fn num_updates(&self) -> u64 {
        self.num_updates
    }

    /// Continues from `num_updates` updates, after weights and state were loaded.
    pub fn set_num_updates(&mut self, num_updates: u64) {
        self.num_updates = num_updates;
    }

    /// Bytes of model states and of what a step holds at most, on this rank.
    pub fn memory(&self) -> Memory {
        let mut memory = Memory {
            peak_unit_gradient_bytes: self.reduce.peak_bytes(),
            peak_gathered_bytes: self.gather.peak_bytes(),
            peak_activation_bytes: self.peak_activation_bytes,
            ..Memory::default()
        };
        for state in &self.states {
            let (weights, grads) = state.resident_bytes();
            memory.master_bytes += weights;
            memory.gradient_bytes += grads;
            memory.optimizer_state_bytes += state.optimizer.state_bytes();
        }
        memory
    }

    /// Compares the number of updates and the weights that all ranks compute with.
    ///
    /// # Errors
    /// [`Error::Peer`] naming the ranks that differ from rank 0.
    pub fn check_agreement(&self) -> Result<()> {
        if self.comm.topology().world() == 1 {
            return Ok(());
        }
        same_everywhere(&self.comm, "updates", &self.num_updates.to_le_bytes())?;
        let codec = self.options.zero.gather_codec(&self.options.precision);
        let mut gather = Gather::new(codec, self.ahead, self.pools.clone());
        check_weights(&self.states, &mut gather, &self.comm)
    }

    /// A gatherer of weights as they are, for evaluation.
    fn exact_gather(&self) -> Gather {
        Gather::new(Arc::new(F32), self.ahead, self.pools.clone())
    }

    /// One step over `micro_batches`, which are this rank's part of `num_tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Tensor`] on a bug; [`Error::Peer`] when a collective fails.
    pub fn train_step(
        &mut self,
        step: u64,
        lr: f32,
        num_tokens: usize,
        micro_batches: impl Iterator<Item = MicroBatch>,
    ) -> Result<StepOutcome> {
        self.states.iter_mut().for_each(UnitStates::clear_grads);
        let mut loss = 0.0;
        let mut micro_batches = micro_batches.peekable();
        self.plan_pass();
        while let Some(batch) = micro_batches.next() {
            let is_last = micro_batches.peek().is_none();
            if !is_last {
                // So that its first gathers run beside the end of this one.
                self.plan_pass();
            }
            loss += self.forward_backward(step, num_tokens, batch, is_last)?;
        }
        self.reduce.finish(&mut self.states)?;
        for state in &self.states {
            if let Some(name) = state.unit.buffer().without_grad().next() {
                return Err(candle_core::Error::Msg(format!("{name} has no gradient")).into());
            }
        }
        // With whole gradients every rank has the same: they count once.
        let squares = norm::sum_of_squares(&self.states)?;
        let sums = self.comm.sum(&[loss as f64, squares])?;
        let loss = sums[0] as f32;
        let squares = if self.is_sharded { sums[1] } else { squares };
        let grad_norm = squares.sqrt() as f32;
        let mut outcome = StepOutcome {
            loss,
            grad_norm,
            non_finite: None,
        };
        if !loss.is_finite() || !grad_norm.is_finite() {
            outcome.non_finite = Some(norm::first_non_finite(&self.states, &self.comm, loss)?);
            return Ok(outcome);
        }
        let clip = self.options.grad_clip;
        // As torch does: max / (norm + 1e-6), never above 1.
        let grad_scale = if clip > 0.0 {
            (clip / (grad_norm + 1e-6)).min(1.0)
        } else {
            1.0
        };
        self.num_updates += 1;
        let inputs = StepInputs {
            update: self.num_updates,
            lr,
            grad_scale,
            comm: &self.comm,
        };
        for state in &mut self.states {
            state.step(&inputs)?;
        }
        Ok(outcome)
    }

    /// Plans the gathers of one microbatch, in the order [`Engine::forward_backward`] uses them.
    fn plan_pass(&mut self) {
        if !self.is_sharded {
            return;
        }
        let head = self.states.len() - 1;
        let forward = (0..head).chain(self.gathered_for_head());
        let backward = (0..head).rev().filter(|&unit| self.gathers_again(unit));
        let plan: Vec<Request> = forward
            .map(|unit| (unit, Purpose::ForwardGather))
            .chain(backward.map(|unit| (unit, Purpose::BackwardGather)))
            .map(|(unit, purpose)| Request { unit, purpose })
            .collect();
        self.gather.plan(plan);
    }

    /// Unit `unit`, and the unit whose buffer it also reads and adds to.
    fn uses(&self, unit: usize) -> impl Iterator<Item = usize> + use<> {
        let borrowed = self.states[unit].unit.borrowed();
        let lender = borrowed.and_then(|buffer| {
            let lends = |state: &UnitStates| Arc::ptr_eq(state.unit.buffer(), buffer);
            self.states.iter().position(lends)
        });
        once(unit).chain(lender)
    }

    /// What is gathered for the head: what it uses and nobody kept.
    fn gathered_for_head(&self) -> Vec<usize> {
        let head = self.states.len() - 1;
        let uses = self.uses(head);
        uses.filter(|&unit| unit == head || !self.keeps(unit))
            .collect()
    }

    /// Whether unit `unit` keeps its gathered weights from its forward to its backward pass.
    fn keeps(&self, unit: usize) -> bool {
        !self.options.zero.reshard_after_forward && self.states[unit].unit.backward_reads_weights()
    }

    /// Whether unit `unit` is gathered once more for its backward pass.
    fn gathers_again(&self, unit: usize) -> bool {
        self.options.zero.reshard_after_forward && self.states[unit].unit.backward_reads_weights()
    }

    fn acquire(&mut self, unit: usize) -> Result<()> {
        match self.is_sharded {
            true => self.gather.acquire(&self.states, &self.comm, unit),
            false => Ok(()),
        }
    }

    /// Adds the gradients of one microbatch and returns its part of the loss.
    fn forward_backward(
        &mut self,
        step: u64,
        num_tokens: usize,
        batch: MicroBatch,
        is_last: bool,
    ) -> Result<f32> {
        let pass = Pass {
            training: true,
            seed: self.options.seed,
            step,
            first_sequence: batch.first_sequence,
            targets: Some(Arc::new(batch.targets)),
            loss_scale: 1.0 / num_tokens as f32,
        };
        let mut walk = Walk::new(batch.inputs, self.model.seq_len(), pass)?;
        let recompute = self.options.recompute_blocks;
        let world = self.comm.topology().world();
        let head = self.states.len() - 1;
        for unit in 0..head {
            self.acquire(unit)?;
            walk.forward(&self.states[unit].unit, recompute)?;
            if !self.keeps(unit) {
                self.gather.release(&self.states[unit])?;
            }
        }
        // The head goes forward and back at once: its loss is differentiated on the spot, into its
        // own gradient and that of the table it may borrow.
        let gathered = self.gathered_for_head();
        for &unit in &gathered {
            self.acquire(unit)?;
        }
        for unit in self.uses(head) {
            self.reduce.lend(&self.states[unit], world)?;
        }
        walk.forward(&self.states[head].unit, recompute)?;
        let loss = walk.loss()?;
        self.peak_activation_bytes = self.peak_activation_bytes.max(walk.activation_bytes());
        walk.backward()?;
        for unit in gathered {
            self.gather.release(&self.states[unit])?;
        }
        self.reduce_unit(head, is_last)?;
        for unit in (0..head).rev() {
            if self.gathers_again(unit) {
                self.acquire(unit)?;
            }
            self.reduce.lend(&self.states[unit], world)?;
            walk.backward()?;
            if self.states[unit].unit.backward_reads_weights() {
                self.gather.release(&self.states[unit])?;
            }
            self.reduce_unit(unit, is_last)?;
        }
        Ok(loss)
    }

    /// Starts reducing the gradients of a unit whose backward is done. Without shards they add up
    /// locally until the last microbatch.
    fn reduce_unit(&mut self, unit: usize, is_last: bool) -> Result<()> {
        match self.is_sharded || is_last && self.comm.topology().world() > 1 {
            true => self.reduce.start(&mut self.states, &self.comm, unit),
            false => Ok(()),
        }
    }

    /// Mean loss over all ranks' `batches` of (inputs, targets), each (B, S); `None` once any rank
    /// `stops`. Weights are gathered as they are, without a codec.
    ///
    /// # Errors
    /// [`Error::Data`] when there is no batch on any rank; as [`Engine::train_step`].
    pub fn evaluate(
        &self,
        mut batches: impl Iterator<Item = (Vec<u32>, Vec<u32>)>,
        stops: impl Fn() -> bool,
    ) -> Result<Option<f64>> {
        let mut gather = self.exact_gather();
        let (mut loss, mut num_tokens) = (0.0f64, 0usize);
        loop {
            let batch = batches.next();
            // Ranks may have different numbers of batches, but they gather and stop together.
            let (has_batch, stop) = (u8::from(batch.is_some()), u8::from(stops()));
            let all = self
                .comm
                .gather_bytes(Purpose::Evaluation, vec![has_batch, stop])?;
            if all.chunks(2).any(|rank| rank[1] == 1) {
                return Ok(None);
            }
            if all.chunks(2).all(|rank| rank[0] == 0) {
                break;
            }
            let count = batch.as_ref().map_or(0, |(_, targets)| targets.len());
            let walk = batch.map(|(inputs, targets)| {
                let pass = Pass {
                    targets: Some(Arc::new(targets)),
                    loss_scale: 1.0 / count as f32,
                    ..Pass::default()
                };
                Walk::new(inputs, self.model.seq_len(), pass)
            });
            let mut walk = walk.transpose()?;
            self.infer(&mut gather, walk.as_mut())?;
            if let Some(walk) = walk {
                loss += walk.loss()? as f64 * count as f64;
                num_tokens += count;
            }
        }
        let sums = self.comm.sum(&[loss, num_tokens as f64])?;
        if sums[1] == 0.0 {
            return Err(Error::Data("there is nothing to evaluate on".into()));
        }
        Ok(Some(sums[0] / sums[1]))
    }

    /// Logits (V) of the token after `tokens`, which are the same on every rank.
    ///
    /// # Errors
    /// As [`Engine::train_step`].
    pub fn logits(&self, tokens: Vec<u32>) -> Result<Vec<f32>> {
        let mut gather = self.exact_gather();
        let seq_len = tokens.len();
        let mut walk = Walk::new(tokens, seq_len, Pass::default())?;
        self.infer(&mut gather, Some(&mut walk))?;
        Ok(walk.output().flatten_all()?.to_vec1()?)
    }

    /// Takes a walk through the model without keeping anything; without one, gathers along.
    fn infer(&self, gather: &mut Gather, mut walk: Option<&mut Walk>) -> Result<()> {
        let num_units = self.states.len();
        if self.is_sharded {
            let units = (0..num_units).flat_map(|unit| self.uses(unit));
            let purpose = Purpose::Evaluation;
            gather.plan(units.map(|unit| Request { unit, purpose }));
        }
        for unit in 0..num_units {
            if self.is_sharded {
                for unit in self.uses(unit) {
                    gather.acquire(&self.states, &self.comm, unit)?;
                }
            }
            if let Some(walk) = &mut walk {
                walk.infer(&self.states[unit].unit)?;
            }
            for unit in self.uses(unit) {
                gather.release(&self.states[unit])?;
            }
        }
        Ok(())
    }
}
