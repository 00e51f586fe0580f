//! Block-wise coding with a dynamic map, one value at a time: the readable twins of
//! `dynamic_kernel.rs`, its path where there is no SIMD, and what both say about a block's scale.

use super::DynamicMap;
use super::dynamic_map::BOUNDARY_MARGIN;

/// Largest block.
pub(crate) const MAX_BLOCK: usize = crate::ops::ALIGN;

/// Room for a block. Its alignment makes the compiler align a kernel's whole stack frame: without,
/// half of the vectors that it spills straddle cache lines.
#[repr(align(64))]
pub(crate) struct BlockBuffer(pub [f32; MAX_BLOCK]);

/// What a block's largest magnitude, given by its bits, makes of the block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum BlockScale {
    /// Codes stand for multiples of this.
    Normal(f32),
    /// Nothing above the denormals, which compute threads flush: decodes to zeros.
    Zero,
    /// A NaN or infinity: the scale is NaN, so that every value decodes to NaN.
    NonFinite,
}

impl BlockScale {
    #[inline(always)]
    pub(crate) fn of(absmax_bits: u32) -> BlockScale {
        match absmax_bits {
            0..0x0080_0000 => BlockScale::Zero,
            0x0080_0000..0x7f80_0000 => BlockScale::Normal(f32::from_bits(absmax_bits)),
            _ => BlockScale::NonFinite,
        }
    }

    /// The scale to store.
    #[inline(always)]
    pub(crate) fn stored(self) -> f32 {
        match self {
            BlockScale::Normal(scale) => scale,
            BlockScale::Zero => 0.0,
            BlockScale::NonFinite => f32::NAN,
        }
    }
}

/// Readable twin of [`encode_blocks`], and its path without SIMD.
pub(crate) fn encode_blocks_naive(
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
        *scale = encode_block_naive(map, keep_nonzero, x, codes);
    }
}

/// Readable twin of [`encode_block`].
pub(crate) fn encode_block_naive(
    map: &DynamicMap,
    keep_nonzero: bool,
    x: &[f32],
    codes: &mut [u8],
) -> f32 {
    // NaN and infinity have the largest bits.
    let absmax_bits = x.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0);
    let scale = BlockScale::of(absmax_bits);
    match scale {
        BlockScale::Normal(s) => encode_values_naive(map, keep_nonzero, x, s, codes),
        BlockScale::Zero | BlockScale::NonFinite => codes.fill(map.zero_code()),
    }
    scale.stored()
}

pub(crate) fn encode_values_naive(
    map: &DynamicMap,
    keep_nonzero: bool,
    x: &[f32],
    scale: f32,
    codes: &mut [u8],
) {
    for (&x, code) in x.iter().zip(codes) {
        *code = encode_value_naive(map, keep_nonzero, x, scale);
    }
}

fn encode_value_naive(map: &DynamicMap, keep_nonzero: bool, x: f32, scale: f32) -> u8 {
    let code = map.nearest(x / scale);
    if keep_nonzero && x > 0.0 {
        code.max(1)
    } else {
        code
    }
}

/// Readable twin of [`decode_blocks`], and its path without SIMD.
pub(crate) fn decode_blocks_naive(
    map: &DynamicMap,
    accumulate: bool,
    block: usize,
    codes: &[u8],
    scales: &[f32],
    x: &mut [f32],
) {
    assert!(x.len() == codes.len() && scales.len() == x.len().div_ceil(block));
    let blocks = x.chunks_mut(block).zip(codes.chunks(block));
    for ((x, codes), &scale) in blocks.zip(scales) {
        decode_block_naive(map, accumulate, codes, scale, x);
    }
}

pub(crate) fn decode_block_naive(
    map: &DynamicMap,
    accumulate: bool,
    codes: &[u8],
    scale: f32,
    x: &mut [f32],
) {
    for (x, &code) in x.iter_mut().zip(codes) {
        let value = map.values()[code as usize] * scale;
        *x = if accumulate { *x + value } else { value };
    }
}

/// Distances from the boundary below, as the kernel measures them, that need an exact comparison.
pub(crate) const fn near_boundary(signed: bool) -> u16 {
    if signed {
        2 * BOUNDARY_MARGIN
    } else {
        4 * BOUNDARY_MARGIN
    }
}

/// Encodes exactly the values whose `lines` are near a boundary.
#[cold]
#[inline(never)]
pub(crate) fn settle_near_boundaries(
    map: &DynamicMap,
    keep_nonzero: bool,
    x: &[f32],
    scale: f32,
    lines: &[f32],
    codes: &mut [u8],
) {
    let doubled = u32::from(!map.is_signed());
    for (i, line) in lines.iter().enumerate() {
        let distance = (line.to_bits() << doubled) as u16;
        if distance < near_boundary(map.is_signed()) {
            codes[i] = encode_value_naive(map, keep_nonzero, x[i], scale);
        }
    }
}
