//! Block-wise coding with a dynamic map, in vector registers: codes and values are computed, not
//! looked up, because 256-entry gathers and searches cost ten times the memory traffic.
//!
//! Results equal the readable twins in `dynamic_naive.rs` bit for bit, on every instruction set.

use super::dynamic_map::{BOUNDARY_MARGIN, DynamicMap, ScaledTables};
use super::dynamic_naive::{
    BlockBuffer, BlockScale, MAX_BLOCK, decode_block_naive, decode_blocks_naive,
    encode_blocks_naive, encode_values_naive, near_boundary, settle_near_boundaries,
};
use crate::simd::lanes::{Lanes, lanes_kernel};

lanes_kernel! {
    /// Encodes `x`: a code a value into `codes`, a scale a block into `scales`. `keep_nonzero`
    /// gives positive values at least code 1 (unsigned maps only).
    pub(crate) fn encode_blocks(
        map: &DynamicMap,
        keep_nonzero: bool,
        block: usize,
        x: &[f32],
        codes: &mut [u8],
        scales: &mut [f32],
    ) = encode_blocks_body or encode_blocks_naive
}

lanes_kernel! {
    /// Decodes `codes` into `x`, or adds to `x` when `accumulate`.
    pub(crate) fn decode_blocks(
        map: &DynamicMap,
        accumulate: bool,
        block: usize,
        codes: &[u8],
        scales: &[f32],
        x: &mut [f32],
    ) = decode_blocks_body or decode_blocks_naive
}

/// # Safety
/// Needs the instruction set of `L`.
#[inline(always)]
unsafe fn encode_blocks_body<L: Lanes>(
    map: &DynamicMap,
    keep_nonzero: bool,
    block: usize,
    x: &[f32],
    codes: &mut [u8],
    scales: &mut [f32],
) {
    assert!(x.len() == codes.len() && scales.len() == x.len().div_ceil(block));
    let blocks = x.chunks(block).zip(codes.chunks_mut(block));
    for ((x, codes), scale) in blocks.zip(scales) {
        // SAFETY: this function's own contract.
        unsafe {
            let mut absmax = L::splat_i(0);
            let (vectors, tail) = x.split_at(x.len() - x.len() % L::N);
            for v in vectors.chunks_exact(L::N) {
                let bits = L::bits(L::load(v.as_ptr()));
                absmax = L::max_u32(absmax, L::and(bits, L::splat_i(i32::MAX)));
            }
            let absmax = tail
                .iter()
                .fold(L::reduce_max_u32(absmax), |m, x| m.max(x.abs().to_bits()));
            *scale = match (map.is_signed(), keep_nonzero) {
                (true, _) => encode_block::<L, true, false>(map, x, absmax, codes),
                (false, false) => encode_block::<L, false, false>(map, x, absmax, codes),
                (false, true) => encode_block::<L, false, true>(map, x, absmax, codes),
            };
        }
    }
}

/// Encodes one block whose largest magnitude has bits `absmax_bits`; returns the scale to store.
///
/// # Safety
/// Needs the instruction set of `L`.
#[inline(always)]
pub(crate) unsafe fn encode_block<L: Lanes, const SIGNED: bool, const KEEP_NONZERO: bool>(
    map: &DynamicMap,
    x: &[f32],
    absmax_bits: u32,
    codes: &mut [u8],
) -> f32 {
    assert!(x.len() == codes.len() && x.len() <= MAX_BLOCK);
    let scale = BlockScale::of(absmax_bits);
    match scale {
        // Between these no product of the scale and a table under- or overflows.
        BlockScale::Normal(s) if (1e-21..1e30).contains(&s) => {
            // SAFETY: this function's own contract.
            unsafe { encode_values::<L, SIGNED, KEEP_NONZERO>(map, x, s, codes) }
        }
        BlockScale::Normal(s) if s < 1.0 => {
            // The same quotients, from values moved up by a power of two.
            const UP: f32 = (1u128 << 100) as f32;
            let mut moved = BlockBuffer([0.0; MAX_BLOCK]);
            let moved = &mut moved.0[..x.len()];
            for (to, from) in moved.iter_mut().zip(x) {
                *to = from * UP;
            }
            // SAFETY: this function's own contract.
            unsafe { encode_values::<L, SIGNED, KEEP_NONZERO>(map, moved, s * UP, codes) }
        }
        BlockScale::Normal(s) => encode_values_naive(map, KEEP_NONZERO, x, s, codes),
        BlockScale::Zero | BlockScale::NonFinite => codes.fill(map.zero_code()),
    }
    scale.stored()
}

