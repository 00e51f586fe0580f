//! The tape: records ops and walks them backwards.
//!
//! candle's own `backward` differentiates the same `CustomOp`s to the same bits, which a test checks.
//! The trainer has its own walk because candle's zero-fills and then adds for every contribution, on one
//! thread (two extra passes over each activation gradient), and keeps every activation until the
//! end; the tape moves the first contribution, adds further ones in parallel, and frees an
//! activation as soon as its op is differentiated.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::{CustomOp1, CustomOp2, Result, Tensor, TensorId, bail};

use super::rows;

type Recompute = Box<dyn Fn(&Tape, &Tensor) -> Result<Tensor>>;

enum Node {
    Op1 {
        arg: Tensor,
        res: Tensor,
        op: Box<dyn CustomOp1>,
    },
    Op2 {
        args: (Tensor, Tensor),
        res: Tensor,
        op: Box<dyn CustomOp2>,
    },
    /// Only the input is kept; the backward pass runs the forward again.
    Recompute {
        arg: Tensor,
        res: TensorId,
        run: Recompute,
    },
}

/// A record of the ops that made a tensor.
pub struct Tape {
    nodes: RefCell<Vec<Node>>,
    recording: bool,
}

impl Tape {
    /// A tape that keeps what the backward pass needs.
    pub fn recording() -> Self {
        Self {
            nodes: RefCell::default(),
            recording: true,
        }
    }

    /// A tape that keeps nothing: evaluation and sampling.
    pub fn inference() -> Self {
        Self {
            nodes: RefCell::default(),
            recording: false,
        }
    }

    /// Whether a backward pass may follow.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// Applies `op` to `x`.
    pub fn apply1<C: CustomOp1 + 'static>(&self, x: &Tensor, op: C) -> Result<Tensor> {
        let res = x.apply_op1_no_bwd(&op)?;
        if self.recording {
            self.nodes.borrow_mut().push(Node::Op1 {
                arg: x.clone(),
                res: res.clone(),
                op: Box::new(op),
            });
        }
        Ok(res)
    }

    /// Applies `op` to `x` and `y`.
    pub fn apply2<C: CustomOp2 + 'static>(&self, x: &Tensor, y: &Tensor, op: C) -> Result<Tensor> {
        let res = x.apply_op2_no_bwd(y, &op)?;
        if self.recording {
            self.nodes.borrow_mut().push(Node::Op2 {
                args: (x.clone(), y.clone()),
                res: res.clone(),
                op: Box::new(op),
            });
        }
        Ok(res)
    }

    /// Runs `run(x)` keeping only `x`; the backward pass runs it again to get its activations.
    ///
    /// `run` must give the same result both times: ops are deterministic and dropout is a function
    /// of position.
    pub fn recompute(
        &self,
        x: &Tensor,
        run: impl Fn(&Tape, &Tensor) -> Result<Tensor> + 'static,
    ) -> Result<Tensor> {
        let res = run(&Tape::inference(), x)?;
        if self.recording {
            self.nodes.borrow_mut().push(Node::Recompute {
                arg: x.clone(),
                res: res.id(),
                run: Box::new(run),
            });
        }
        Ok(res)
    }

    /// Bytes of the results it keeps.
    pub fn result_bytes(&self) -> usize {
        let bytes = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        let node = |node: &Node| match node {
            Node::Op1 { res, .. } | Node::Op2 { res, .. } => bytes(res),
            // Its result is the next unit's input.
            Node::Recompute { .. } => 0,
        };
        self.nodes.borrow().iter().map(node).sum()
    }

    /// The gradient of `input`, given `grad`, that of `output`. Weight gradients are added to the
    /// units' flat gradients on the way. `None` when `input` does not reach `output` differentiably
    /// (token ids do not).
    ///
    /// # Errors
    /// When the tape did not record, or an op's backward fails.
    pub fn backward(self, output: &Tensor, grad: Tensor, input: &Tensor) -> Result<Option<Tensor>> {
        Ok(self.gradients(output, grad)?.remove(&input.id()))
    }

    /// The gradients of all inputs.
    pub(super) fn gradients(
        self,
        output: &Tensor,
        grad: Tensor,
    ) -> Result<HashMap<TensorId, Tensor>> {
        if !self.recording {
            bail!("backward on an inference tape");
        }
        let mut grads = HashMap::from([(output.id(), grad)]);
        let mut nodes = self.nodes.into_inner();
        // Popping frees the node's activations before the op in front of it is differentiated.
        while let Some(node) = nodes.pop() {
            match node {
                Node::Op1 { arg, res, op } => {
                    let Some(grad) = grads.remove(&res.id()) else {
                        continue;
                    };
                    if let Some(grad) = op.bwd(&arg, &res, &grad)? {
                        accumulate(&mut grads, &arg, grad)?;
                    }
                }
                Node::Op2 { args, res, op } => {
                    let Some(grad) = grads.remove(&res.id()) else {
                        continue;
                    };
                    let (grad0, grad1) = op.bwd(&args.0, &args.1, &res, &grad)?;
                    for (arg, grad) in [(&args.0, grad0), (&args.1, grad1)] {
                        if let Some(grad) = grad {
                            accumulate(&mut grads, arg, grad)?;
                        }
                    }
                }
                Node::Recompute { arg, res, run } => {
                    let Some(grad) = grads.remove(&res) else {
                        continue;
                    };
                    let tape = Tape::recording();
                    let again = run(&tape, &arg)?;
                    if let Some(grad) = tape.backward(&again, grad, &arg)? {
                        accumulate(&mut grads, &arg, grad)?;
                    }
                }
            }
        }
        Ok(grads)
    }
}

