//! Floating-point operations of a training step.
//!
//! The formula is that of Narayanan et al. 2021, "Efficient Large-Scale Language Model Training
//! on GPU Clusters Using Megatron-LM" (section 5.1 and appendix). Others differ by more than 30% on
//! the same run, so every number is logged with [`FORMULA`].

use crate::model::ModelConfig;

/// Name of the formula, as logs carry it.
pub const FORMULA: &str = "megatron";

/// The shapes that matrix multiplications depend on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// B: sequences a step.
    pub num_sequences: usize,
    /// s: tokens a sequence.
    pub seq_len: usize,
    /// L: blocks.
    pub num_layers: usize,
    /// h: width of the residual stream.
    pub d_model: usize,
    /// V: rows of the embedding.
    pub vocab_size: usize,
}

impl Shape {
    /// The shape of `num_sequences` sequences through `model` with a vocabulary of `vocab_size`.
    pub fn new(model: &ModelConfig, vocab_size: usize, num_sequences: usize) -> Self {
        Self {
            num_sequences,
            seq_len: model.seq_len,
            num_layers: model.num_layers,
            d_model: model.d_model,
            vocab_size,
        }
    }

    /// What the model needs, whatever is computed twice:
    /// 72 B s L h^2 (1 + s/(6h) + V/(12 L h)).
    ///
    /// That is 3 passes (forward, and backward twice) of 2 operations for each multiply-add:
    /// 12 h^2 weights a block, 2 s h for attention (not halved for the causal mask), V h for the head.
    pub fn model_flops(&self) -> f64 {
        let [b, s, l, h, v] = [
            self.num_sequences,
            self.seq_len,
            self.num_layers,
            self.d_model,
            self.vocab_size,
        ]
        .map(|n| n as f64);
        72.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h))
    }
}

/// Tera-operations a second.
pub fn tflops(flops: f64, seconds: f64) -> f64 {
    flops / seconds / 1e12
}

/// Model FLOPs utilisation: the share of the device's peak, where the peak is known.
pub fn mfu(model_tflops: f64, peak_tflops: Option<f64>) -> Option<f64> {
    peak_tflops.map(|peak| model_tflops / peak)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The naive count: matrix by matrix.
    fn count(shape: &Shape) -> f64 {
        let [b, s, l, h, v] = [
            shape.num_sequences,
            shape.seq_len,
            shape.num_layers,
            shape.d_model,
            shape.vocab_size,
        ]
        .map(|n| n as u64);
        let linear = 2 * b * s * (h * 3 * h + h * h + h * 4 * h + 4 * h * h);
        let attention = 2 * 2 * b * s * s * h;
        let head = 2 * b * s * h * v;
        (3 * (l * (linear + attention) + head)) as f64
    }

    #[test]
    fn the_formula_equals_the_count_matrix_by_matrix() {
        let shapes = [
            (8, 256, 4, 256, 4096),
            (4, 256, 12, 768, 50257),
            (1, 7, 3, 10, 11),
        ];
        for (num_sequences, seq_len, num_layers, d_model, vocab_size) in shapes {
            let shape = Shape {
                num_sequences,
                seq_len,
                num_layers,
                d_model,
                vocab_size,
            };
            let relative = |a: f64, b: f64| (a / b - 1.0).abs();
            assert!(relative(shape.model_flops(), count(&shape)) < 1e-12);
        }
    }

    #[test]
    fn utilisation_needs_a_peak() {
        assert_eq!(tflops(3e12, 2.0), 1.5);
        assert_eq!(mfu(1.5, Some(6.0)), Some(0.25));
        assert_eq!(mfu(1.5, None), None);
    }
}
