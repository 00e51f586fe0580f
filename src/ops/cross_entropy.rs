//! The language-model head: projection to the vocabulary, softmax and cross-entropy in one op.

use std::sync::{Arc, Mutex};

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::gemm::{Mat, MatMut, gemm};
use super::param::Param;
use super::rows;
use crate::simd::body::{Arithmetic, LANES, exp, sum_lanes};
use crate::simd_kernel;

/// About how many logits exist at a time, 64 MiB; at least 128 positions' worth.
const MAX_LOGITS: usize = 16 << 20;

/// `scale * sum over positions of -log softmax(x W^T)[target]`: x (.., D) with W (V, D) to a scalar.
///
/// The logits exist for a chunk of positions at a time. A training forward turns each chunk into its
/// gradient on the spot (nothing but a sum follows a loss, so its upstream gradient is 1): dx is kept
/// for the backward pass and W's gradient is added at once, which saves a product over recomputing.
pub struct CrossEntropy {
    weight: Param,
    targets: Arc<Vec<u32>>,
    scale: f32,
    /// dx, from a training forward.
    dx: Option<Mutex<Vec<f32>>>,
}

impl CrossEntropy {
    /// A loss over `targets`, one a position. With `training` a backward pass must follow.
    pub fn new(weight: Param, targets: Arc<Vec<u32>>, scale: f32, training: bool) -> Self {
        Self {
            weight,
            targets,
            scale,
            dx: training.then(Mutex::default),
        }
    }

    /// Rows of x in a chunk: many enough that W's gradient is not memory-bound.
    fn chunk_rows(&self) -> usize {
        (MAX_LOGITS / self.weight.height()).clamp(128, 1024)
    }
}

/// Negative log-likelihood of a row of logits, which become `scale (softmax - onehot)`.
#[inline(always)]
fn row_body<I: Arithmetic>(logits: &mut [f32], target: usize, scale: f32, gradient: bool) -> f32 {
    let at_target = logits[target];
    let whole = logits.len() / LANES * LANES;
    let mut max = [f32::NEG_INFINITY; LANES];
    for chunk in logits[..whole].chunks_exact(LANES) {
        for i in 0..LANES {
            max[i] = if chunk[i] > max[i] { chunk[i] } else { max[i] };
        }
    }
    for (max, &l) in max.iter_mut().zip(&logits[whole..]) {
        *max = if l > *max { l } else { *max };
    }
    let max = max.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = [0.0f32; LANES];
    let (body, rest) = logits.split_at_mut(whole);
    for chunk in body.chunks_exact_mut(LANES) {
        for i in 0..LANES {
            chunk[i] = exp::<I>(chunk[i] - max);
            sum[i] += chunk[i];
        }
    }
    for (sum, l) in sum.iter_mut().zip(rest) {
        *l = exp::<I>(*l - max);
        *sum += *l;
    }
    let sum = sum_lanes(sum);
    if gradient {
        let factor = scale / sum;
        for l in logits.iter_mut() {
            *l *= factor;
        }
        logits[target] -= scale;
    }
    max + sum.ln() - at_target
}

