//! The model states of a unit: what of its weights, gradients and optimizer state a rank holds.

use std::ops::Range;
use std::sync::Arc;

use super::partition;
use crate::comm::Topology;
use crate::model::Unit;
use crate::optim::{self, Optimizer, OptimizerConfig, StepInputs};
use crate::{Error, Result};

/// One unit's model states on this rank.
pub struct UnitStates {
    /// The unit.
    pub unit: Arc<dyn Unit>,
    /// Steps the rank's part of the unit.
    pub optimizer: Box<dyn Optimizer>,
    /// Updates the weights have had; every copy carries the version it was made from.
    pub version: u64,
    /// The rank's part of the flat buffer.
    shard: Range<usize>,
    /// None when the rank holds the whole unit: then weights and gradients stay in its buffer.
    own: Option<Own>,
}

/// A shard.
struct Own {
    /// f32 master weights. Shared with a gather while it runs.
    master: Arc<Vec<f32>>,
    grads: Vec<f32>,
    /// Whether the step's first reduction is still to come.
    is_stale: bool,
}

impl UnitStates {
    /// The states of `unit`, whose weights are at hand; with `is_sharded` this rank keeps its part
    /// of them.
    ///
    /// # Errors
    /// [`Error::Tensor`] when candle refuses access to the buffer.
    pub fn new(
        unit: &Arc<dyn Unit>,
        place: Topology,
        is_sharded: bool,
        optimizer: &OptimizerConfig,
        min_8bit_size: usize,
    ) -> Result<Self> {
        let layout = unit.buffer().layout();
        let (world, rank) = match is_sharded {
            true => (place.world(), place.rank),
            false => (1, 0),
        };
        let shard = partition::shard(layout.num_elements, world, rank);
        let segments = partition::segments(layout, &shard, min_8bit_size);
        let own = match is_sharded {
            true => {
                let mut weights = unit.buffer().take_weights()?;
                weights.resize(
                    partition::shard_len(layout.num_elements, world) * world,
                    0.0,
                );
                Some(Own {
                    master: Arc::new(weights[shard.clone()].to_vec()),
                    grads: vec![0.0; shard.len()],
                    is_stale: true,
                })
            }
            false => {
                let whole = vec![0.0; layout.num_elements];
                unit.buffer().lend_grads(whole)?;
                None
            }
        };
        Ok(Self {
            unit: unit.clone(),
            optimizer: optim::build(optimizer, segments, shard.len()),
            version: 0,
            shard,
            own,
        })
    }

    /// Elements of the rank's part.
    pub fn shard_len(&self) -> usize {
        self.shard.len()
    }

    /// The master weights of the shard; `None` when the unit's buffer holds all of them.
    pub fn master(&self) -> Option<&Arc<Vec<f32>>> {
        self.own.as_ref().map(|own| &own.master)
    }

    /// Declares gradients stale before a step.
    pub fn clear_grads(&mut self) {
        self.unit.buffer().clear_grads();
        if let Some(own) = &mut self.own {
            own.is_stale = true;
        }
    }

    /// Adds a microbatch's reduced gradients of the shard, and returns a buffer of that size.
    pub fn add_grads(&mut self, mut sums: Vec<f32>) -> Vec<f32> {
        if let Some(own) = &mut self.own {
            if own.is_stale {
                std::mem::swap(&mut own.grads, &mut sums);
                own.is_stale = false;
            } else {
                for (grad, sum) in own.grads.iter_mut().zip(&sums) {
                    *grad += sum;
                }
            }
        }
        sums
    }

    /// Calls `f` with the gradients of the rank's part.
    ///
    /// # Errors
    /// [`Error::Tensor`] when they were released.
    pub fn with_grads<R>(&self, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        match &self.own {
            Some(own) => Ok(f(&own.grads)),
            None => Ok(self.unit.buffer().with_grads(|grads| Ok(f(grads)))?),
        }
    }

    /// Calls `f` with the master weights of the rank's part.
    ///
    /// # Errors
    /// [`Error::Tensor`] when they were released.
    pub fn with_master<R>(&self, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        match &self.own {
            Some(own) => Ok(f(&own.master)),
            None => Ok(self.unit.buffer().with_weights(|weights| Ok(f(weights)))?),
        }
    }

    /// Updates the rank's part.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`Error::Tensor`] when a gather still reads the weights.
    pub fn step(&mut self, inputs: &StepInputs) -> Result<()> {
        match &mut self.own {
            Some(own) => {
                let Some(master) = Arc::get_mut(&mut own.master) else {
                    let what = format!("{}: stepped while it is gathered", self.unit.name());
                    return Err(Error::Tensor(candle_core::Error::Msg(what)));
                };
                self.optimizer.step(inputs, master, &own.grads)?;
            }
            None => {
                let optimizer = &mut self.optimizer;
                self.unit
                    .buffer()
                    .with_step(|weights, grads| Ok(optimizer.step(inputs, weights, grads)))??;
            }
        }
        self.version += 1;
        Ok(())
    }

    /// Bytes of weights and gradients that live between steps.
    pub fn resident_bytes(&self) -> (usize, usize) {
        let weights = self.shard.len() * 4;
        (weights, weights)
    }
}
