//! Causal self-attention in stripes of queries: no S x S matrix is ever stored.

use std::sync::Mutex;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::dropout::{DropoutAt, Mask};
use super::gemm::{Mat, MatMut, gemm};
use super::rows;
use crate::simd::body::{Arithmetic, LANES, exp, sum_lanes};
use crate::simd_kernel;

/// Queries in a stripe: their scores against all earlier keys stay in cache.
const STRIPE: usize = 64;

/// `softmax(q k^T / sqrt(D/H)) v` over earlier positions: q, k, v packed (B, S, 3D) to (B, S, D).
///
/// A stripe of queries sees all its keys at once, so the softmax is exact; the forward pass keeps
/// the log of each row's sum, from which the backward pass recomputes the probabilities, as
/// FlashAttention does.
pub struct CausalAttention {
    num_heads: usize,
    dropout: Option<DropoutAt>,
    /// Log-sum-exp of each row of scores, (B, H, S), from the forward pass.
    lse: Mutex<Vec<f32>>,
}

impl CausalAttention {
    /// Attention with `num_heads` heads, dropping probabilities where asked.
    pub fn new(num_heads: usize, dropout: Option<DropoutAt>) -> Self {
        Self {
            num_heads,
            dropout,
            lse: Mutex::default(),
        }
    }

    fn shape(&self, qkv: &[usize]) -> Result<Sizes> {
        match *qkv {
            [batch, seq_len, width3] if width3.is_multiple_of(3 * self.num_heads) => Ok(Sizes {
                batch,
                seq_len,
                width: width3 / 3,
                head: width3 / 3 / self.num_heads,
            }),
            _ => bail!(
                "attention with {} heads takes (B, S, 3D), got {qkv:?}",
                self.num_heads
            ),
        }
    }
}

/// Sizes of one call.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    seq_len: usize,
    /// D.
    width: usize,
    /// D / H.
    head: usize,
}

impl Sizes {
    fn scale(&self) -> f32 {
        1.0 / (self.head as f32).sqrt()
    }

    fn num_heads(&self) -> usize {
        self.width / self.head
    }

    /// Rows `from..to` of the `part`-th (q 0, k 1, v 2) matrix of head `h` of sequence `b`.
    fn part<'a>(
        &self,
        qkv: &'a [f32],
        b: usize,
        h: usize,
        part: usize,
        from: usize,
        to: usize,
    ) -> Mat<'a> {
        let start = (b * self.seq_len + from) * 3 * self.width + part * self.width + h * self.head;
        Mat::new(&qkv[start..], to - from, self.head, 3 * self.width)
    }

    /// Stripes of queries as (first, end), last first: the last one covers all keys, so its
    /// gradients overwrite and the others' add.
    fn stripes(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let seq_len = self.seq_len;
        let starts = (0..seq_len).step_by(STRIPE).rev();
        starts.map(move |from| (from, (from + STRIPE).min(seq_len)))
    }
}

/// Turns scores into exp(scale (s - max)) and returns the row's (log-sum-exp, sum); keys after the
/// query become 0. `row` has all keys of the stripe, the first `num_seen` of which count.
#[inline(always)]
fn softmax_row<I: Arithmetic>(row: &mut [f32], num_seen: usize, scale: f32) -> (f32, f32) {
    let (seen, unseen) = row.split_at_mut(num_seen);
    unseen.fill(0.0);
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut sum = [0.0f32; LANES];
    let (whole, rest) = seen.split_at(num_seen / LANES * LANES);
    for chunk in whole.chunks_exact(LANES) {
        for i in 0..LANES {
            max[i] = if chunk[i] > max[i] { chunk[i] } else { max[i] };
        }
    }
    for (max, &s) in max.iter_mut().zip(rest) {
        *max = if s > *max { s } else { *max };
    }
    let max = scale * max.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (whole, rest) = seen.split_at_mut(num_seen / LANES * LANES);
    for chunk in whole.chunks_exact_mut(LANES) {
        for i in 0..LANES {
            chunk[i] = exp::<I>(I::fma(chunk[i], scale, -max));
            sum[i] += chunk[i];
        }
    }
    for (sum, s) in sum.iter_mut().zip(rest) {
        *s = exp::<I>(I::fma(*s, scale, -max));
        *sum += *s;
    }
    let sum = sum_lanes(sum);
    (max + sum.ln(), sum)
}

