//! Who owns which part of the model states, and the training step (ZeRO stage 3).

mod engine;
mod partition;

pub use engine::{Engine, EngineOptions, MicroBatch, StepOutcome};
pub use partition::{segments, shard};