fn accumulate(grads: &mut HashMap<TensorId, Tensor>, arg: &Tensor, grad: Tensor) -> Result<()> {
    let total = match grads.remove(&arg.id()) {
        None => grad,
        Some(before) => grad.apply_op2_no_bwd(&before, &rows::Add)?,
    };
    grads.insert(arg.id(), total);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::naive::Check;
    use crate::ops::{BiasGelu, LayerNorm, Linear, LinearResidual};
    use candle_core::Var;

    fn values(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn the_walk_gives_the_bits_of_candles_own() {
        let check = Check::new(&[("norm", &[24]), ("w", &[24, 40]), ("v", &[40, 24])]);
        let linear = |name| Linear {
            weight: check.param(name),
            bias: None,
        };
        let norm = LayerNorm {
            weight: check.param("norm"),
            bias: None,
        };
        let x = check.input(0, &[9, 24]);
        let upstream = check.input(1, &[9, 24]);

        // The residual makes x reach the output on two paths.
        let tape = Tape::recording();
        let h = tape.apply1(&x, norm.clone()).unwrap();
        let h = tape.apply1(&h, linear("w")).unwrap();
        let h = tape.apply1(&h, BiasGelu(None)).unwrap();
        let y = tape.apply2(&h, &x, LinearResidual(linear("v"))).unwrap();
        let ours = tape.backward(&y, upstream.clone(), &x).unwrap().unwrap();
        let weight_grads = ["norm", "w", "v"].map(|name| check.param(name).grad().unwrap());

        let var = Var::from_tensor(&x).unwrap();
        let h = var.apply_op1(norm).unwrap();
        let h = h.apply_op1(linear("w")).unwrap();
        let h = h.apply_op1(BiasGelu(None)).unwrap();
        let z = h.apply_op2(&var, LinearResidual(linear("v"))).unwrap();
        assert_eq!(values(&y), values(&z));
        let loss = (z * upstream).unwrap().sum_all().unwrap();
        let grads = loss.backward().unwrap();
        assert_eq!(values(&ours), values(grads.get(&var).unwrap()));
        // The second walk added to the weights' gradients.
        for (name, before) in ["norm", "w", "v"].iter().zip(weight_grads) {
            let doubled: Vec<f32> = before.iter().map(|g| g + g).collect();
            for (a, b) in check.param(name).grad().unwrap().iter().zip(doubled) {
                assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{name}: {a} {b}");
            }
        }
    }
}
