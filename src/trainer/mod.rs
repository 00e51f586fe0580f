//! The training loop and what it is told.

pub mod config; // [run], [train], [checkpoint]

pub use config::{
    ActivationCheckpointing, CheckpointConfig, ComputeDevice, NonFinite, RunConfig, TrainConfig,
};
