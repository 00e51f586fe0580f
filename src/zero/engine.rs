//! The training step over units: forward, backward, reduce, clip, update.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::partition;
use crate::comm::{Comm, ReduceOp};
use crate::model::{Gpt, Pass, Unit};
use crate::ops::{ALIGN, Tape};
use crate::optim::{self, Optimizer, OptimizerConfig, StepInputs};
use crate::{Error, Result};

/// How the engine trains.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Seed of the run, for dropout.
    pub seed: u64,
    /// Largest global gradient norm; larger gradients are scaled down to it. 0 for no limit.
    pub grad_clip: f32,
    /// Whether blocks run their forward pass again instead of keeping activations.
    pub recompute_blocks: bool,
    /// Parameters with fewer elements keep f32 optimizer state.
    pub min_8bit_size: usize,
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

/// A model with its optimizers, and the group of ranks that share them.
pub struct Engine {
    model: Gpt,
    /// One a unit.
    optimizers: Vec<Box<dyn Optimizer>>,
    comm: Comm,
    options: EngineOptions,
    /// Updates so far. Skipped steps do not count.
    num_updates: u64,
}

impl Engine {
    /// An engine over `model` with fresh optimizer state.
    ///
    /// # Errors
    /// [`Error::Config`] when the optimizer cannot be built.
    pub fn new(
        model: Gpt,
        optimizer: &OptimizerConfig,
        comm: Comm,
        options: EngineOptions,
    ) -> Result<Self> {
        let place = comm.topology();
        let build = |unit: &Arc<dyn Unit>| {
            let layout = unit.buffer().layout();
            let shard = partition::shard(layout.num_elements, place.world(), place.rank);
            let segments = partition::segments(layout, &shard, options.min_8bit_size);
            optim::build(optimizer, segments, shard.len())
        };
        let optimizers = model.units().iter().map(build).collect();
        Ok(Self {
            model,
            optimizers,
            comm,
            options,
            num_updates: 0,
        })
    }

    /// The model.
    pub fn model(&self) -> &Gpt {
        &self.model
    }

    /// The units' optimizers with their units, to save or to load.
    pub fn optimizers(
        &mut self,
    ) -> impl Iterator<Item = (&Arc<dyn Unit>, &mut Box<dyn Optimizer>)> {
        self.model.units().iter().zip(&mut self.optimizers)
    }

    /// Updates so far.
    pub fn num_updates(&self) -> u64 {
        self.num_updates
    }

    /// Continues from `num_updates` updates, after weights and state were loaded.
    pub fn set_num_updates(&mut self, num_updates: u64) {
        self.num_updates = num_updates;
    }

