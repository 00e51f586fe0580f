//! The embedding unit: plain as in GPT-2, or StableEmbedding (8-bit optimizers, section 2.3).

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::ModelConfig;
use super::unit::{Declare, Pass, Unit, find, find_layer_norm, xavier};
use crate::ops::{
    AddPositions, Dropout, Embedding, LayerNorm, Param, ParamInit, Tape, UnitBuffer, UnitLayout,
};

/// Word embedding, then with StableEmbedding its layer norm, then learned positions.
///
/// StableEmbedding starts Xavier-uniform, normalises before positions are added and keeps f32
/// optimizer state: token frequencies are so uneven that embedding gradients reach a hundred times
/// those of other layers.
pub struct EmbeddingUnit {
    buffer: Arc<UnitBuffer>,
    /// Word embedding (V, D).
    pub wte: Param,
    wpe: Param,
    norm: Option<LayerNorm>,
    dropout: f32,
}

impl EmbeddingUnit {
    /// An embedding of `vocab_size` tokens.
    pub fn new(config: &ModelConfig, vocab_size: usize) -> Self {
        let d = config.d_model;
        let std = ParamInit::Normal { std: 0.02 };
        let mut declare = Declare::new(config, "");
        if config.stable_embedding {
            let wte = declare.param(
                "wte.weight",
                &[vocab_size, d],
                xavier([vocab_size, d]),
                true,
            );
            wte.keep_f32_state = true;
        } else {
            declare.param("wte.weight", &[vocab_size, d], std, true);
        }
        declare.param("wpe.weight", &[config.seq_len, d], std, true);
        if config.stable_embedding {
            declare.layer_norm("wte.norm", true);
        }
        let buffer = UnitBuffer::new(UnitLayout::new(declare.specs));
        Self {
            wte: find(&buffer, "wte.weight"),
            wpe: find(&buffer, "wpe.weight"),
            norm: config
                .stable_embedding
                .then(|| find_layer_norm(&buffer, "wte.norm")),
            dropout: config.dropout,
            buffer,
        }
    }
}

impl Unit for EmbeddingUnit {
    fn name(&self) -> &str {
        "embedding"
    }

    fn buffer(&self) -> &Arc<UnitBuffer> {
        &self.buffer
    }

    fn backward_reads_weights(&self) -> bool {
        // Its gradient is a sum over tokens; only the norm's needs a weight.
        self.norm.is_some()
    }

    fn forward(&self, tape: &Tape, tokens: &Tensor, pass: &Pass) -> Result<Tensor> {
        let mut x = tape.apply1(tokens, Embedding(self.wte.clone()))?;
        if let Some(norm) = &self.norm {
            x = tape.apply1(&x, norm.clone())?;
        }
        x = tape.apply1(&x, AddPositions(self.wpe.clone()))?;
        match pass.dropout(self.dropout, 0) {
            Some(at) => tape.apply1(&x, Dropout(at)),
            None => Ok(x),
        }
    }
}