/// Scores of a stripe to unnormalised probabilities; row i sees `first + i + 1` keys.
#[inline(always)]
fn softmax_stripe_body<I: Arithmetic>(
    scores: &mut [f32],
    num_keys: usize,
    first: usize,
    scale: f32,
    lse: &mut [f32],
    sums: &mut [f32],
) {
    for (i, row) in scores.chunks_exact_mut(num_keys).enumerate() {
        (lse[i], sums[i]) = softmax_row::<I>(row, first + i + 1, scale);
    }
}

/// Scores of a stripe to probabilities, given each row's log-sum-exp.
#[inline(always)]
fn probabilities_body<I: Arithmetic>(
    scores: &mut [f32],
    num_keys: usize,
    first: usize,
    scale: f32,
    lse: &[f32],
) {
    for (i, row) in scores.chunks_exact_mut(num_keys).enumerate() {
        let (seen, unseen) = row.split_at_mut(first + i + 1);
        unseen.fill(0.0);
        for s in seen {
            *s = exp::<I>(I::fma(*s, scale, -lse[i]));
        }
    }
}

/// Gradient of the scores: `p (dp - delta) scale`, into `dp`.
#[inline(always)]
fn score_gradient_body<I: Arithmetic>(
    p: &[f32],
    dp: &mut [f32],
    num_keys: usize,
    scale: f32,
    delta: &[f32],
) {
    for ((dp, p), &delta) in dp
        .chunks_exact_mut(num_keys)
        .zip(p.chunks_exact(num_keys))
        .zip(delta)
    {
        for (dp, p) in dp.iter_mut().zip(p) {
            let scaled = p * scale;
            *dp = I::fma(scaled, *dp, -scaled * delta);
        }
    }
}

simd_kernel! { fn softmax_stripe(scores: &mut [f32], num_keys: usize, first: usize, scale: f32, lse: &mut [f32], sums: &mut [f32]) = softmax_stripe_body }
simd_kernel! { fn probabilities(scores: &mut [f32], num_keys: usize, first: usize, scale: f32, lse: &[f32]) = probabilities_body }
simd_kernel! { fn score_gradient(p: &[f32], dp: &mut [f32], num_keys: usize, scale: f32, delta: &[f32]) = score_gradient_body }

/// Multiplies a stripe of probabilities (or their gradient) by the dropout mask.
fn drop(stripe: &mut [f32], num_keys: usize, mask: &Mask, seq_len: usize, first: usize) {
    for (i, row) in stripe.chunks_exact_mut(num_keys).enumerate() {
        let start = (first + i) * seq_len;
        for (j, p) in row.iter_mut().enumerate() {
            *p *= mask.factor(start + j);
        }
    }
}

