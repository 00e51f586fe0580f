//! AdamW's update of a run of values, in one pass: f32 moments, or 8-bit moments that are decoded,
//! updated and encoded again while they are in registers and L1.
//!
//! The arithmetic is [`Update::one`]'s, rounding by rounding, on every instruction set.

use crate::quant::DynamicMap;
use crate::quant::dynamic_kernel::{decode_vectors, encode_block};
use crate::quant::dynamic_naive::{BlockBuffer, MAX_BLOCK, encode_block_naive};
use crate::simd::lanes::{Lanes, lanes_kernel};

/// The constants of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update {
    /// 1 - lr * weight_decay.
    pub keep: f32,
    pub grad_scale: f32,
    /// 1 - beta1.
    pub one_minus_beta1: f32,
    pub beta2: f32,
    /// 1 - beta2.
    pub one_minus_beta2: f32,
    /// 1 / sqrt(1 - beta2^t).
    pub denom_scale: f32,
    pub eps: f32,
    /// lr / (1 - beta1^t).
    pub step_size: f32,
}

impl Update {
    /// One parameter with its moments: decoupled decay (Loshchilov & Hutter, algorithm 2), then
    /// Adam, in PyTorch's order and formula. Returns parameter and moments.
    #[inline(always)]
    pub(crate) fn one(&self, p: f32, g: f32, m: f32, v: f32) -> (f32, f32, f32) {
        let g = g * self.grad_scale;
        let m = self.one_minus_beta1.mul_add(g - m, m);
        let v = (self.one_minus_beta2 * g).mul_add(g, self.beta2 * v);
        let denom = v.sqrt().mul_add(self.denom_scale, self.eps);
        let p = (-self.step_size).mul_add(m / denom, p * self.keep);
        (p, m, v)
    }
}

/// [`Update`] in every lane.
struct Lanewise<L: Lanes> {
    keep: L::F,
    grad_scale: L::F,
    one_minus_beta1: L::F,
    beta2: L::F,
    one_minus_beta2: L::F,
    denom_scale: L::F,
    eps: L::F,
    step_size: L::F,
}

impl<L: Lanes> Lanewise<L> {
    /// # Safety
    /// Needs the instruction set of `L`.
    #[inline(always)]
    unsafe fn new(u: &Update) -> Self {
        // SAFETY: this function's own contract.
        unsafe {
            Lanewise {
                keep: L::splat(u.keep),
                grad_scale: L::splat(u.grad_scale),
                one_minus_beta1: L::splat(u.one_minus_beta1),
                beta2: L::splat(u.beta2),
                one_minus_beta2: L::splat(u.one_minus_beta2),
                denom_scale: L::splat(u.denom_scale),
                eps: L::splat(u.eps),
                step_size: L::splat(u.step_size),
            }
        }
    }

    /// [`Update::one`] of each lane.
    ///
    /// # Safety
    /// Needs the instruction set of `L`.
    #[inline(always)]
    unsafe fn update(&self, p: L::F, g: L::F, m: L::F, v: L::F) -> (L::F, L::F, L::F) {
        // SAFETY: this function's own contract.
        unsafe {
            let g = L::mul(g, self.grad_scale);
            let m = L::fma(self.one_minus_beta1, L::sub(g, m), m);
            let v = L::fma(L::mul(self.one_minus_beta2, g), g, L::mul(self.beta2, v));
            let denom = L::fma(L::sqrt(v), self.denom_scale, self.eps);
            let p = L::fnma(self.step_size, L::div(m, denom), L::mul(p, self.keep));
            (p, m, v)
        }
    }
}

lanes_kernel! {
    /// Updates parameters with f32 moments. All slices have one length.
    pub(crate) fn update_f32(
        update: &Update,
        p: &mut [f32],
        g: &[f32],
        m: &mut [f32],
        v: &mut [f32],
    ) = update_f32_body or update_f32_naive
}

lanes_kernel! {
    /// Updates parameters with 8-bit moments: codes as long as `p`, a scale a block. The update
    /// uses the new moments before they are quantized again.
    pub(crate) fn update_8bit(
        update: &Update,
        block: usize,
        p: &mut [f32],
        g: &[f32],
        m_codes: &mut [u8],
        m_scales: &mut [f32],
        v_codes: &mut [u8],
        v_scales: &mut [f32],
    ) = update_8bit_body or update_8bit_naive
}

/// # Safety
/// Needs the instruction set of `L`.
#[inline(always)]
unsafe fn update_f32_body<L: Lanes>(
    update: &Update,
    p: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
) {
    let n = p.len();
    assert!(g.len() == n && m.len() == n && v.len() == n);
    let whole = n - n % L::N;
    // SAFETY: `i + N <= n`, the length of all four slices; the rest is this function's contract.
    unsafe {
        let lanewise = Lanewise::<L>::new(update);
        let mut i = 0;
        while i < whole {
            let (pp, mp, vp) = (
                p.as_mut_ptr().add(i),
                m.as_mut_ptr().add(i),
                v.as_mut_ptr().add(i),
            );
            let (p, m, v) = lanewise.update(
                L::load(pp),
                L::load(g.as_ptr().add(i)),
                L::load(mp),
                L::load(vp),
            );
            L::store(pp, p);
            L::store(mp, m);
            L::store(vp, v);
            i += L::N;
        }
    }
    for i in whole..n {
        (p[i], m[i], v[i]) = update.one(p[i], g[i], m[i], v[i]);
    }
}

