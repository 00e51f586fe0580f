//! Run state on disk.
//!
//! A checkpoint is a folder `step_00000100`: `model.safetensors`, `optimizer.safetensors` and
//! `manifest.json` with their hashes. It is written as a hidden temporary folder, synced, and
//! renamed, so a folder with that name is always complete. Tensors are whole parameters by name:
//! nothing in the files depends on how many ranks wrote them.

mod collect;
mod load;
mod manifest;
mod save;

pub use load::{Checkpoint, Weights, latest};
pub use manifest::{Difference, Manifest, Position};
pub use save::save;
