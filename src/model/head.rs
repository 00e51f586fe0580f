//! The head: final layer norm, projection to the vocabulary, loss.

use std::sync::Arc;

use candle_core::{D, Result, Tensor};

use super::ModelConfig;
use super::unit::{Declare, Pass, Unit, find, find_layer_norm};
use crate::ops::{CrossEntropy, LayerNorm, Logits, Param, Tape, UnitBuffer, UnitLayout};

/// `loss(ln(x) W^T)`, where W is its own or the embedding's table.
pub struct Head {
    buffer: Arc<UnitBuffer>,
    borrowed: Option<Arc<UnitBuffer>>,
    ln_f: LayerNorm,
    /// (V, D).
    table: Param,
}

impl Head {
    /// A head with its own table, or with `tied`, the embedding unit's buffer and table.
    pub fn new(
        config: &ModelConfig,
        vocab_size: usize,
        tied: Option<(&Arc<UnitBuffer>, &Param)>,
    ) -> Self {
        let mut declare = Declare::new(config, "");
        declare.layer_norm("ln_f", config.bias);
        if tied.is_none() {
            declare.matrix("lm_head.weight", [vocab_size, config.d_model], 1.0);
        }
        let buffer = UnitBuffer::new(UnitLayout::new(declare.specs));
        Self {
            ln_f: find_layer_norm(&buffer, "ln_f"),
            table: match tied {
                Some((_, table)) => table.clone(),
                None => find(&buffer, "lm_head.weight"),
            },
            borrowed: tied.map(|(buffer, _)| buffer.clone()),
            buffer,
        }
    }
}

impl Unit for Head {
    fn name(&self) -> &str {
        "head"
    }

    fn buffer(&self) -> &Arc<UnitBuffer> {
        &self.buffer
    }

    fn borrowed(&self) -> Option<&Arc<UnitBuffer>> {
        self.borrowed.as_ref()
    }

    fn forward(&self, tape: &Tape, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        let Some(targets) = &pass.targets else {
            let last = x
                .narrow(D::Minus2, x.dim(D::Minus2)? - 1, 1)?
                .squeeze(D::Minus2)?;
            let h = tape.apply1(&last.contiguous()?, self.ln_f.clone())?;
            return tape.apply1(&h, Logits(self.table.clone()));
        };
        let h = tape.apply1(x, self.ln_f.clone())?;
        let loss = CrossEntropy::new(
            self.table.clone(),
            targets.clone(),
            pass.loss_scale,
            tape.is_recording(),
        );
        tape.apply1(&h, loss)
    }
}
