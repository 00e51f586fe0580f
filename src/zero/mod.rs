//! Who owns which part of the model states, and the training step (ZeRO stage 3).

mod agree;
mod config;
mod engine;
mod gather;
mod memory;
mod norm;
mod partition;
mod pool;
mod reduce;
mod shard_codec;
mod states;
mod walk;

pub use agree::same_or;
pub use config::{Precision, PrecisionConfig, QwzConfig, ZeroConfig};
pub use engine::{Engine, EngineOptions, MicroBatch, StepOutcome};
pub use memory::Memory;
pub use partition::{segments, shard, shard_len};
pub use states::UnitStates;