impl CustomOp1 for CausalAttention {
    fn name(&self) -> &'static str {
        "causal_attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let qkv = rows::values(storage, layout)?;
        let sizes = self.shape(layout.dims())?;
        let Sizes {
            batch,
            seq_len,
            width,
            head,
        } = sizes;
        let num_heads = self.num_heads;
        let mut out = rows::buffer(batch * seq_len * width);
        let mut lse = rows::buffer(batch * num_heads * seq_len);
        MatMut::blocks(&mut out, width, seq_len, head)
            .into_par_iter()
            .zip(lse.par_chunks_mut(seq_len))
            .enumerate()
            .for_each_init(Vec::new, |scores: &mut Vec<f32>, (i, (mut out, lse))| {
                let (b, h) = (i / num_heads, i % num_heads);
                let mask = self.dropout.map(|at| at.mask(b).part(h));
                scores.resize(STRIPE * seq_len, 0.0);
                for (from, to) in sizes.stripes() {
                    let scores = &mut scores[..(to - from) * to];
                    let q = sizes.part(qkv, b, h, 0, from, to);
                    let k = sizes.part(qkv, b, h, 1, 0, to);
                    let v = sizes.part(qkv, b, h, 2, 0, to);
                    gemm(MatMut::new(scores, to - from, to, to), q, k.t(), false, 1);
                    let mut sums = [0.0; STRIPE];
                    softmax_stripe(
                        scores,
                        to,
                        from,
                        sizes.scale(),
                        &mut lse[from..to],
                        &mut sums,
                    );
                    if let Some(mask) = &mask {
                        drop(scores, to, mask, seq_len, from);
                    }
                    let scores = Mat::new(scores, to - from, to, to);
                    gemm(out.rows(from, to), scores, v, false, 1);
                    for (i, sum) in (from..to).zip(sums) {
                        out.row(i).iter_mut().for_each(|o| *o /= sum);
                    }
                }
            });
        *self.lse.lock().expect("no holder panicked") = lse;
        Ok((CpuStorage::F32(out), (batch, seq_len, width).into()))
    }

    fn bwd(&self, qkv: &Tensor, out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let sizes = self.shape(qkv.dims())?;
        let Sizes {
            seq_len,
            width,
            head,
            ..
        } = sizes;
        let num_heads = sizes.num_heads();
        let lse = self.lse.lock().expect("no holder panicked");
        let mut dqkv = rows::buffer(qkv.elem_count());
        rows::with_values(qkv, |qkv| {
            rows::with_values(out, |out| {
                rows::with_values(grad, |grad| {
                    self.backward(sizes, qkv, out, grad, &lse, &mut dqkv);
                    Ok(())
                })
            })
        })?;
        debug_assert_eq!(
            lse.len() * width,
            num_heads * grad.elem_count(),
            "{seq_len} {head}"
        );
        Ok(Some(rows::tensor(dqkv, qkv.shape())))
    }
}