/// # Safety
/// Needs the instruction set of `L`.
#[inline(always)]
unsafe fn encode_values<L: Lanes, const SIGNED: bool, const KEEP_NONZERO: bool>(
    map: &DynamicMap,
    x: &[f32],
    scale: f32,
    codes: &mut [u8],
) {
    let group = 4 * L::N;
    let tables = map.encode.scaled(scale);
    let (x_groups, x_tail) = x.split_at(x.len() - x.len() % group);
    let (code_groups, code_tail) = codes.split_at_mut(x_groups.len());
    let groups = x_groups
        .chunks_exact(group)
        .zip(code_groups.chunks_exact_mut(group));
    // SAFETY: chunks hold `group` values; the rest is this function's own contract.
    unsafe {
        for (x, codes) in groups {
            encode_group::<L, SIGNED, KEEP_NONZERO>(map, &tables, x, scale, codes);
        }
        if !x_tail.is_empty() {
            let (mut x, mut codes) = ([0.0; 64], [0; 64]);
            x[..x_tail.len()].copy_from_slice(x_tail);
            let (x, codes) = (&x[..group], &mut codes[..group]);
            encode_group::<L, SIGNED, KEEP_NONZERO>(map, &tables, x, scale, codes);
            code_tail.copy_from_slice(&codes[..code_tail.len()]);
        }
    }
}

/// Encodes four vectors.
///
/// # Safety
/// Needs the instruction set of `L`; `x` and `codes` hold `4 N` values.
#[inline(always)]
unsafe fn encode_group<L: Lanes, const SIGNED: bool, const KEEP_NONZERO: bool>(
    map: &DynamicMap,
    tables: &ScaledTables,
    x: &[f32],
    scale: f32,
    codes: &mut [u8],
) {
    // The decade's number from the top 16 bits of |x|, which are about 128 log2|x| + 128 * 127, above
    // those of the scale less LOW, times log10(2) / 128. It is right, or one too high where |x| is
    // still below the decade's bound: between 10^(i-7) and there.
    const LOW: u32 = 2998;
    const LOG10_2_512: i32 = 154; // 65536 log10(2) / 128
    // By how much the lines look early for boundaries.
    const EARLY: f32 = BOUNDARY_MARGIN as f32 / 65536.0;
    debug_assert!(x.len() == 4 * L::N && codes.len() == 4 * L::N);
    // SAFETY: this function's own contract.
    unsafe {
        let low = L::splat_i(((scale.to_bits() & 0xffff_0000) - (LOW << 16)) as i32);
        // Step by step for all four: one vector's chain is so long that a core's scheduler does not
        // see past it to the next.
        let mut raw = [L::splat(0.0); 4];
        let mut size = [L::splat_i(0); 4];
        let mut decade = [L::splat_i(0); 4];
        for k in 0..4 {
            raw[k] = L::load(x.as_ptr().add(k * L::N));
            size[k] = if SIGNED {
                L::and(L::bits(raw[k]), L::splat_i(i32::MAX))
            } else {
                L::max_i32(L::bits(raw[k]), L::splat_i(0))
            };
            let above = L::sub_saturate_u16(size[k], low);
            let estimate = L::mul_high_u16(above, L::splat_i(LOG10_2_512 << 16));
            decade[k] = L::shift_right::<16>(estimate);
        }
        for k in 0..4 {
            let bound = L::bits(L::look_up(&tables.bound, decade[k]));
            decade[k] = L::less_one_where_lt(decade[k], size[k], bound);
        }
        let mut t = [L::splat_i(0); 4];
        for k in 0..4 {
            if !SIGNED && !KEEP_NONZERO {
                // The boundary between 0 and the first value is not on the line.
                size[k] = L::zero_where_lt(size[k], L::bits(L::splat(tables.nonzero)));
            }
            let slope = L::look_up(&tables.slope, decade[k]);
            let place = L::bits(L::fma(L::from_bits(size[k]), slope, L::splat(8.0 / 9.0)));
            // Between the decade's end and the next one's bound: still its last value.
            let place = L::min_i32(place, L::bits(L::splat(2.0 - 1.0 / 128.0)));
            // Times 2^decade by way of the exponent. From 128 on an f32 has steps of 2^-16: the
            // number and the distance from the boundary below it are bit fields.
            let number = L::add_i(place, L::shift_left::<23>(decade[k]));
            t[k] = L::bits(L::add(L::from_bits(number), L::splat(128.0 + EARLY)));
        }
        let mut nearest_boundary = L::splat_i(-1);
        for t in t {
            // The unsigned number has one bit more, the low word's top bit: doubling drops it.
            let distance = if SIGNED { t } else { L::add_i(t, t) };
            nearest_boundary = L::min_u16(nearest_boundary, distance);
        }
        if SIGNED {
            L::store_signed_codes(codes.as_mut_ptr(), t, raw);
        } else {
            L::store_unsigned_codes::<KEEP_NONZERO>(codes.as_mut_ptr(), t, raw);
        }
        if L::any_u16_below(nearest_boundary, near_boundary(SIGNED)) {
            // Once in some 200 groups: compare exactly where rounding may have crossed a boundary.
            let mut lines = [0.0f32; 64];
            for (k, &t) in t.iter().enumerate() {
                L::store(lines.as_mut_ptr().add(k * L::N), L::from_bits(t));
            }
            settle_near_boundaries(map, KEEP_NONZERO, x, scale, &lines[..4 * L::N], codes);
        }
    }
}

