//! Bias and GELU in one pass.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::param::Param;
use super::rows;
use crate::simd::body::{Arithmetic, exp};
use crate::simd_kernel;

/// `gelu(x + b)` with the tanh approximation: (.., D) to (.., D) with b (D) or none.
///
/// gelu(h) = h sigmoid(2u), u = sqrt(2/pi) (h + 0.044715 h^3): the same function as with tanh, and
/// one exponential.
pub struct BiasGelu(pub Option<Param>);

const TWO_SQRT_2_OVER_PI: f32 = 1.595_769_2;
const CUBIC: f32 = 0.044_715;

#[inline(always)]
fn sigmoid_2u<I: Arithmetic>(h: f32) -> f32 {
    let u2 = TWO_SQRT_2_OVER_PI * h * I::fma(CUBIC * h, h, 1.0);
    1.0 / (1.0 + exp::<I>(-u2))
}

#[inline(always)]
fn forward_rows<I: Arithmetic>(x: &[f32], b: &[f32], out: &mut [f32]) {
    let n = b.len();
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        for i in 0..n {
            let h = x[i] + b[i];
            out[i] = h * sigmoid_2u::<I>(h);
        }
    }
}

/// Writes dx and adds the sum over rows of dx to `db`.
#[inline(always)]
fn backward_rows<I: Arithmetic>(x: &[f32], b: &[f32], dy: &[f32], dx: &mut [f32], db: &mut [f32]) {
    let n = b.len();
    let db = &mut db[..n];
    for ((x, dy), dx) in x
        .chunks_exact(n)
        .zip(dy.chunks_exact(n))
        .zip(dx.chunks_exact_mut(n))
    {
        for i in 0..n {
            let h = x[i] + b[i];
            let s = sigmoid_2u::<I>(h);
            let du2 = TWO_SQRT_2_OVER_PI * I::fma(3.0 * CUBIC * h, h, 1.0);
            let d = dy[i] * I::fma(h * s * (1.0 - s), du2, s);
            dx[i] = d;
            db[i] += d;
        }
    }
}

simd_kernel! { fn forward(x: &[f32], b: &[f32], out: &mut [f32]) = forward_rows }
simd_kernel! { fn backward(x: &[f32], b: &[f32], dy: &[f32], dx: &mut [f32], db: &mut [f32]) = backward_rows }

impl BiasGelu {
    fn with_bias<R>(&self, width: usize, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
        match &self.0 {
            Some(bias) => bias.read(f),
            None => f(&vec![0.0; width]),
        }
    }
}

impl CustomOp1 for BiasGelu {
    fn name(&self) -> &'static str {
        "bias_gelu"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::values(storage, layout)?;
        let width = *layout.dims().last().unwrap_or(&1);
        let mut out = rows::buffer(x.len());
        self.with_bias(width, |b| {
            if b.len() != width {
                candle_core::bail!("bias_gelu of width {}: {:?}", b.len(), layout.shape());
            }
            rows::for_each(&mut out, width, |first, out| {
                let start = first * width;
                forward(&x[start..start + out.len()], b, out)
            });
            Ok(())
        })?;
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let width = x.dim(candle_core::D::Minus1)?;
        let mut dx = rows::buffer(x.elem_count());
        let sums = rows::with_values(x, |x| {
            rows::with_values(grad, |dy| {
                self.with_bias(width, |b| {
                    Ok(rows::for_each_summing(
                        &mut dx,
                        width,
                        width,
                        |first, dx, db| {
                            let range = first * width..first * width + dx.len();
                            backward(&x[range.clone()], b, &dy[range], dx, db)
                        },
                    ))
                })
            })
        })?;
        if let Some(bias) = &self.0 {
            bias.accumulate(|grad, fresh| {
                rows::store_sums(grad, &sums, fresh);
                Ok(())
            })?;
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
        for (width, num_rows) in [(16, 1), (33, 70), (256, 130)] {
            let check = Check::new(&[("b", &[width])]);
            let x = check.input(0, &[num_rows, width]);
            check.agrees1(&["b"], &x, BiasGelu(Some(check.param("b"))), |p, x| {
                naive::gelu(&x.broadcast_add(&p["b"])?)
            });
            check.agrees1(&[], &x, BiasGelu(None), |_, x| naive::gelu(x));
        }
    }

    #[test]
    fn stays_finite_far_from_zero() {
        for isa in crate::simd::Isa::supported() {
            let x = [-1e4, -40.0, 40.0, 1e4];
            let (mut out, mut dx, mut db) = ([0.0; 4], [0.0; 4], [0.0; 4]);
            forward::on(isa, &x, &[0.0; 4], &mut out);
            backward::on(isa, &x, &[0.0; 4], &[1.0; 4], &mut dx, &mut db);
            for (got, want) in out
                .iter()
                .chain(&dx)
                .zip([0.0, 0.0, 40.0, 1e4, 0.0, 0.0, 1.0, 1.0])
            {
                assert!(
                    (got - want).abs() < 1e-20,
                    "{isa:?}: {got}, expected {want}"
                );
            }
        }
    }
}