/// # Safety
/// Needs the instruction set of `L`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn update_8bit_body<L: Lanes>(
    update: &Update,
    block: usize,
    p: &mut [f32],
    g: &[f32],
    m_codes: &mut [u8],
    m_scales: &mut [f32],
    v_codes: &mut [u8],
    v_scales: &mut [f32],
) {
    // Vectors decoded step by step together, so that their chains overlap.
    const V: usize = 4;
    let n = p.len();
    assert!(g.len() == n && m_codes.len() == n && v_codes.len() == n && block <= MAX_BLOCK);
    assert!(m_scales.len() == n.div_ceil(block) && v_scales.len() == m_scales.len());
    let (m_map, v_map) = (DynamicMap::signed(), DynamicMap::unsigned());
    let mut m_new = BlockBuffer([0.0; MAX_BLOCK]);
    let mut v_new = BlockBuffer([0.0; MAX_BLOCK]);
    let (m_new, v_new) = (&mut m_new.0, &mut v_new.0);
    // SAFETY: this function's contract.
    let lanewise = unsafe { Lanewise::<L>::new(update) };
    for (b, start) in (0..n).step_by(block).enumerate() {
        let len = block.min(n - start);
        let p = &mut p[start..start + len];
        let g = &g[start..start + len];
        let m_codes = &mut m_codes[start..start + len];
        let v_codes = &mut v_codes[start..start + len];
        let (m_scale, v_scale) = (m_scales[b], v_scales[b]);
        let whole = len - len % (V * L::N);
        // SAFETY: `i + V N <= len`, the length of every slice, and `len <= MAX_BLOCK`; the rest is
        // this function's contract.
        unsafe {
            let (mut m_max, mut v_max) = (L::splat_i(0), L::splat_i(0));
            let (m_by, v_by) = (L::splat(m_scale), L::splat(v_scale));
            // Three short loops through L1: one long loop spills, and its chains fill the scheduler.
            let mut i = 0;
            while i < whole {
                let m = decode_vectors::<L, true, V>(m_map, m_codes.as_ptr().add(i));
                for (k, m) in m.into_iter().enumerate() {
                    L::store(m_new.as_mut_ptr().add(i + k * L::N), L::mul(m, m_by));
                }
                i += V * L::N;
            }
            i = 0;
            while i < whole {
                let v = decode_vectors::<L, false, V>(v_map, v_codes.as_ptr().add(i));
                for (k, v) in v.into_iter().enumerate() {
                    L::store(v_new.as_mut_ptr().add(i + k * L::N), L::mul(v, v_by));
                }
                i += V * L::N;
            }
            i = 0;
            while i < whole {
                let pp = p.as_mut_ptr().add(i);
                let mp = m_new.as_mut_ptr().add(i);
                let vp = v_new.as_mut_ptr().add(i);
                let g = L::load(g.as_ptr().add(i));
                let (p, m, v) = lanewise.update(L::load(pp), g, L::load(mp), L::load(vp));
                L::store(pp, p);
                L::store(mp, m);
                L::store(vp, v);
                // Largest bits: NaN above infinity above all else. v is never -0, but a NaN may
                // have a sign, which as an unsigned number is larger still.
                m_max = L::max_u32(m_max, L::and(L::bits(m), L::splat_i(i32::MAX)));
                v_max = L::max_u32(v_max, L::bits(v));
                i += L::N;
            }
            let (mut m_max, mut v_max) = (L::reduce_max_u32(m_max), L::reduce_max_u32(v_max));
            for i in whole..len {
                let m = m_map.values()[m_codes[i] as usize] * m_scale;
                let v = v_map.values()[v_codes[i] as usize] * v_scale;
                (p[i], m_new[i], v_new[i]) = update.one(p[i], g[i], m, v);
                m_max = m_max.max(m_new[i].abs().to_bits());
                v_max = v_max.max(v_new[i].to_bits());
            }
            m_scales[b] = encode_block::<L, true, false>(m_map, &m_new[..len], m_max, m_codes);
            v_scales[b] = encode_block::<L, false, true>(v_map, &v_new[..len], v_max, v_codes);
        }
    }
}

/// Readable twin of [`update_f32`], and its path without SIMD.
pub(crate) fn update_f32_naive(
    update: &Update,
    p: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
) {
    for i in 0..p.len() {
        (p[i], m[i], v[i]) = update.one(p[i], g[i], m[i], v[i]);
    }
}

/// Readable twin of [`update_8bit`], and its path without SIMD.
#[allow(clippy::too_many_arguments)]
pub(crate) fn update_8bit_naive(
    update: &Update,
    block: usize,
    p: &mut [f32],
    g: &[f32],
    m_codes: &mut [u8],
    m_scales: &mut [f32],
    v_codes: &mut [u8],
    v_scales: &mut [f32],
) {
    let (m_map, v_map) = (DynamicMap::signed(), DynamicMap::unsigned());
    let (mut m_new, mut v_new) = ([0.0f32; MAX_BLOCK], [0.0f32; MAX_BLOCK]);
    for (b, start) in (0..p.len()).step_by(block).enumerate() {
        let range = start..p.len().min(start + block);
        let len = range.len();
        for (k, i) in range.clone().enumerate() {
            let m = m_map.values()[m_codes[i] as usize] * m_scales[b];
            let v = v_map.values()[v_codes[i] as usize] * v_scales[b];
            (p[i], m_new[k], v_new[k]) = update.one(p[i], g[i], m, v);
        }
        m_scales[b] = encode_block_naive(m_map, false, &m_new[..len], &mut m_codes[range.clone()]);
        v_scales[b] = encode_block_naive(v_map, true, &v_new[..len], &mut v_codes[range]);
    }
}
