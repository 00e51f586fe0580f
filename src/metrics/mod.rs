//! What a run tells about itself: numbers a step, files, the terminal.

pub mod config; // [metrics], [hardware]
pub mod flops; // floating-point operations a step, by a formula with a name
pub mod jsonl; // metrics.jsonl
pub mod logging; // tracing to stderr and train.log
pub mod memory; // resident memory of this process
pub mod progress; // a bar on a terminal, a line a step elsewhere
pub mod record; // what is logged: train, eval, event
pub mod tensorboard; // event files

pub use config::{HardwareConfig, MetricsConfig};
pub use record::{EvalRecord, EventRecord, MemoryRecord, TrainRecord};
