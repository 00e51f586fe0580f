//! A unit: the grain in which weights are gathered, used and released.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use crate::ops::{Dropout, LayerNorm, LinearResidual};
use crate::ops::{DropoutAt, Linear, Param, ParamInit, ParamSpec, Tape, UnitBuffer};

use super::{Init, ModelConfig};

/// What a pass through the model needs besides weights and activations.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// Whether dropout applies.
    pub training: bool,
    /// Seed of the run.
    pub seed: u64,
    /// Step of the run.
    pub step: u64,
    /// Index in the global batch of the first sequence at hand.
    pub first_sequence: u64,
    /// Next tokens, one a position; without them the head returns logits of the last position.
    pub targets: Option<Arc<Vec<u32>>>,
    /// The loss is multiplied by this: one over the tokens of the global batch.
    pub loss_scale: f32,
}

/// A part of the model that owns one flat parameter buffer.
pub trait Unit: Send + Sync {
    /// Name for logs: `embedding`, `block 3`, `head`.
    fn name(&self) -> &str;

    /// The unit's weights and gradients.
    fn buffer(&self) -> &Arc<UnitBuffer>;

    /// Another unit's buffer that this one also reads (a tied head reads the embedding's).
    fn borrowed(&self) -> Option<&Arc<UnitBuffer>> {
        None
    }

    /// Whether the backward pass reads the unit's weights.
    fn backward_reads_weights(&self) -> bool {
        true
    }

    /// Whether the forward pass may run again in the backward pass instead of keeping activations.
    fn can_recompute(&self) -> bool {
        false
    }

    /// Embedding: token ids (B, S) u32 to (B, S, D). Block: (B, S, D) to (B, S, D). Head: (B, S, D)
    /// to the scalar loss, or to (B, V) logits without targets.
    ///
    /// # Errors
    /// On shapes that do not fit and tokens past the vocabulary.
    fn forward(&self, tape: &Tape, input: &Tensor, pass: &Pass) -> Result<Tensor>;
}

/// Collects a unit's parameters with the model's options.
pub struct Declare<'a> {
    config: &'a ModelConfig,
    prefix: String,
    /// What was declared so far.
    pub specs: Vec<ParamSpec>,
}

impl<'a> Declare<'a> {
    pub fn new(config: &'a ModelConfig, prefix: impl Into<String>) -> Self {
        Self {
            config,
            prefix: prefix.into(),
            specs: Vec::new(),
        }
    }

    pub fn param(
        &mut self,
        name: &str,
        shape: &[usize],
        init: ParamInit,
        decay: bool,
    ) -> &mut ParamSpec {
        self.specs.push(ParamSpec {
            name: format!("{}{name}", self.prefix),
            shape: shape.to_vec(),
            init,
            decay,
            keep_f32_state: false,
        });
        let last = self.specs.len() - 1;
        &mut self.specs[last]
    }

    /// A matrix (inputs, outputs); `depth_scale` shrinks GPT-2's deviation.
    pub fn matrix(&mut self, name: &str, shape: [usize; 2], depth_scale: f32) -> &mut ParamSpec {
        let init = match self.config.init {
            Init::Gpt2 => ParamInit::Normal {
                std: 0.02 * depth_scale,
            },
            Init::Xavier => xavier(shape),
        };
        self.param(name, &shape, init, true)
    }

    pub fn linear(&mut self, name: &str, shape: [usize; 2], depth_scale: f32) {
        self.matrix(&format!("{name}.weight"), shape, depth_scale);
        if self.config.bias {
            self.param(
                &format!("{name}.bias"),
                &shape[1..],
                ParamInit::Constant(0.0),
                false,
            );
        }
    }

    pub fn layer_norm(&mut self, name: &str, bias: bool) {
        let shape = [self.config.d_model];
        self.param(
            &format!("{name}.weight"),
            &shape,
            ParamInit::Constant(1.0),
            false,
        );
        if bias {
            self.param(
                &format!("{name}.bias"),
                &shape,
                ParamInit::Constant(0.0),
                false,
            );
        }
    }
}

/// Xavier-uniform for a matrix.
pub fn xavier(shape: [usize; 2]) -> ParamInit {
    ParamInit::Uniform {
        bound: (6.0 / (shape[0] + shape[1]) as f32).sqrt(),
    }
}

/// Finds a declared parameter of `buffer`; a miss is a bug of the model.
pub fn find(buffer: &Arc<UnitBuffer>, name: &str) -> Param {
    match buffer.param(name) {
        Some(param) => param,
        None => unreachable!("{name} was not declared"),
    }
}

pub fn find_linear(buffer: &Arc<UnitBuffer>, name: &str) -> Linear {
    Linear {
        weight: find(buffer, &format!("{name}.weight")),
        bias: buffer.param(&format!("{name}.bias")),
    }
}

pub fn find_layer_norm(buffer: &Arc<UnitBuffer>, name: &str) -> LayerNorm {
    LayerNorm {
        weight: find(buffer, &format!("{name}.weight")),
        bias: buffer.param(&format!("{name}.bias")),
    }
}

impl Pass {
    /// Where dropout number `site` of the model draws its mask; `None` when nothing is dropped.
    pub fn dropout(&self, rate: f32, site: u64) -> Option<DropoutAt> {
        (self.training && rate > 0.0).then_some(DropoutAt {
            rate,
            seed: self.seed,
            step: self.step,
            first_sequence: self.first_sequence,
            site,
        })
    }
}

/// `residual + dropout(linear(x))`; without dropout in one op.
pub fn add_to_residual(
    tape: &Tape,
    x: &Tensor,
    residual: &Tensor,
    linear: &Linear,
    dropout: Option<DropoutAt>,
) -> Result<Tensor> {
    let Some(at) = dropout else {
        return tape.apply2(x, residual, LinearResidual(linear.clone()));
    };
    let branch = tape.apply1(x, linear.clone())?;
    let branch = tape.apply1(&branch, Dropout(at))?;
    tape.apply2(&branch, residual, crate::ops::Add)
}
