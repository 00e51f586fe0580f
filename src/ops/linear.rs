//! Linear layers: `y = x W + b`, and the same added to a residual stream.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor};

use super::gemm::{Mat, MatMut, gemm};
use super::param::Param;
use super::rows;

/// `x W + b`: (.., I) to (.., O) with W (I, O) and b (O).
#[derive(Clone)]
pub struct Linear {
    /// W.
    pub weight: Param,
    /// b, if any.
    pub bias: Option<Param>,
}

/// `r + x W + b`: x (.., I) and r (.., O) to (.., O).
pub struct LinearResidual(pub Linear);

impl Linear {
    fn forward(&self, x: &[f32], residual: Option<&[f32]>) -> Result<Vec<f32>> {
        let (inputs, outputs) = (self.weight.height(), self.weight.width());
        let num_rows = x.len() / inputs;
        let mut out = rows::buffer(num_rows * outputs);
        let mut start = |bias: Option<&[f32]>| {
            rows::for_each(&mut out, outputs, |first, out| {
                for (i, out) in out.chunks_exact_mut(outputs).enumerate() {
                    let from = (first + i) * outputs;
                    match (residual.map(|r| &r[from..from + outputs]), bias) {
                        (Some(r), Some(b)) => {
                            for ((out, r), b) in out.iter_mut().zip(r).zip(b) {
                                *out = r + b;
                            }
                        }
                        (Some(one), None) | (None, Some(one)) => out.copy_from_slice(one),
                        (None, None) => {}
                    }
                }
            });
            Ok(())
        };
        match &self.bias {
            Some(bias) => bias.read(|bias| start(Some(bias)))?,
            None if residual.is_some() => start(None)?,
            None => {}
        }
        let add = self.bias.is_some() || residual.is_some();
        self.weight.read(|w| {
            gemm(
                MatMut::new(&mut out, num_rows, outputs, outputs),
                Mat::new(x, num_rows, inputs, inputs),
                Mat::new(w, inputs, outputs, outputs),
                add,
                rayon::current_num_threads(),
            );
            Ok(())
        })?;
        Ok(out)
    }

    /// The gradient of x; adds those of W and b.
    fn backward(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let (inputs, outputs) = (self.weight.height(), self.weight.width());
        let threads = rayon::current_num_threads();
        rows::with_values(grad, |g| {
            let num_rows = g.len() / outputs;
            let dy = Mat::new(g, num_rows, outputs, outputs);
            rows::with_values(x, |x| {
                let x = Mat::new(x, num_rows, inputs, inputs);
                self.weight.accumulate(|dw, fresh| {
                    gemm(
                        MatMut::new(dw, inputs, outputs, outputs),
                        x.t(),
                        dy,
                        !fresh,
                        threads,
                    );
                    Ok(())
                })
            })?;
            if let Some(bias) = &self.bias {
                let sums = rows::column_sums(g, outputs);
                bias.accumulate(|db, fresh| {
                    rows::store_sums(db, &sums, fresh);
                    Ok(())
                })?;
            }
            let mut dx = rows::buffer(num_rows * inputs);
            self.weight.read(|w| {
                let w = Mat::new(w, inputs, outputs, outputs);
                gemm(
                    MatMut::new(&mut dx, num_rows, inputs, inputs),
                    dy,
                    w.t(),
                    false,
                    threads,
                );
                Ok(())
            })?;
            Ok(rows::tensor(dx, x.shape()))
        })
    }

    fn output_shape(&self, input: &Layout) -> Shape {
        let mut dims = input.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = self.weight.width();
        }
        dims.into()
    }

    fn check(&self, input: &Layout) -> Result<()> {
        if input.dims().last() != Some(&self.weight.height()) {
            candle_core::bail!(
                "{} has {} inputs, the activations are {:?}",
                self.weight.spec().name,
                self.weight.height(),
                input.shape()
            );
        }
        Ok(())
    }
}

impl CustomOp1 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::values(storage, layout)?;
        self.check(layout)?;
        let out = self.forward(x, None)?;
        Ok((CpuStorage::F32(out), self.output_shape(layout)))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.backward(x, grad).map(Some)
    }
}

impl CustomOp2 for LinearResidual {
    fn name(&self) -> &'static str {
        "linear_residual"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, residual) = (rows::values(s1, l1)?, rows::values(s2, l2)?);
        self.0.check(l1)?;
        if residual.len() != x.len() / self.0.weight.height() * self.0.weight.width() {
            candle_core::bail!("linear_residual: {:?} and {:?}", l1.shape(), l2.shape());
        }
        let out = self.0.forward(x, Some(residual))?;
        Ok((CpuStorage::F32(out), l2.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        _residual: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(self.0.backward(x, grad)?), Some(grad.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::naive::{self, Check};

    #[test]
    fn matches_its_naive_twin() {
        for (num_rows, bias) in [(1, true), (7, false), (130, true)] {
            let check = Check::new(&[("w", &[24, 40]), ("b", &[40])]);
            let op = || Linear {
                weight: check.param("w"),
                bias: bias.then(|| check.param("b")),
            };
            let x = check.input(0, &[num_rows, 24]);
            let r = check.input(1, &[num_rows, 40]);
            let params: &[&str] = if bias { &["w", "b"] } else { &["w"] };
            check.agrees1(params, &x, op(), |p, x| {
                naive::linear(x, &p["w"], bias.then(|| &p["b"]))
            });
            check.agrees2(params, (&x, &r), LinearResidual(op()), |p, x, r| {
                naive::linear(x, &p["w"], bias.then(|| &p["b"]))? + r
            });
        }
    }
}
