//! Layer norm over the last dimension.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::param::Param;
use super::rows;
use crate::simd::body::{Arithmetic, LANES, sum_lanes};
use crate::simd_kernel;

/// Added to the variance, as GPT-2 does.
const EPS: f32 = 1e-5;

/// `(x - mean) / sqrt(var + eps) * w + b`: (.., D) to (.., D) with w (D) and b (D) or none.
#[derive(Clone)]
pub struct LayerNorm {
    /// w.
    pub weight: Param,
    /// b, if any.
    pub bias: Option<Param>,
}

#[inline(always)]
fn sum_by(width: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = width / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(start + lane);
        }
    }
    for i in whole..width {
        lanes[i - whole] += f(i);
    }
    sum_lanes(lanes)
}

/// Mean and reciprocal standard deviation of a row.
#[inline(always)]
fn moments(x: &[f32]) -> (f32, f32) {
    let n = x.len();
    let mean = sum_by(n, |i| x[i]) / n as f32;
    let var = sum_by(n, |i| (x[i] - mean) * (x[i] - mean)) / n as f32;
    (mean, 1.0 / (var + EPS).sqrt())
}

#[inline(always)]
fn forward_rows<I: Arithmetic>(x: &[f32], w: &[f32], b: Option<&[f32]>, out: &mut [f32]) {
    let n = w.len();
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        let (mean, rstd) = moments(x);
        match b {
            Some(b) => {
                for i in 0..n {
                    out[i] = I::fma((x[i] - mean) * rstd, w[i], b[i]);
                }
            }
            None => {
                for i in 0..n {
                    out[i] = (x[i] - mean) * rstd * w[i];
                }
            }
        }
    }
}

/// Writes dx and adds to `sums`: dw (D), then db (D).
#[inline(always)]
fn backward_rows<I: Arithmetic>(
    x: &[f32],
    w: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    sums: &mut [f32],
) {
    let n = w.len();
    let (dw, db) = sums.split_at_mut(n);
    let db = &mut db[..n];
    for ((x, dy), dx) in x
        .chunks_exact(n)
        .zip(dy.chunks_exact(n))
        .zip(dx.chunks_exact_mut(n))
    {
        let (mean, rstd) = moments(x);
        let mean_g = sum_by(n, |i| dy[i] * w[i]) / n as f32;
        let mean_gx = sum_by(n, |i| dy[i] * w[i] * ((x[i] - mean) * rstd)) / n as f32;
        for i in 0..n {
            let xhat = (x[i] - mean) * rstd;
            dw[i] = I::fma(dy[i], xhat, dw[i]);
            db[i] += dy[i];
            dx[i] = rstd * I::fma(-xhat, mean_gx, dy[i] * w[i] - mean_g);
        }
    }
}

simd_kernel! { fn forward(x: &[f32], w: &[f32], b: Option<&[f32]>, out: &mut [f32]) = forward_rows }
simd_kernel! { fn backward(x: &[f32], w: &[f32], dy: &[f32], dx: &mut [f32], sums: &mut [f32]) = backward_rows }

impl CustomOp1 for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::values(storage, layout)?;
        let width = self.weight.width();
        if layout.dims().last() != Some(&width) {
            candle_core::bail!("layer_norm of width {width}: {:?}", layout.shape());
        }
        let mut out = rows::buffer(x.len());
        self.weight.read(|w| {
            let mut run = |b: Option<&[f32]>| {
                rows::for_each(&mut out, width, |first, out| {
                    let start = first * width;
                    forward(&x[start..start + out.len()], w, b, out)
                });
                Ok(())
            };
            match &self.bias {
                Some(bias) => bias.read(|b| run(Some(b))),
                None => run(None),
            }
        })?;
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let width = self.weight.width();
        let mut dx = rows::buffer(x.elem_count());
        let sums = rows::with_values(x, |x| {
            rows::with_values(grad, |dy| {
                self.weight.read(|w| {
                    let sums =
                        rows::for_each_summing(&mut dx, width, 2 * width, |first, dx, sums| {
                            let range = first * width..first * width + dx.len();
                            backward(&x[range.clone()], w, &dy[range], dx, sums)
                        });
                    Ok(sums)
                })
            })
        })?;
        for (param, sums) in [Some(&self.weight), self.bias.as_ref()]
            .into_iter()
            .zip(sums.chunks(width))
        {
            if let Some(param) = param {
                param.accumulate(|grad, fresh| {
                    rows::store_sums(grad, sums, fresh);
                    Ok(())
                })?;
            }
        }
        Ok(Some(rows::tensor(dx, x.shape())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::naive::{self, Check};

    #[test]
    fn matches_its_naive_twin() {
        for (width, num_rows) in [(32, 1), (67, 5), (256, 150)] {
            let check = Check::new(&[("w", &[width]), ("b", &[width])]);
            let x = check.input(0, &[num_rows, width]);
            let op = |bias: bool| LayerNorm {
                weight: check.param("w"),
                bias: bias.then(|| check.param("b")),
            };
            check.agrees1(&["w", "b"], &x, op(true), |p, x| {
                naive::layer_norm(x, &p["w"], Some(&p["b"]))
            });
            check.agrees1(&["w"], &x, op(false), |p, x| {
                naive::layer_norm(x, &p["w"], None)
            });
        }
    }

    #[test]
    fn every_set_agrees_with_the_portable_one() {
        let value = |i: usize| ((i * 29 % 31) as f32 - 15.0) / 7.0;
        let (w, x): (Vec<_>, Vec<_>) = (
            (0..53).map(value).collect(),
            (0..106).map(|i| value(i + 3)).collect(),
        );
        let run = |isa| {
            let (mut out, mut dx, mut sums) = (vec![0.0; 106], vec![0.0; 106], vec![0.0; 106]);
            forward::on(isa, &x, &w, Some(&w), &mut out);
            backward::on(isa, &x, &w, &out, &mut dx, &mut sums);
            [out, dx, sums].concat()
        };
        let portable = run(crate::simd::Isa::Portable);
        for isa in crate::simd::Isa::supported() {
            for (a, b) in run(isa).iter().zip(&portable) {
                assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{isa:?}: {a} {b}");
            }
        }
    }
}
