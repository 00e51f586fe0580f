//! The model: embedding, blocks, head.

use std::sync::Arc;

use super::ModelConfig;
use super::block::Block;
use super::head::Head;
use super::stable_embedding::EmbeddingUnit;
use super::unit::Unit;
use crate::ops::Param;

/// GPT-2 as a list of units, in the order they run.
pub struct Gpt {
    units: Vec<Arc<dyn Unit>>,
    vocab_size: usize,
    seq_len: usize,
}

impl Gpt {
    /// A model with zero weights over `vocab_size` tokens.
    pub fn new(config: &ModelConfig, vocab_size: usize) -> Self {
        let embedding = EmbeddingUnit::new(config, vocab_size);
        let tied = config
            .is_tied()
            .then_some((embedding.buffer(), &embedding.wte));
        let head = Head::new(config, vocab_size, tied);
        let mut units: Vec<Arc<dyn Unit>> = vec![Arc::new(embedding)];
        for layer in 0..config.num_layers {
            units.push(Arc::new(Block::new(config, layer)));
        }
        units.push(Arc::new(head));
        Self {
            units,
            vocab_size,
            seq_len: config.seq_len,
        }
    }

    /// The units, in order.
    pub fn units(&self) -> &[Arc<dyn Unit>] {
        &self.units
    }

    /// Rows of the embedding.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Longest sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// All parameters, in unit order.
    pub fn params(&self) -> Vec<Param> {
        self.units
            .iter()
            .flat_map(|unit| unit.buffer().params())
            .collect()
    }

    /// Number of parameters.
    pub fn num_params(&self) -> usize {
        self.units
            .iter()
            .map(|unit| unit.buffer().layout().num_params())
            .sum()
    }
}
