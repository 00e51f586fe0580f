//! `[optimizer]`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The update rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// Adam with decoupled weight decay.
    AdamW,
}

/// How optimizer state is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum StateKind {
    /// Full precision.
    #[serde(rename = "f32")]
    F32,
    /// Block-wise dynamic quantization, one byte a value.
    #[serde(rename = "8bit")]
    EightBit,
}

/// The 256 values that 8-bit state codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum QuantMap {
    /// Dynamic tree: about seven decades, finest near the largest value.
    Dynamic,
}

/// The optimizer and the precision of its state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// Update rule.
    pub name: OptimizerName,
    /// Precision of the moments: "f32" or "8bit".
    pub state: StateKind,
    /// Quantization map of 8-bit state.
    pub map: QuantMap,
    /// Values that share a scale in 8-bit state: a divisor of 2048, at least 64.
    pub block: usize,
    /// Parameters with fewer elements keep f32 state.
    pub min_8bit_size: usize,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay of matrices and embeddings; norms and biases have none.
    pub weight_decay: f32,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            name: OptimizerName::AdamW,
            state: StateKind::F32,
            map: QuantMap::Dynamic,
            block: 256,
            min_8bit_size: 4096,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
        }
    }
}