    /// Bytes of optimizer state on this rank.
    pub fn state_bytes(&self) -> usize {
        self.optimizers.iter().map(|o| o.state_bytes()).sum()
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
        for unit in self.model.units() {
            unit.buffer().clear_grads();
        }
        let mut loss = 0.0;
        for batch in micro_batches {
            loss += self.forward_backward(step, num_tokens, batch)?;
        }
        let loss = self.comm.all_reduce(&[loss], ReduceOp::Sum)?[0];
        for unit in self.model.units() {
            if let Some(name) = unit.buffer().without_grad().next() {
                return Err(candle_core::Error::Msg(format!("{name} has no gradient")).into());
            }
        }
        let grad_norm = self.grad_norm()?;
        let mut outcome = StepOutcome {
            loss,
            grad_norm,
            non_finite: None,
        };
        if !loss.is_finite() || !grad_norm.is_finite() {
            outcome.non_finite = Some(self.first_non_finite(loss)?);
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
        for (unit, optimizer) in self.model.units().iter().zip(&mut self.optimizers) {
            unit.buffer()
                .with_step(|weights, grads| Ok(optimizer.step(&inputs, weights, grads)))??;
        }
        Ok(outcome)
    }

    /// Adds the gradients of one microbatch and returns its part of the loss.
    fn forward_backward(&self, step: u64, num_tokens: usize, batch: MicroBatch) -> Result<f32> {
        let pass = Pass {
            training: true,
            seed: self.options.seed,
            step,
            first_sequence: batch.first_sequence,
            targets: Some(Arc::new(batch.targets)),
            loss_scale: 1.0 / num_tokens as f32,
        };
        let seq_len = self.model.seq_len();
        let tokens = Tensor::from_vec(batch.inputs, ((), seq_len), &Device::Cpu)?;
        // One tape a unit: between units the engine holds plain tensors, where it can gather,
        // reduce and release.
        let mut tapes = Vec::new();
        let mut x = tokens;
        for unit in self.model.units() {
            let tape = Tape::recording();
            let y = if self.options.recompute_blocks && unit.can_recompute() {
                let (unit, pass) = (unit.clone(), pass.clone());
                tape.recompute(&x, move |tape, x| unit.forward(tape, x, &pass))?
            } else {
                unit.forward(&tape, &x, &pass)?
            };
            tapes.push((tape, x, y.clone()));
            x = y;
        }
        let loss = x.to_scalar::<f32>()?;
        let mut grad = x.ones_like()?;
        drop(x);
        while let Some((tape, input, output)) = tapes.pop() {
            match tape.backward(&output, grad, &input)? {
                Some(input_grad) => grad = input_grad,
                None => break,
            }
        }
        Ok(loss)
    }

    /// The norm over all gradients: per-block partial sums, added in block order in f64.
    fn grad_norm(&self) -> Result<f32> {
        let mut sum = 0.0f64;
        for unit in self.model.units() {
            sum += unit.buffer().with_grads(|grads| {
                let partial = |block: &[f32]| sum_of_squares(block) as f64;
                let partials: Vec<f64> = grads
                    .par_chunks(ALIGN)
                    .with_min_len(16)
                    .map(partial)
                    .collect();
                Ok(partials.iter().sum::<f64>())
            })?;
        }
        Ok(self.comm.all_reduce(&[sum as f32], ReduceOp::Sum)?[0].sqrt())
    }

    /// The first parameter with a value that is not finite, or else with such a gradient, or else
    /// what the step made of them.
    fn first_non_finite(&self, loss: f32) -> Result<String> {
        for param in self.model.params() {
            if !param.read(|w| Ok(w.iter().all(|w| w.is_finite())))? {
                return Ok(param.spec().name.clone());
            }
        }
        for param in self.model.params() {
            if param.grad()?.iter().any(|g| !g.is_finite()) {
                return Ok(format!("gradient of {}", param.spec().name));
            }
        }
        let what = if loss.is_finite() {
            "gradient norm"
        } else {
            "loss"
        };
        Ok(what.into())
    }

    /// Mean loss over `batches` of (inputs, targets), each (B, S).
    ///
    /// # Errors
    /// [`Error::Data`] when there is no batch; as [`Engine::train_step`].
    pub fn evaluate(&self, batches: impl Iterator<Item = (Vec<u32>, Vec<u32>)>) -> Result<f64> {
        let (mut loss, mut num_tokens) = (0.0f64, 0usize);
        for (inputs, targets) in batches {
            let count = targets.len();
            let pass = Pass {
                targets: Some(Arc::new(targets)),
                loss_scale: 1.0 / count as f32,
                ..Pass::default()
            };
            let tokens = Tensor::from_vec(inputs, ((), self.model.seq_len()), &Device::Cpu)?;
            loss += self.model.infer(&tokens, &pass)?.to_scalar::<f32>()? as f64 * count as f64;
            num_tokens += count;
        }
        if num_tokens == 0 {
            return Err(Error::Data("there is nothing to evaluate on".into()));
        }
        Ok(loss / num_tokens as f64)
    }
}

/// Sum of squares over 16 lanes, which the compiler vectorises.
fn sum_of_squares(values: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for chunk in values.chunks(16) {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += v * v;
        }
    }
    crate::simd::body::sum_lanes(lanes)
}
