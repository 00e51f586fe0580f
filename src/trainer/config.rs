//! `[run]`, `[train]` and `[checkpoint]`.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the run is called, where its folder lies, and its seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Name of the run folder.
    pub name: String,
    /// Folder that holds run folders: the run's own is `dir/name`.
    pub dir: PathBuf,
    /// Seed of everything random: initial weights, samples, dropout.
    pub seed: u64,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            name: "run".into(),
            dir: "runs".into(),
            seed: 1337,
        }
    }
}

/// Where a rank computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDevice {
    /// The processor's cores.
    Cpu,
}

/// What backward finds instead of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ActivationCheckpointing {
    /// Every activation is kept.
    None,
    /// Each block keeps its input only and runs its forward pass again.
    Block,
}

/// What happens when a loss or gradient is not finite. The step is never applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NonFinite {
    /// Training stops and names the tensor.
    Abort,
    /// The step is skipped and logged, up to `max_skips` times.
    Skip,
}

/// The training loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Optimizer steps of the whole run.
    pub steps: u64,
    /// Sequences a rank computes at once.
    pub micro_batch: usize,
    /// Sequences a step, over all ranks and micro-batches; `micro_batch` x ranks when absent.
    pub global_batch: Option<usize>,
    /// Compute threads a rank; the cores of the machine over its ranks when absent.
    pub threads: Option<usize>,
    /// Where a rank computes.
    pub device: ComputeDevice,
    /// Steps between evaluations; 0 for one at the end only.
    pub eval_every: u64,
    /// Validation micro-batches of evaluations during the run, 0 for the whole split; the last one
    /// always scores the whole split.
    pub eval_batches: usize,
    /// Largest global gradient norm: larger gradients are scaled down to it; 0 for no limit.
    pub grad_clip: f32,
    /// What is computed again in backward instead of kept.
    pub activation_checkpointing: ActivationCheckpointing,
    /// What a loss or gradient that is not finite does. The step is never applied.
    pub non_finite: NonFinite,
    /// Skipped steps after which `non_finite = "skip"` stops the run all the same.
    pub max_skips: u64,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 2000,
            micro_batch: 8,
            global_batch: None,
            threads: None,
            device: ComputeDevice::Cpu,
            eval_every: 250,
            eval_batches: 0,
            grad_clip: 1.0,
            activation_checkpointing: ActivationCheckpointing::None,
            non_finite: NonFinite::Abort,
            max_skips: 10,
        }
    }
}

/// When checkpoints are saved and how many stay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; 0 for one at the end only.
    pub every: u64,
    /// Newest checkpoints that stay; older ones are removed.
    pub keep: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every: 0, keep: 2 }
    }
}
