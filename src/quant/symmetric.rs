//! Symmetric block quantization to 8 or 4 bits: what qwZ and qgZ send (ZeRO++, sections 3.1 and 3.3).
//!
//! A block's scale is `s = absmax / (2^(bits-1) - 1)`, rounded up to bf16, and a value's code is
//! `x / s` rounded half to even. An encoding is all codes (4-bit ones two a byte, the first in the low half), then all
//! scales. A block with a value that is not finite has a NaN scale and decodes to NaNs; one without
//! anything above the smallest normal scale decodes to zeros.

// `simd_kernel!` names an instruction set by a type, which bodies without a fused multiply-add ignore.
#![allow(clippy::extra_unused_type_parameters)]

use super::Codec;
use crate::simd::Isa;
use crate::simd::body::Arithmetic;
use crate::{Error, Result, simd_kernel};

/// Values worked on at a time.
const STEP: usize = 32;

/// Adding 1.5 * 2^23 rounds to an integer, half to even, which is then in the low bits.
const MAGIC: f32 = 12_582_912.0;

/// The scale of a block with a value that is not finite, as bf16.
const NAN_SCALE: u16 = 0x7fc0;

/// The symmetric codec of a number of bits and a block size.
#[derive(Clone, Copy, Debug)]
pub struct Symmetric {
    bits: u32,
    block: usize,
    isa: Isa,
}

impl Symmetric {
    /// `bits` is 8 or 4; `block` a divisor of 2048, at least 64.
    pub fn new(bits: u32, block: usize) -> Self {
        assert!(matches!(bits, 4 | 8), "{bits} bits: 4 or 8");
        assert!(
            block.is_power_of_two() && (64..=2048).contains(&block),
            "block {block} is not a divisor of 2048 from 64"
        );
        Self {
            bits,
            block,
            isa: Isa::best(),
        }
    }

    /// The same codec on one of [`Isa::supported`]; the default is the best of them.
    pub fn on(mut self, isa: Isa) -> Self {
        self.isa = isa;
        self
    }

    /// The largest code.
    fn max_code(&self) -> f32 {
        ((1u32 << (self.bits - 1)) - 1) as f32
    }

    fn code_bytes(&self, num_values: usize) -> usize {
        match self.bits {
            8 => num_values,
            _ => num_values.div_ceil(2),
        }
    }

    /// Calls `f(scale, codes, values)` for every block.
    fn for_each_block(
        &self,
        bytes: &[u8],
        values: &mut [f32],
        f: impl Fn(f32, &[u8], &mut [f32]),
    ) -> Result<()> {
        if bytes.len() != self.encoded_bytes(values.len()) {
            return Err(Error::Peer(format!(
                "{} bytes for {} values of {}: expected {}",
                bytes.len(),
                values.len(),
                self.name(),
                self.encoded_bytes(values.len())
            )));
        }
        let (codes, scales) = bytes.split_at(self.code_bytes(values.len()));
        let blocks = values
            .chunks_mut(self.block)
            .zip(codes.chunks(self.code_bytes(self.block)));
        for ((values, codes), scale) in blocks.zip(scales.as_chunks().0) {
            f(from_bf16(u16::from_le_bytes(*scale)), codes, values);
        }
        Ok(())
    }

    /// Readable twin of [`Codec::encode`].
    pub fn encode_naive(&self, values: &[f32], bytes: &mut [u8]) {
        let (codes, scales) = bytes.split_at_mut(self.code_bytes(values.len()));
        codes.fill(0);
        for (block, values) in values.chunks(self.block).enumerate() {
            let absmax = values.iter().fold(0.0f32, |max, v| max.max(v.abs()));
            let scale = match values.iter().all(|v| v.is_finite()) {
                true => bf16_above(absmax / self.max_code()),
                false => NAN_SCALE,
            };
            scales[2 * block..][..2].copy_from_slice(&scale.to_le_bytes());
            for (i, value) in values.iter().enumerate() {
                let code = match from_bf16(scale) {
                    s if s > 0.0 => (value / s).round_ties_even() as i32,
                    _ => 0,
                };
                let code = code.clamp(-self.max_code() as i32, self.max_code() as i32);
                let i = block * self.block + i;
                match self.bits {
                    8 => codes[i] = code as u8,
                    _ => codes[i / 2] |= (code as u8 & 15) << (i % 2 * 4),
                }
            }
        }
    }

    /// Readable twin of [`Codec::decode`], of an encoding of the right length.
    pub fn decode_naive(&self, bytes: &[u8], values: &mut [f32]) {
        let (codes, scales) = bytes.split_at(self.code_bytes(values.len()));
        for (i, value) in values.iter_mut().enumerate() {
            let scale = &scales[i / self.block * 2..][..2];
            let code = match self.bits {
                8 => codes[i] as i8,
                _ => ((codes[i / 2] >> (i % 2 * 4)) << 4) as i8 >> 4,
            };
            *value = code as f32 * from_bf16(u16::from_le_bytes([scale[0], scale[1]]));
        }
    }
}