simd_kernel! { fn cross_entropy_row(logits: &mut [f32], target: usize, scale: f32, gradient: bool) -> f32 = row_body }

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::values(storage, layout)?;
        let (vocab, width) = (self.weight.height(), self.weight.width());
        if x.len() != self.targets.len() * width {
            bail!(
                "cross_entropy: {:?} for {} targets",
                layout.shape(),
                self.targets.len()
            );
        }
        if let Some(token) = self.targets.iter().find(|&&t| t as usize >= vocab) {
            bail!("target {token} is past the vocabulary of {vocab}");
        }
        let threads = rayon::current_num_threads();
        let chunk = self.chunk_rows();
        let training = self.dx.is_some();
        let mut logits = rows::buffer(chunk.min(self.targets.len()) * vocab);
        let mut dx = rows::buffer(if training { x.len() } else { 0 });
        let mut loss = 0.0f64;
        for (i, targets) in self.targets.chunks(chunk).enumerate() {
            let num_rows = targets.len();
            let range = i * chunk * width..(i * chunk + num_rows) * width;
            let x = Mat::new(&x[range.clone()], num_rows, width, width);
            let logits = &mut logits[..num_rows * vocab];
            self.weight.read(|w| {
                let w = Mat::new(w, vocab, width, width);
                gemm(
                    MatMut::new(logits, num_rows, vocab, vocab),
                    x,
                    w.t(),
                    false,
                    threads,
                );
                // Summed in row order, in f64: the loss does not depend on the number of threads.
                let nll: Vec<f32> = logits
                    .par_chunks_mut(vocab)
                    .zip(targets)
                    .with_min_len(8)
                    .map(|(logits, &t)| cross_entropy_row(logits, t as usize, self.scale, training))
                    .collect();
                loss += nll.iter().map(|&l| l as f64).sum::<f64>();
                if training {
                    let dlogits = Mat::new(logits, num_rows, vocab, vocab);
                    let dx = MatMut::new(&mut dx[range], num_rows, width, width);
                    gemm(dx, dlogits, w, false, threads);
                }
                Ok(())
            })?;
            if training {
                let dlogits = Mat::new(logits, num_rows, vocab, vocab);
                self.weight.accumulate(|dw, fresh| {
                    gemm(
                        MatMut::new(dw, vocab, width, width),
                        dlogits.t(),
                        x,
                        !fresh,
                        threads,
                    );
                    Ok(())
                })?;
            }
        }
        if let Some(slot) = &self.dx {
            *slot.lock().expect("no holder panicked") = dx;
        }
        let loss = (loss * self.scale as f64) as f32;
        Ok((CpuStorage::F32(vec![loss]), ().into()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if grad.to_scalar::<f32>()? != 1.0 {
            bail!("cross_entropy ends a graph: its upstream gradient is 1, not {grad}");
        }
        let Some(dx) = &self.dx else {
            bail!("cross_entropy was not asked for a gradient");
        };
        let dx = std::mem::take(&mut *dx.lock().expect("no holder panicked"));
        Ok(Some(rows::tensor(dx, x.shape())))
    }
}

/// `x W^T`: (N, D) with W (V, D) to (N, V), for sampling; it has no backward.
pub struct Logits(pub Param);

impl CustomOp1 for Logits {
    fn name(&self) -> &'static str {
        "logits"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::values(storage, layout)?;
        let (vocab, width) = (self.0.height(), self.0.width());
        if layout.dims().last() != Some(&width) {
            bail!("logits of width {width}: {:?}", layout.shape());
        }
        let num_rows = x.len() / width;
        let mut out = rows::buffer(num_rows * vocab);
        self.0.read(|w| {
            gemm(
                MatMut::new(&mut out, num_rows, vocab, vocab),
                Mat::new(x, num_rows, width, width),
                Mat::new(w, vocab, width, width).t(),
                false,
                rayon::current_num_threads(),
            );
            Ok(())
        })?;
        Ok((CpuStorage::F32(out), (num_rows, vocab).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::naive::{self, Check};

    #[test]
    fn matches_its_naive_twin() {
        // 150,000 x 260 takes three chunks.
        for (vocab, num_rows) in [(17, 1), (97, 30), (150_000, 260)] {
            let check = Check::new(&[("w", &[vocab, 8])]);
            let x = check.input(0, &[num_rows, 8]);
            let targets: Vec<u32> = (0..num_rows).map(|i| (i * 31 % vocab) as u32).collect();
            let op = || CrossEntropy::new(check.param("w"), Arc::new(targets.clone()), 0.37, true);
            check.agrees1(&["w"], &x, op(), |p, x| {
                naive::cross_entropy(&x.matmul(&p["w"].t()?)?, &targets)? * 0.37
            });
        }
    }

    #[test]
    fn evaluation_gives_the_same_loss_and_touches_no_gradient() {
        let check = Check::new(&[("w", &[97, 8])]);
        let x = check.input(0, &[5, 8]);
        let loss = |training| {
            let op = CrossEntropy::new(
                check.param("w"),
                Arc::new(vec![1, 2, 3, 4, 96]),
                1.0,
                training,
            );
            x.apply_op1_no_bwd(&op).unwrap().to_scalar::<f32>().unwrap()
        };
        let eval = loss(false);
        assert_eq!(check.untouched(), ["w"]);
        assert_eq!(eval, loss(true));
    }

    #[test]
    fn every_set_agrees_with_the_portable_one() {
        let logits: Vec<f32> = (0..83).map(|i| (i * 29 % 31) as f32 - 15.0).collect();
        let run = |isa| {
            let mut row = logits.clone();
            let loss = cross_entropy_row::on(isa, &mut row, 50, 0.5, true);
            row.push(loss);
            row
        };
        let portable = run(crate::simd::Isa::Portable);
        for isa in crate::simd::Isa::supported() {
            for (a, b) in run(isa).iter().zip(&portable) {
                assert!((a - b).abs() < 1e-6 * (1.0 + b.abs()), "{isa:?}: {a} {b}");
            }
        }
    }
}
