//! `[model]`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How weight matrices start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Init {
    /// Normal with deviation 0.02; projections into the residual stream 0.02 / sqrt(2 L).
    Gpt2,
    /// Uniform with bound sqrt(6 / (inputs + outputs)).
    Xavier,
}

/// The model: GPT-2 with options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// Transformer blocks.
    pub num_layers: usize,
    /// Attention heads; must divide `d_model`.
    pub num_heads: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Longest sequence, in tokens.
    pub seq_len: usize,
    /// Rows of the embedding; the tokenizer's vocabulary when absent.
    pub vocab_size: Option<usize>,
    /// StableEmbedding: Xavier-uniform word embedding, layer norm before positions, f32 state.
    pub stable_embedding: bool,
    /// One table for the embedding and the head; the opposite of `stable_embedding` when absent.
    pub tie_embeddings: Option<bool>,
    /// Biases in linear layers and layer norms.
    pub bias: bool,
    /// Share of activations and attention probabilities dropped in training.
    pub dropout: f32,
    /// How weight matrices of blocks and head start: "gpt2" or "xavier". The embeddings do not follow
    /// it: they start normal with deviation 0.02, StableEmbedding's word embedding Xavier-uniform.
    pub init: Init,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            num_layers: 4,
            num_heads: 4,
            d_model: 128,
            seq_len: 64,
            vocab_size: None,
            stable_embedding: true,
            tie_embeddings: None,
            bias: true,
            dropout: 0.0,
            init: Init::Gpt2,
        }
    }
}

impl ModelConfig {
    /// Whether the head uses the embedding's table.
    pub fn is_tied(&self) -> bool {
        self.tie_embeddings.unwrap_or(!self.stable_embedding)
    }
}