/// The smallest bf16 that is not below a positive `value`; 0 for what is no normal number.
fn bf16_above(value: f32) -> u16 {
    match value < f32::MIN_POSITIVE {
        true => 0,
        false => ((value.to_bits() + 0xffff) >> 16) as u16,
    }
}

fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The scale of a block, as bf16.
#[inline(always)]
fn scale_body<I: Arithmetic>(values: &[f32], max_code: f32) -> u16 {
    // Magnitudes order like their bits, and what is not finite is above all of them.
    let mut max = [0u32; STEP];
    let (steps, rest) = values.as_chunks::<STEP>();
    for step in steps {
        for i in 0..STEP {
            max[i] = max[i].max(step[i].to_bits() & 0x7fff_ffff);
        }
    }
    for value in rest {
        max[0] = max[0].max(value.to_bits() & 0x7fff_ffff);
    }
    let max = max.into_iter().fold(0, u32::max);
    match max >= f32::INFINITY.to_bits() {
        true => NAN_SCALE,
        false => bf16_above(f32::from_bits(max) / max_code),
    }
}

#[inline(always)]
fn code(value: f32, scale: f32, max_code: f32) -> u8 {
    let code = value / scale;
    let code = if code > max_code { max_code } else { code };
    let code = if code < -max_code { -max_code } else { code };
    (code + MAGIC).to_bits() as u8
}

#[inline(always)]
fn encode8_body<I: Arithmetic>(values: &[f32], scale: f32, codes: &mut [u8]) {
    for (out, value) in codes.iter_mut().zip(values) {
        *out = code(*value, scale, 127.0);
    }
}

#[inline(always)]
fn encode4_body<I: Arithmetic>(values: &[f32], scale: f32, codes: &mut [u8]) {
    let (pairs, rest) = values.as_chunks::<2>();
    for (out, [low, high]) in codes.iter_mut().zip(pairs) {
        *out = code(*low, scale, 7.0) & 15 | code(*high, scale, 7.0) << 4;
    }
    if let ([value], Some(out)) = (rest, codes.last_mut()) {
        *out = code(*value, scale, 7.0) & 15;
    }
}

#[inline(always)]
fn decode8_body<I: Arithmetic>(codes: &[u8], scale: f32, values: &mut [f32], add: bool) {
    for (value, code) in values.iter_mut().zip(codes) {
        let decoded = f32::from(*code as i8) * scale;
        *value = if add { *value + decoded } else { decoded };
    }
}

#[inline(always)]
fn decode4_body<I: Arithmetic>(codes: &[u8], scale: f32, values: &mut [f32], add: bool) {
    let (pairs, rest) = values.as_chunks_mut::<2>();
    for (pair, code) in pairs.iter_mut().zip(codes) {
        let low = f32::from((code << 4) as i8 >> 4) * scale;
        let high = f32::from(*code as i8 >> 4) * scale;
        *pair = match add {
            true => [pair[0] + low, pair[1] + high],
            false => [low, high],
        };
    }
    if let ([value], Some(code)) = (rest, codes.last()) {
        let low = f32::from((code << 4) as i8 >> 4) * scale;
        *value = if add { *value + low } else { low };
    }
}

simd_kernel! { fn block_scale(values: &[f32], max_code: f32) -> u16 = scale_body }
simd_kernel! { fn encode8(values: &[f32], scale: f32, codes: &mut [u8]) = encode8_body }
simd_kernel! { fn encode4(values: &[f32], scale: f32, codes: &mut [u8]) = encode4_body }
simd_kernel! { fn decode8(codes: &[u8], scale: f32, values: &mut [f32], add: bool) = decode8_body }
simd_kernel! { fn decode4(codes: &[u8], scale: f32, values: &mut [f32], add: bool) = decode4_body }

impl Codec for Symmetric {
    fn name(&self) -> String {
        format!("int{}/{}", self.bits, self.block)
    }

    fn block(&self) -> usize {
        self.block
    }

    fn encoded_bytes(&self, num_values: usize) -> usize {
        self.code_bytes(num_values) + 2 * num_values.div_ceil(self.block)
    }

    fn encode(&self, values: &[f32], bytes: &mut [u8]) {
        let (codes, scales) = bytes.split_at_mut(self.code_bytes(values.len()));
        let blocks = values
            .chunks(self.block)
            .zip(codes.chunks_mut(self.code_bytes(self.block)));
        for ((values, codes), out) in blocks.zip(scales.as_chunks_mut().0) {
            let scale = block_scale::on(self.isa, values, self.max_code());
            *out = scale.to_le_bytes();
            match (from_bf16(scale), self.bits) {
                (s, 8) if s > 0.0 => encode8::on(self.isa, values, s, codes),
                (s, _) if s > 0.0 => encode4::on(self.isa, values, s, codes),
                _ => codes.fill(0),
            }
        }
    }