/// # Safety
/// Needs the instruction set of `L`.
#[inline(always)]
unsafe fn decode_blocks_body<L: Lanes>(
    map: &DynamicMap,
    accumulate: bool,
    block: usize,
    codes: &[u8],
    scales: &[f32],
    x: &mut [f32],
) {
    // SAFETY: this function's own contract.
    unsafe {
        match (map.is_signed(), accumulate) {
            (true, false) => decode_values::<L, true, false>(map, block, codes, scales, x),
            (true, true) => decode_values::<L, true, true>(map, block, codes, scales, x),
            (false, false) => decode_values::<L, false, false>(map, block, codes, scales, x),
            (false, true) => decode_values::<L, false, true>(map, block, codes, scales, x),
        }
    }
}

/// # Safety
/// Needs the instruction set of `L`.
#[inline(always)]
unsafe fn decode_values<L: Lanes, const SIGNED: bool, const ACCUMULATE: bool>(
    map: &DynamicMap,
    block: usize,
    codes: &[u8],
    scales: &[f32],
    x: &mut [f32],
) {
    assert!(x.len() == codes.len() && scales.len() == x.len().div_ceil(block));
    let blocks = x.chunks_mut(block).zip(codes.chunks(block));
    for ((x, codes), &scale) in blocks.zip(scales) {
        let mut x = x.chunks_exact_mut(4 * L::N);
        let mut codes = codes.chunks_exact(4 * L::N);
        for (x, codes) in (&mut x).zip(&mut codes) {
            // SAFETY: both chunks hold 4 N values; the rest is this function's own contract.
            unsafe {
                let values = decode_vectors::<L, SIGNED, 4>(map, codes.as_ptr());
                for (k, value) in values.into_iter().enumerate() {
                    let to = x.as_mut_ptr().add(k * L::N);
                    let value = L::mul(value, L::splat(scale));
                    let value = if ACCUMULATE {
                        L::add(L::load(to), value)
                    } else {
                        value
                    };
                    L::store(to, value);
                }
            }
        }
        decode_block_naive(
            map,
            ACCUMULATE,
            codes.remainder(),
            scale,
            x.into_remainder(),
        );
    }
}

