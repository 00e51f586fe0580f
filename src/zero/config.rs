//! `[zero]` and `[precision]`.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quant::{Bf16, Codec, F32, Symmetric};

/// How model states are spread over ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ZeroConfig {
    /// 3: weights, gradients and optimizer state are sharded over all ranks. 0: every rank holds
    /// all of them and only averages gradients (plain data parallelism). The same on one rank.
    pub stage: u8,
    /// Whether weights are released after the forward pass and gathered again for the backward.
    pub reshard_after_forward: bool,
    /// Units whose weights are gathered ahead of the one that computes.
    pub prefetch: usize,
    /// Whether collectives run beside the computation; otherwise each is waited for at once.
    pub overlap: bool,
    /// Steps between checks that all ranks agree (they always check at the start); 0 for no more.
    pub verify_every: u64,
    /// Block-quantized weight gathers (qwZ, ZeRO++ section 3.1). Norms, biases and other parameters
    /// below 4096 elements travel as f32.
    pub qwz: QwzConfig,
}

/// Block-quantized weight gathers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct QwzConfig {
    /// Whether weights are quantized for their gathers.
    pub enabled: bool,
    /// Bits of a weight: 8 or 4.
    pub bits: u32,
    /// Weights that share a scale: a divisor of 2048 from 64.
    pub block: usize,
}

impl Default for QwzConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            bits: 8,
            block: 2048,
        }
    }
}

impl Default for ZeroConfig {
    fn default() -> Self {
        Self {
            stage: 3,
            reshard_after_forward: true,
            prefetch: 1,
            overlap: true,
            verify_every: 1000,
            qwz: QwzConfig::default(),
        }
    }
}

impl ZeroConfig {
    /// What weights go through on their way from their owners.
    pub fn gather_codec(&self, precision: &PrecisionConfig) -> Arc<dyn Codec> {
        match self.qwz.enabled {
            true => Arc::new(Symmetric::new(self.qwz.bits, self.qwz.block)),
            false => precision.gather.codec(),
        }
    }
}

/// A float format that crosses between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32 bits.
    F32,
    /// 16 bits, of which 7 are the fraction.
    Bf16,
}

impl Precision {
    /// Its codec.
    pub fn codec(self) -> Arc<dyn Codec> {
        match self {
            Precision::F32 => Arc::new(F32),
            Precision::Bf16 => Arc::new(Bf16),
        }
    }
}

/// Float formats between ranks. Computation, master weights and sums are f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionConfig {
    /// Weights on their way from their owners. All ranks compute with the rounded weights.
    pub gather: Precision,
    /// Gradients on their way to their owners.
    pub reduce: Precision,
}

impl Default for PrecisionConfig {
    fn default() -> Self {
        Self {
            gather: Precision::F32,
            reduce: Precision::F32,
        }
    }
}
