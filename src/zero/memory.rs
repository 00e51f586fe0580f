//! What a rank holds, by kind.

use serde::Serialize;

/// Bytes a rank holds. Model states between steps; the rest at most so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// f32 master weights of the rank's shards.
    pub master_bytes: usize,
    /// Optimizer state of the rank's shards.
    pub optimizer_state_bytes: usize,
    /// f32 gradients of the rank's shards.
    pub gradient_bytes: usize,
    /// Gradients of whole units, between their backward pass and their reduction.
    pub peak_unit_gradient_bytes: usize,
    /// Gathered weights, in use or on their way.
    pub peak_gathered_bytes: usize,
    /// Activations that the backward pass was waiting for.
    pub peak_activation_bytes: usize,
}
