//! `train`: GPT-style language models from a TOML config.
//!
//! Letters used for shapes everywhere: B batch, S sequence, D model width, H heads, V vocabulary,
//! L layers, W world size. `main.rs` parses the command line; everything else is here.

pub mod checkpoint; // run state on disk: safetensors, manifest with hashes, atomic rename
pub mod cli; // one file a subcommand
pub mod comm; // collectives between ranks
pub mod config; // TOML < environment < --set, validated into a plan
pub mod data; // text -> tokenizer -> token shards -> samples
mod durable; // files and folders that are complete or absent
pub mod error; // every error, and the exit status it ends the process with
pub mod launch; // who am I (torchrun, Slurm, MPI, flags), how ranks meet, the launcher
pub mod metrics; // FLOPs, metrics.jsonl, TensorBoard, progress, logs
pub mod model; // GPT as a list of units; knows nothing of ranks
pub mod ops; // differentiable fused ops, each with a naive twin
pub mod optim; // optimizers, their f32 or 8-bit state, learning-rate schedules
pub mod quant; // codecs: f32 values <-> bytes
pub mod rng; // counter-based random numbers: f(seed, purpose, index)
pub mod runtime; // compute threads: count, denormals, allocator
pub mod simd; // instruction-set choice at run time
pub mod trainer; // the training loop and its run folder
pub mod zero; // who owns which part of the model states, and the training step

pub use error::{Error, Result};
