//! A pre-norm transformer block.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::ModelConfig;
use super::unit::{Declare, Pass, Unit, add_to_residual, find_layer_norm, find_linear};
use crate::ops::{
    BiasGelu, CausalAttention, LayerNorm, Linear, Param, Tape, UnitBuffer, UnitLayout,
};

/// `x + proj(attention(ln(x)))`, then `x + proj(gelu(fc(ln(x))))`.
pub struct Block {
    name: String,
    buffer: Arc<UnitBuffer>,
    num_heads: usize,
    dropout: f32,
    /// Number of the block's first dropout; it has three.
    first_site: u64,
    ln_1: LayerNorm,
    attn: Linear,
    attn_proj: Linear,
    ln_2: LayerNorm,
    /// Without its bias, which GELU adds.
    fc: Linear,
    fc_bias: Option<Param>,
    mlp_proj: Linear,
}

impl Block {
    /// Block number `layer`.
    pub fn new(config: &ModelConfig, layer: usize) -> Self {
        let d = config.d_model;
        let depth_scale = 1.0 / (2.0 * config.num_layers as f32).sqrt();
        let prefix = format!("h.{layer}.");
        let mut declare = Declare::new(config, &prefix);
        declare.layer_norm("ln_1", config.bias);
        declare.linear("attn.c_attn", [d, 3 * d], 1.0);
        declare.linear("attn.c_proj", [d, d], depth_scale);
        declare.layer_norm("ln_2", config.bias);
        declare.linear("mlp.c_fc", [d, 4 * d], 1.0);
        declare.linear("mlp.c_proj", [4 * d, d], depth_scale);
        let buffer = UnitBuffer::new(UnitLayout::new(declare.specs));
        let linear = |name: &str| find_linear(&buffer, &format!("{prefix}{name}"));
        let norm = |name: &str| find_layer_norm(&buffer, &format!("{prefix}{name}"));
        let fc = linear("mlp.c_fc");
        Self {
            name: format!("block {layer}"),
            num_heads: config.num_heads,
            dropout: config.dropout,
            first_site: 1 + 3 * layer as u64,
            ln_1: norm("ln_1"),
            attn: linear("attn.c_attn"),
            attn_proj: linear("attn.c_proj"),
            ln_2: norm("ln_2"),
            fc_bias: fc.bias,
            fc: Linear {
                weight: fc.weight,
                bias: None,
            },
            mlp_proj: linear("mlp.c_proj"),
            buffer,
        }
    }
}

impl Unit for Block {
    fn name(&self) -> &str {
        &self.name
    }

    fn buffer(&self) -> &Arc<UnitBuffer> {
        &self.buffer
    }

    fn can_recompute(&self) -> bool {
        true
    }

    fn forward(&self, tape: &Tape, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        let dropout = |i: u64| pass.dropout(self.dropout, self.first_site + i);
        let h = tape.apply1(x, self.ln_1.clone())?;
        let qkv = tape.apply1(&h, self.attn.clone())?;
        let h = tape.apply1(&qkv, CausalAttention::new(self.num_heads, dropout(0)))?;
        let x = add_to_residual(tape, &h, x, &self.attn_proj, dropout(1))?;
        let h = tape.apply1(&x, self.ln_2.clone())?;
        let h = tape.apply1(&h, self.fc.clone())?;
        let h = tape.apply1(&h, BiasGelu(self.fc_bias.clone()))?;
        add_to_residual(tape, &h, &x, &self.mlp_proj, dropout(2))
    }
}