impl CausalAttention {
    fn backward(
        &self,
        sizes: Sizes,
        qkv: &[f32],
        out: &[f32],
        grad: &[f32],
        lse: &[f32],
        dqkv: &mut [f32],
    ) {
        let Sizes {
            seq_len,
            width,
            head,
            ..
        } = sizes;
        let num_heads = sizes.num_heads();
        // Blocks come as (b, part, h); a task takes the q, k and v blocks of its (b, h).
        let mut blocks: Vec<_> = MatMut::blocks(dqkv, 3 * width, seq_len, head)
            .into_iter()
            .map(Some)
            .collect();
        let tasks: Vec<_> = (0..sizes.batch * num_heads)
            .map(|i| {
                let first = i / num_heads * 3 * num_heads + i % num_heads;
                [0, 1, 2].map(|part| blocks[first + part * num_heads].take())
            })
            .collect();
        let rows_of = |x: &'_ [f32], b: usize, h: usize, row: usize| {
            let start = (b * seq_len + row) * width + h * head;
            start..x.len().min(start + (seq_len - row - 1) * width + head)
        };
        tasks.into_par_iter().enumerate().for_each_init(
            || (Vec::new(), Vec::new()),
            |(p, dp): &mut (Vec<f32>, Vec<f32>), (i, task)| {
                let [Some(mut dq), Some(mut dk), Some(mut dv)] = task else {
                    unreachable!("each block belongs to one task")
                };
                let (b, h) = (i / num_heads, i % num_heads);
                let lse = &lse[i * seq_len..(i + 1) * seq_len];
                let mask = self.dropout.map(|at| at.mask(b).part(h));
                p.resize(STRIPE * seq_len, 0.0);
                dp.resize(STRIPE * seq_len, 0.0);
                for (from, to) in sizes.stripes() {
                    let (num_rows, add) = (to - from, to != seq_len);
                    let p = &mut p[..num_rows * to];
                    let dp = &mut dp[..num_rows * to];
                    let q = sizes.part(qkv, b, h, 0, from, to);
                    let k = sizes.part(qkv, b, h, 1, 0, to);
                    let v = sizes.part(qkv, b, h, 2, 0, to);
                    let grad_rows = &grad[rows_of(grad, b, h, from)];
                    let out_rows = &out[rows_of(out, b, h, from)];
                    let dout = Mat::new(grad_rows, num_rows, head, width);
                    // delta = sum_j p_j dp_j = out . dout (FlashAttention-2, section 3.1.2).
                    let mut delta = [0.0; STRIPE];
                    for (i, delta) in delta.iter_mut().enumerate().take(num_rows) {
                        let row = i * width..i * width + head;
                        let (g, o) = (&grad_rows[row.clone()], &out_rows[row]);
                        *delta = g.iter().zip(o).map(|(g, o)| g * o).sum();
                    }
                    gemm(MatMut::new(p, num_rows, to, to), q, k.t(), false, 1);
                    probabilities(p, to, from, sizes.scale(), &lse[from..to]);
                    gemm(MatMut::new(dp, num_rows, to, to), dout, v.t(), false, 1);
                    if let Some(mask) = &mask {
                        // dV needs the dropped probabilities, dS the whole ones.
                        drop(dp, to, mask, seq_len, from);
                        let mut dropped = p.to_vec();
                        drop(&mut dropped, to, mask, seq_len, from);
                        gemm(
                            dv.rows(0, to),
                            Mat::new(&dropped, num_rows, to, to).t(),
                            dout,
                            add,
                            1,
                        );
                    } else {
                        gemm(
                            dv.rows(0, to),
                            Mat::new(p, num_rows, to, to).t(),
                            dout,
                            add,
                            1,
                        );
                    }
                    score_gradient(p, dp, to, sizes.scale(), &delta);
                    let ds = Mat::new(dp, num_rows, to, to);
                    gemm(dq.rows(from, to), ds, k, false, 1);
                    gemm(dk.rows(0, to), ds.t(), q, add, 1);
                }
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::naive::{self, Check};

    #[test]
    fn matches_its_naive_twin() {
        for (batch, seq_len, num_heads, head) in
            [(2, 5, 3, 4), (1, 64, 2, 16), (2, 150, 2, 8), (1, 1, 1, 3)]
        {
            let check = Check::new(&[]);
            let x = check.input(0, &[batch, seq_len, 3 * num_heads * head]);
            check.agrees1(&[], &x, CausalAttention::new(num_heads, None), |_, x| {
                naive::attention(x, num_heads, None)
            });
        }
    }

    #[test]
    fn drops_probabilities_as_its_naive_twin() {
        let at = DropoutAt {
            rate: 0.4,
            seed: 1,
            step: 2,
            first_sequence: 3,
            site: 4,
        };
        let (batch, seq_len, num_heads, head) = (2, 70, 2, 8);
        let mut mask = Vec::new();
        for b in 0..batch {
            for h in 0..num_heads {
                let of_head = at.mask(b).part(h);
                mask.extend((0..seq_len * seq_len).map(|i| of_head.factor(i) as f64));
            }
        }
        let mask = Tensor::from_vec(
            mask,
            (batch, num_heads, seq_len, seq_len),
            &candle_core::Device::Cpu,
        );
        let check = Check::new(&[]);
        let x = check.input(0, &[batch, seq_len, 3 * num_heads * head]);
        check.agrees1(
            &[],
            &x,
            CausalAttention::new(num_heads, Some(at)),
            |_, x| naive::attention(x, num_heads, Some(mask.as_ref().unwrap())),
        );
    }

    #[test]
    fn saturated_scores_stay_finite() {
        let check = Check::new(&[]);
        let x = (check.input(0, &[1, 40, 24]) * 300.0).unwrap();
        let tape = crate::ops::Tape::recording();
        let y = tape.apply1(&x, CausalAttention::new(2, None)).unwrap();
        let dx = tape
            .backward(&y, y.ones_like().unwrap(), &x)
            .unwrap()
            .unwrap();
        for t in [y, dx] {
            let values: Vec<f32> = t.flatten_all().unwrap().to_vec1().unwrap();
            assert!(values.iter().all(|v| v.is_finite()));
        }
    }
}
