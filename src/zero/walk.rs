//! The way of some sequences through the model: forward unit by unit, then backward.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::Result;
use crate::model::{Pass, Unit};
use crate::ops::Tape;

/// Some sequences on their way through the units.
pub struct Walk {
    pass: Pass,
    /// What the next unit takes: tokens, activations, at last the loss or logits.
    x: Tensor,
    /// One a unit: between units the engine holds plain tensors, where it can gather, reduce and
    /// release.
    tapes: Vec<(Tape, Tensor, Tensor)>,
    /// Gradient of the next unit's output on the way back.
    grad: Option<Tensor>,
}

impl Walk {
    /// Starts with `tokens`, sequences of `seq_len`.
    ///
    /// # Errors
    /// When the tokens are no whole sequences.
    pub fn new(tokens: Vec<u32>, seq_len: usize, pass: Pass) -> Result<Self> {
        Ok(Self {
            pass,
            x: Tensor::from_vec(tokens, ((), seq_len), &Device::Cpu)?,
            tapes: Vec::new(),
            grad: None,
        })
    }

    /// Through `unit`, keeping what its backward needs: its activations, or with `recompute` only
    /// its input.
    ///
    /// # Errors
    /// As [`Unit::forward`].
    pub fn forward(&mut self, unit: &Arc<dyn Unit>, recompute: bool) -> Result<()> {
        let tape = Tape::recording();
        let y = if recompute && unit.can_recompute() {
            let (unit, pass) = (unit.clone(), self.pass.clone());
            tape.recompute(&self.x, move |tape, x| unit.forward(tape, x, &pass))?
        } else {
            unit.forward(&tape, &self.x, &self.pass)?
        };
        let x = std::mem::replace(&mut self.x, y.clone());
        self.tapes.push((tape, x, y));
        Ok(())
    }

    /// Through `unit`, keeping nothing.
    ///
    /// # Errors
    /// As [`Unit::forward`].
    pub fn infer(&mut self, unit: &Arc<dyn Unit>) -> Result<()> {
        self.x = unit.forward(&Tape::inference(), &self.x, &self.pass)?;
        Ok(())
    }

    /// The loss, once all units ran.
    ///
    /// # Errors
    /// When the head gave logits.
    pub fn loss(&self) -> Result<f32> {
        Ok(self.x.to_scalar::<f32>()?)
    }

    /// What the last unit gave.
    pub fn output(&self) -> &Tensor {
        &self.x
    }

    /// Bytes of the activations kept for the backward pass.
    pub fn activation_bytes(&self) -> usize {
        let tensor_bytes = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        self.tapes
            .iter()
            .map(|(tape, input, _)| tensor_bytes(input) + tape.result_bytes())
            .sum()
    }

    /// Back through the last unit that ran forward and has not run backward.
    ///
    /// # Errors
    /// When an op's backward fails.
    pub fn backward(&mut self) -> Result<()> {
        let Some((tape, input, output)) = self.tapes.pop() else {
            return Ok(());
        };
        let grad = match self.grad.take() {
            Some(grad) => grad,
            // The way back starts at the loss.
            None => output.ones_like()?,
        };
        self.grad = tape.backward(&output, grad, &input)?;
        Ok(())
    }
}
