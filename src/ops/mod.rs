//! Differentiable fused ops, one a file, each with a naive twin.
//!
//! An op is a candle `CustomOp` on activations: forward, and `bwd` that returns the gradient of its
//! input. Weights are not graph inputs: an op refers to them through the unit's flat buffer
//! ([`Param`]) and adds their gradient straight into the unit's flat gradient, so candle never
//! holds a weight gradient and a unit's weights can be released between the passes.
//!
//! [`Tape`] records and differentiates; `naive` has the same functions in plain candle ops and is the
//! oracle of the tests.

mod attention;
mod bias_gelu;
mod cross_entropy;
mod dropout;
mod embedding;
mod gemm;
mod layer_norm;
mod linear;
#[cfg(test)]
mod naive;
mod param;
mod rows;
mod tape;

pub use attention::CausalAttention;
pub use bias_gelu::BiasGelu;
pub use cross_entropy::{CrossEntropy, Logits};
pub use dropout::{Dropout, DropoutAt};
pub use embedding::{AddPositions, Embedding};
pub use gemm::{Mat, MatMut, gemm};
pub use layer_norm::LayerNorm;
pub use linear::{Linear, LinearResidual};
pub use param::{ALIGN, PLAIN_BELOW, Param, ParamInit, ParamSpec, UnitBuffer, UnitLayout};
pub use rows::Add;
pub use tape::Tape;
