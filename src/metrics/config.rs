//! `[metrics]` and `[hardware]`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a run writes down about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Steps between train lines in metrics.jsonl and on the terminal.
    pub log_every: u64,
    /// Whether event files for TensorBoard are written.
    pub tensorboard: bool,
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self {
            log_every: 1,
            tensorboard: true,
        }
    }
}

/// What the machine can do, for figures that compare against it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HardwareConfig {
    /// Peak TFLOP/s of one rank's device; without it `mfu` is null.
    pub peak_tflops: Option<f64>,
}
