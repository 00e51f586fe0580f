//! Optimizers: each steps the shard of a unit that this rank owns.

mod adamw;
mod adamw_kernel;
pub mod bench;
mod config;
pub mod lr;
mod state;

use std::ops::Range;

use crate::Result;
use crate::comm::Comm;

pub use adamw::AdamW;
pub use config::{OptimizerConfig, OptimizerName, QuantMap, StateKind};

/// A run of a shard that belongs to one parameter and is treated alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Where it lies in the shard. Starts on a multiple of 2048 when `eight_bit`; the run may end
    /// anywhere (zero padding up to the next multiple belongs to no segment).
    pub range: Range<usize>,
    /// Elements of the parameter before the run, on other ranks.
    pub offset: usize,
    /// The parameter's name, for checkpoints and messages.
    pub name: String,
    /// Whether weight decay applies (matrices and embeddings, not norms and biases).
    pub decay: bool,
    /// Whether its state may be quantized: decided on the whole parameter, never on the shard.
    pub eight_bit: bool,
}

/// What one step needs besides values and state.
#[derive(Clone, Copy)]
pub struct StepInputs<'a> {
    /// 1 for the first update; bias correction counts updates.
    pub update: u64,
    /// Learning rate of this step.
    pub lr: f32,
    /// Every gradient is multiplied by this before use (clipping).
    pub grad_scale: f32,
    /// For norms over parameters that several ranks share.
    pub comm: &'a Comm,
}

/// The bytes of one piece of state, to save or to fill.
pub enum StateSlice<'a> {
    /// f32 values: moments, or the scales of quantized moments.
    F32(&'a mut [f32]),
    /// Codes of quantized moments.
    U8(&'a mut [u8]),
}

/// One named piece of a segment's state.
pub struct StateEntry<'a> {
    /// Index of the segment it belongs to.
    pub segment: usize,
    /// `exp_avg`, `exp_avg_sq`, and with quantized state `exp_avg.absmax`, `exp_avg_sq.absmax`.
    pub name: &'static str,
    /// Elements of the parameter a value stands for: 1, or the block whose scale it is.
    pub block: usize,
    /// The values.
    pub values: StateSlice<'a>,
}

/// Updates a shard in place. One instance a unit and rank.
pub trait Optimizer: Send {
    /// One fused pass: reads `grads`, updates state and `params` (both of the shard's length, f32).
    ///
    /// # Errors
    /// [`crate::Error::Peer`] when a norm over ranks cannot be formed.
    fn step(&mut self, inputs: &StepInputs, params: &mut [f32], grads: &[f32]) -> Result<()>;

    /// All state, in segment order, for saving (read it) or loading (overwrite it). Never cast.
    fn state(&mut self) -> Vec<StateEntry<'_>>;

    /// The runs of the shard, in order.
    fn segments(&self) -> &[Segment];

    /// Bytes of state held.
    fn state_bytes(&self) -> usize;
}

/// The configured optimizer, with zero state, for a shard of `shard_len` values.
///
/// `segments` lie in ascending order and do not overlap; values outside all of them are padding
/// and are neither read nor written.
pub fn build(
    config: &OptimizerConfig,
    segments: Vec<Segment>,
    shard_len: usize,
) -> Box<dyn Optimizer> {
    match config.name {
        OptimizerName::AdamW => Box::new(AdamW::new(config, segments, shard_len)),
    }
}