    fn decode(&self, bytes: &[u8], values: &mut [f32]) -> Result<()> {
        let (isa, bits) = (self.isa, self.bits);
        self.for_each_block(bytes, values, |scale, codes, values| match bits {
            8 => decode8::on(isa, codes, scale, values, false),
            _ => decode4::on(isa, codes, scale, values, false),
        })
    }

    fn decode_accumulate(&self, bytes: &[u8], sums: &mut [f32]) -> Result<()> {
        let (isa, bits) = (self.isa, self.bits);
        self.for_each_block(bytes, sums, |scale, codes, sums| match bits {
            8 => decode8::on(isa, codes, scale, sums, true),
            _ => decode4::on(isa, codes, scale, sums, true),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn codecs() -> impl Iterator<Item = Symmetric> {
        [4, 8].into_iter().flat_map(|bits| {
            let blocks = [64, 256, 2048].into_iter();
            blocks.map(move |block| Symmetric::new(bits, block))
        })
    }

    proptest! {
        #[test]
        fn every_set_gives_the_twins_bits(
            values in prop::collection::vec(
                prop_oneof![
                    6 => any::<f32>(),
                    6 => -3.0f32..3.0,
                    1 => Just(0.0),
                ],
                0..700,
            ),
            finite: bool,
        ) {
            let keep = |v: &f32| !finite || v.is_finite();
            let values: Vec<f32> = values.into_iter().filter(keep).collect();
            for codec in codecs() {
                let mut twin = vec![0; codec.encoded_bytes(values.len())];
                codec.encode_naive(&values, &mut twin);
                let mut twin_values = vec![0.0; values.len()];
                codec.decode_naive(&twin, &mut twin_values);
                for isa in Isa::supported() {
                    let codec = codec.on(isa);
                    let mut bytes = vec![0xaa; twin.len()];
                    codec.encode(&values, &mut bytes);
                    prop_assert_eq!(&bytes, &twin, "{:?} {}", isa, codec.name());
                    let mut decoded = vec![7.0; values.len()];
                    codec.decode(&bytes, &mut decoded).unwrap();
                    let mut sums = vec![1.0; values.len()];
                    codec.decode_accumulate(&bytes, &mut sums).unwrap();
                    for ((value, sum), twin) in decoded.iter().zip(&sums).zip(&twin_values) {
                        prop_assert_eq!(value.to_bits(), twin.to_bits());
                        prop_assert_eq!(sum.to_bits(), (1.0 + twin).to_bits());
                    }
                }
            }
        }

        #[test]
        fn a_wrong_length_is_an_error(len in 0usize..400, extra in 1usize..9) {
            for codec in codecs() {
                let bytes = vec![0; codec.encoded_bytes(len) + extra];
                prop_assert!(codec.decode(&bytes, &mut vec![0.0; len]).is_err());
            }
        }
    }

    #[test]
    fn errors_are_half_a_step_and_the_largest_value_is_not_biased() {
        let values: Vec<f32> = (0..4096)
            .map(|i| ((i * 37 % 509) as f32 - 254.0) * 0.01)
            .collect();
        for codec in codecs() {
            let mut bytes = vec![0; codec.encoded_bytes(values.len())];
            codec.encode(&values, &mut bytes);
            let mut decoded = vec![0.0; values.len()];
            codec.decode(&bytes, &mut decoded).unwrap();
            for (values, decoded) in values.chunks(codec.block).zip(decoded.chunks(codec.block)) {
                let absmax = values.iter().fold(0.0f32, |max, v| max.max(v.abs()));
                // The scale was rounded up, by one part in 128 at most.
                let step = absmax / codec.max_code() * (1.0 + 1.0 / 128.0);
                for (value, decoded) in values.iter().zip(decoded) {
                    assert!((value - decoded).abs() <= step * 0.501, "{value} {decoded}");
                    assert!(*value != 0.0 || *decoded == 0.0);
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_shows_and_stays_in_its_block() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for codec in codecs() {
                let mut values = vec![0.5; 3 * codec.block];
                values[codec.block + 3] = odd;
                let mut bytes = vec![0; codec.encoded_bytes(values.len())];
                codec.encode(&values, &mut bytes);
                codec.decode(&bytes, &mut values).unwrap();
                for (block, values) in values.chunks(codec.block).enumerate() {
                    assert!(values.iter().all(|v| v.is_nan() == (block == 1)));
                }
            }
        }
    }
}