/// The map's values of `V` vectors of codes.
///
/// # Safety
/// Needs the instruction set of `L` and `V N` readable bytes at `codes`.
#[inline(always)]
pub(crate) unsafe fn decode_vectors<L: Lanes, const SIGNED: bool, const V: usize>(
    map: &DynamicMap,
    codes: *const u8,
) -> [L::F; V] {
    let tables = &map.decode;
    // SAFETY: this function's own contract.
    unsafe {
        let mut sign = [L::splat_i(0); V];
        let mut number = [L::splat(0.0); V];
        let mut values = [L::splat(0.0); V];
        for k in 0..V {
            let codes = L::load_bytes(codes.add(k * L::N));
            if SIGNED {
                let signed = L::add_i(codes, L::splat_i(-127));
                sign[k] = L::and(signed, L::splat_i(i32::MIN));
                number[k] = L::to_f32(L::abs_i(signed));
            } else {
                number[k] = L::to_f32(codes);
            }
        }
        // The leading bit is the exponent and names the decade; below it is the place in it.
        let mut bits = [L::splat_i(0); V];
        for k in 0..V {
            let up = L::splat(if SIGNED { 0.5 } else { 1.0 });
            bits[k] = L::bits(L::add(number[k], up));
        }
        for k in 0..V {
            let leading = L::and(bits[k], L::splat_i(0x7f80_0000));
            values[k] = L::sub(L::from_bits(bits[k]), L::from_bits(leading));
            bits[k] = L::shift_right::<23>(bits[k]);
        }
        for k in 0..V {
            let start = L::look_up(&tables.start, bits[k]);
            values[k] = L::fma(values[k], L::look_up(&tables.slope, bits[k]), start);
        }
        for k in 0..V {
            values[k] = if SIGNED {
                L::from_bits(L::or(L::bits(values[k]), sign[k]))
            } else {
                L::from_bits(L::min_i32(L::bits(values[k]), L::bits(number[k])))
            };
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;

    fn maps() -> [&'static DynamicMap; 2] {
        [DynamicMap::signed(), DynamicMap::unsigned()]
    }

    /// Codes of `ys` with scale 1 on `isa`, 2047 at a time beside the 1 that fixes the scale.
    fn codes(isa: Isa, map: &DynamicMap, ys: &[f32]) -> Vec<u8> {
        let mut out = Vec::new();
        for ys in ys.chunks(2047) {
            let x: Vec<f32> = ys.iter().copied().chain([1.0]).collect();
            let (mut codes, mut scale) = (vec![0; x.len()], [0.0]);
            encode_blocks(isa, map, false, 2048, &x, &mut codes, &mut scale);
            assert_eq!(scale, [1.0]);
            out.extend_from_slice(&codes[..ys.len()]);
        }
        out
    }

    #[test]
    fn codes_are_the_nearest_around_every_boundary_and_value() {
        for map in maps() {
            let mut ys = vec![0.0f32, 1e-30, 1e-20, 1e-9, 1.0];
            for w in map.values().windows(2).filter(|w| w[0] >= 0.0) {
                let mid = ((f64::from(w[0]) + f64::from(w[1])) / 2.0) as f32;
                for center in [mid, w[0], w[1]] {
                    let bits = center.to_bits();
                    ys.extend((bits.saturating_sub(300)..=bits + 300).map(f32::from_bits));
                }
            }
            for decade in 1..9 {
                let bits = 10f32.powi(-decade).to_bits();
                ys.extend((bits - 3000..bits + 3000).map(f32::from_bits));
            }
            ys.retain(|&y| y <= 1.0);
            if map.is_signed() {
                let negative: Vec<f32> = ys.iter().map(|y| -y).collect();
                ys.extend(negative);
            }
            let naive: Vec<u8> = ys.iter().map(|&y| map.nearest(y)).collect();
            for isa in Isa::supported() {
                assert!(codes(isa, map, &ys) == naive, "{isa:?}");
            }
        }
    }

    /// All f32 in [0, 1], or with a stride: `TRAIN_TEST_STRIDE=1` takes a minute.
    #[test]
    fn codes_are_the_nearest_over_all_magnitudes() {
        let stride = std::env::var("TRAIN_TEST_STRIDE").map_or(97, |s| s.parse().unwrap());
        for map in maps() {
            // Below 2^-40 all is 0.
            let (low, high) = (2f32.powi(-40).to_bits(), 1f32.to_bits());
            let all = (low..=high).step_by(stride);
            let mut batch = Vec::with_capacity(1 << 20);
            let check = |batch: &mut Vec<f32>| {
                let naive: Vec<u8> = batch.iter().map(|&y| map.nearest(y)).collect();
                for isa in Isa::supported().into_iter().skip(1) {
                    assert!(
                        codes(isa, map, batch) == naive,
                        "{isa:?} near {:?}",
                        batch[0]
                    );
                }
                batch.clear();
            };
            for bits in all {
                batch.push(f32::from_bits(bits));
                if batch.len() == batch.capacity() {
                    check(&mut batch);
                }
            }
            check(&mut batch);
        }
    }

    #[test]
    fn decoded_values_are_the_maps_values() {
        for map in maps() {
            let codes: Vec<u8> = (0..=255).chain(0..77).collect();
            for isa in Isa::supported() {
                for scale in [1.0f32, 0.37, 1e-12, f32::NAN] {
                    let mut out = vec![0.0f32; codes.len()];
                    let scales = vec![scale; codes.len().div_ceil(64)];
                    decode_blocks(isa, map, false, 64, &codes, &scales, &mut out);
                    let mut twin = vec![0.0f32; codes.len()];
                    decode_blocks_naive(map, false, 64, &codes, &scales, &mut twin);
                    let same =
                        |a: &f32, b: &f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                    assert!(
                        out.iter().zip(&twin).all(|(a, b)| same(a, b)),
                        "{isa:?} {scale}"
                    );
                    decode_blocks(isa, map, true, 64, &codes, &scales, &mut out);
                    decode_blocks_naive(map, true, 64, &codes, &scales, &mut twin);
                    assert!(
                        out.iter().zip(&twin).all(|(a, b)| same(a, b)),
                        "{isa:?} {scale}"
                    );
                }
            }
        }
    }

    /// Boundaries move with the scale: products of both, a few steps up and down.
    #[test]
    fn codes_are_the_nearest_around_every_boundary_of_awkward_scales() {
        for map in maps() {
            for s in 0..200u32 {
                let scale = f32::from_bits(0x3f80_0000 + s.wrapping_mul(0x9e37_79b9) % 0x0080_0000)
                    * 2f32.powi(s as i32 % 60 - 40);
                let mut x = Vec::new();
                for w in map.values().windows(2).filter(|w| w[0] >= 0.0) {
                    let mid = (f64::from(w[0]) + f64::from(w[1])) / 2.0 * f64::from(scale);
                    let bits = (mid as f32).to_bits();
                    x.extend((bits - 6..=bits + 6).map(f32::from_bits));
                }
                for x in x.chunks(2047) {
                    let x: Vec<f32> = x.iter().copied().chain([scale]).collect();
                    for keep in [false, !map.is_signed()] {
                        for isa in Isa::supported() {
                            assert_same_as_twin(isa, map, keep, &x);
                        }
                    }
                }
            }
        }
    }

    /// A scale whose division would under- or overflow takes another path to the same codes.
    #[test]
    fn codes_do_not_depend_on_the_size_of_the_scale() {
        let mut x: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.7).sin().powi(7)).collect();
        x[500] = 1.0;
        for map in maps() {
            for exponent in [-126, -110, -100, -75, -69, -1, 0, 60, 101, 127] {
                let scaled: Vec<f32> = x.iter().map(|x| x * 2f32.powi(exponent)).collect();
                for keep in [false, !map.is_signed()] {
                    for isa in Isa::supported() {
                        assert_same_as_twin(isa, map, keep, &scaled);
                    }
                }
            }
        }
    }

    fn assert_same_as_twin(isa: Isa, map: &DynamicMap, keep: bool, x: &[f32]) {
        let (mut codes, mut scale) = (vec![0; x.len()], [0.0]);
        let (mut twin, mut twin_scale) = (vec![0; x.len()], [0.0]);
        encode_blocks(isa, map, keep, 2048, x, &mut codes, &mut scale);
        encode_blocks_naive(map, keep, 2048, x, &mut twin, &mut twin_scale);
        assert_eq!(scale, twin_scale);
        assert!(codes == twin, "{isa:?} {keep} {scale:?}");
    }
}
