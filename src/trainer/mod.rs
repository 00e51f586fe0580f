//! The training loop and what it is told.

mod config; // [run], [train], [checkpoint]
mod folder; // the run folder
mod interrupt; // Ctrl-C
mod recorder; // metrics.jsonl, TensorBoard, the terminal
mod train; // the loop

pub use config::{
    ActivationCheckpointing, CheckpointConfig, ComputeDevice, NonFinite, RunConfig, TrainConfig,
};
pub use folder::{RunFolder, Start};
pub use train::{check, train};
