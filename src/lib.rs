//! `train`: GPT-style language models from a TOML config.
//!
//! Letters used for shapes everywhere: B batch, S sequence, D model width, H heads, V vocabulary,
//! L layers, W world size. `main.rs` parses the command line; everything else is here.

pub mod comm; // collectives between ranks
pub mod error; // every error, and the exit status it ends the process with
pub mod optim; // optimizers, their f32 or 8-bit state, learning-rate schedules
pub mod quant; // codecs: f32 values <-> bytes
pub mod runtime; // compute threads: count, denormals
pub mod simd; // instruction-set choice at run time

pub use error::{Error, Result};
