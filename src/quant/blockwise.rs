//! Block-wise quantization with a dynamic map (8-bit Optimizers, section 2.1): every block of
//! values has its own scale, the block's largest magnitude, and a byte a value.

use rayon::prelude::*;

use super::dynamic_kernel::{decode_blocks, encode_blocks};
use super::dynamic_naive::{MAX_BLOCK, decode_blocks_naive, encode_blocks_naive};
use super::{Codec, DynamicMap};
use crate::simd::Isa;
use crate::{Error, Result};

/// Values a task works on: whole blocks, and small enough to stay in L2.
const TASK_VALUES: usize = 32 * 1024;

/// The block-wise dynamic quantizer.
///
/// A value's code is that of the map's value nearest to `x / scale`, the f32 quotient; see
/// [`DynamicMap::nearest`] for ties. A block with a NaN or an infinity has a NaN scale and decodes
/// to NaNs; one with nothing above 1.2e-38 (denormals) has scale 0 and decodes to zeros. Exact
/// zeros stay zeros. With the unsigned map, negative values become 0.
#[derive(Clone, Copy)]
pub struct Blockwise {
    map: &'static DynamicMap,
    block: usize,
    keep_nonzero: bool,
    isa: Isa,
}

impl Blockwise {
    /// Signed map, for values of either sign. `block` is a divisor of 2048, at least 64.
    pub fn signed(block: usize) -> Blockwise {
        Blockwise::new(DynamicMap::signed(), block)
    }

    /// Unsigned map, for non-negative values. `block` is a divisor of 2048, at least 64.
    pub fn unsigned(block: usize) -> Blockwise {
        Blockwise::new(DynamicMap::unsigned(), block)
    }

    fn new(map: &'static DynamicMap, block: usize) -> Blockwise {
        assert!(
            block.is_power_of_two() && (64..=MAX_BLOCK).contains(&block),
            "block {block} is not a divisor of {MAX_BLOCK} from 64"
        );
        Blockwise {
            map,
            block,
            keep_nonzero: false,
            isa: Isa::best(),
        }
    }

    /// Gives positive values at least code 1, so that they do not become 0: for second moments,
    /// which divide. Unsigned map only.
    pub fn keep_nonzero(mut self) -> Blockwise {
        assert!(
            !self.map.is_signed(),
            "only the unsigned map keeps non-zeros"
        );
        self.keep_nonzero = true;
        self
    }

    /// The same codec on one of [`Isa::supported`]; the default is the best of them.
    pub fn on(mut self, isa: Isa) -> Blockwise {
        self.isa = isa;
        self
    }

    /// The map.
    pub fn map(&self) -> &'static DynamicMap {
        self.map
    }

    /// Number of scales of `num_values` values.
    pub fn num_scales(&self, num_values: usize) -> usize {
        num_values.div_ceil(self.block)
    }

    /// Quantizes `values` into a code a value and a scale a block.
    pub fn quantize(&self, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        assert_eq!(values.len(), codes.len());
        assert_eq!(scales.len(), self.num_scales(values.len()));
        codes
            .par_chunks_mut(TASK_VALUES)
            .zip(values.par_chunks(TASK_VALUES))
            .zip(scales.par_chunks_mut(TASK_VALUES / self.block))
            .for_each(|((codes, values), scales)| self.encode_task(values, codes, scales));
    }

    /// The values of `codes` and `scales`.
    pub fn dequantize(&self, codes: &[u8], scales: &[f32], values: &mut [f32]) {
        assert_eq!(values.len(), codes.len());
        assert_eq!(scales.len(), self.num_scales(values.len()));
        values
            .par_chunks_mut(TASK_VALUES)
            .zip(codes.par_chunks(TASK_VALUES))
            .zip(scales.par_chunks(TASK_VALUES / self.block))
            .for_each(|((values, codes), scales)| {
                decode_blocks(self.isa, self.map, false, self.block, codes, scales, values);
            });
    }

    /// Readable, single-threaded twin of [`Blockwise::quantize`].
    pub fn quantize_naive(&self, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        encode_blocks_naive(
            self.map,
            self.keep_nonzero,
            self.block,
            values,
            codes,
            scales,
        );
    }

    /// Readable, single-threaded twin of [`Blockwise::dequantize`].
    pub fn dequantize_naive(&self, codes: &[u8], scales: &[f32], values: &mut [f32]) {
        decode_blocks_naive(self.map, false, self.block, codes, scales, values);
    }

    fn encode_task(&self, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        let keep = self.keep_nonzero;
        encode_blocks(self.isa, self.map, keep, self.block, values, codes, scales);
    }

    /// Decodes an encoding, in which scales are bytes.
    fn decode_into(&self, bytes: &[u8], values: &mut [f32], accumulate: bool) -> Result<()> {
        let expected = self.encoded_bytes(values.len());
        if bytes.len() != expected {
            return Err(Error::Peer(format!(
                "{} values in {} are {expected} bytes, but {} came",
                values.len(),
                self.name(),
                bytes.len()
            )));
        }
        let (codes, scales) = bytes.split_at(values.len());
        values
            .par_chunks_mut(TASK_VALUES)
            .zip(codes.par_chunks(TASK_VALUES))
            .zip(scales.par_chunks(TASK_VALUES / self.block * 4))
            .for_each(|((values, codes), bytes)| {
                let mut scales = [0.0; TASK_VALUES / 64];
                let scales = &mut scales[..bytes.len() / 4];
                for (scale, bytes) in scales.iter_mut().zip(bytes.as_chunks().0) {
                    *scale = f32::from_le_bytes(*bytes);
                }
                decode_blocks(
                    self.isa, self.map, accumulate, self.block, codes, scales, values,
                );
            });
        Ok(())
    }
}

/// The encoding is the codes, then the scales as little-endian f32.
impl Codec for Blockwise {
    fn name(&self) -> String {
        let kind = if self.map.is_signed() { "" } else { "u" };
        format!("{kind}dynamic8/{}", self.block)
    }

    fn block(&self) -> usize {
        self.block
    }

    fn encoded_bytes(&self, num_values: usize) -> usize {
        num_values + 4 * self.num_scales(num_values)
    }

    fn encode(&self, values: &[f32], bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.encoded_bytes(values.len()));
        let (codes, scales) = bytes.split_at_mut(values.len());
        codes
            .par_chunks_mut(TASK_VALUES)
            .zip(values.par_chunks(TASK_VALUES))
            .zip(scales.par_chunks_mut(TASK_VALUES / self.block * 4))
            .for_each(|((codes, values), bytes)| {
                let mut scales = [0.0; TASK_VALUES / 64];
                let scales = &mut scales[..bytes.len() / 4];
                self.encode_task(values, codes, scales);
                for (bytes, scale) in bytes.as_chunks_mut().0.iter_mut().zip(scales) {
                    *bytes = scale.to_le_bytes();
                }
            });
    }

    fn decode(&self, bytes: &[u8], values: &mut [f32]) -> Result<()> {
        self.decode_into(bytes, values, false)
    }

    fn decode_accumulate(&self, bytes: &[u8], sums: &mut [f32]) -> Result<()> {
        self.decode_into(bytes, sums, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values over nine decades, both signs, zeros among them.
    fn sample(n: usize) -> Vec<f32> {
        let value = |i: usize| {
            let x = (i as f32 * 12.9898).sin();
            if i % 11 == 3 {
                0.0
            } else {
                x * 10f32.powi((i % 9) as i32 - 8)
            }
        };
        (0..n).map(value).collect()
    }

    #[test]
    fn fused_equals_its_twin_for_every_block_and_ragged_size() {
        for block in [64, 128, 256, 512, 1024, 2048] {
            for n in [0, 1, 7, 63, 64, 65, 255, 2047, 2049, 5000, 70_001] {
                let x = sample(n);
                for codec in [
                    Blockwise::signed(block),
                    Blockwise::unsigned(block),
                    Blockwise::unsigned(block).keep_nonzero(),
                ] {
                    let (mut twin, mut twin_scales) = (vec![0; n], vec![0.0; codec.num_scales(n)]);
                    codec.quantize_naive(&x, &mut twin, &mut twin_scales);
                    let mut twin_values = vec![0.0; n];
                    codec.dequantize_naive(&twin, &twin_scales, &mut twin_values);
                    for isa in Isa::supported() {
                        let codec = codec.on(isa);
                        let (mut codes, mut scales) = (vec![0; n], vec![0.0; twin_scales.len()]);
                        codec.quantize(&x, &mut codes, &mut scales);
                        assert_eq!(scales, twin_scales);
                        assert!(codes == twin, "{isa:?} block {block} n {n}");
                        let mut values = vec![0.0; n];
                        codec.dequantize(&codes, &scales, &mut values);
                        assert_eq!(values, twin_values);
                    }
                }
            }
        }
    }

    #[test]
    fn encoding_is_what_the_size_says_and_accumulates() {
        let codec = Blockwise::signed(256);
        let x = sample(40_000);
        let mut bytes = vec![0; codec.encoded_bytes(x.len())];
        assert_eq!(bytes.len(), 40_000 + 4 * 157);
        codec.encode(&x, &mut bytes);
        let mut values = vec![0.0; x.len()];
        codec.decode(&bytes, &mut values).unwrap();
        let mut sums = vec![1.0; x.len()];
        codec.decode_accumulate(&bytes, &mut sums).unwrap();
        for ((x, value), sum) in x.iter().zip(&values).zip(&sums) {
            assert_eq!(*sum, 1.0 + value);
            assert!((x - value).abs() <= 0.0072);
        }
        assert!(codec.decode(&bytes[1..], &mut values).is_err());
    }

    #[test]
    fn zeros_stay_zeros_and_nothing_hides_a_nan() {
        let mut x = sample(1024);
        x[..256].fill(0.0);
        x[300] = f32::NAN;
        x[600] = f32::NEG_INFINITY;
        for codec in [Blockwise::signed(256), Blockwise::unsigned(256)] {
            for isa in Isa::supported() {
                let codec = codec.on(isa);
                let (mut codes, mut scales) = ([0; 1024], [0.0; 4]);
                codec.quantize(&x, &mut codes, &mut scales);
                let mut values = [1.0; 1024];
                codec.dequantize(&codes, &scales, &mut values);
                assert!(values[..256].iter().all(|&v| v.to_bits() == 0));
                assert!(values[256..768].iter().all(|v| v.is_nan()));
                assert!(scales[1].is_nan() && scales[2].is_nan());
                for (x, v) in x[768..].iter().zip(&values[768..]) {
                    assert!(v.is_finite() && (*x != 0.0 || *v == 0.0));
                }
            }
        }
    }

    /// Mean errors of N(0, 1) samples, as the paper's analysis (section 4, appendix D) reports.
    #[test]
    fn errors_on_normal_samples_are_small() {
        // Sums of 12 uniforms: normal enough for a mean.
        let mut state = 1u64;
        let mut uniform = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 24) as f32
        };
        let x: Vec<f32> = (0..1 << 18)
            .map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
            .collect();
        for block in [256, 2048] {
            let codec = Blockwise::signed(block);
            let (mut codes, mut scales) = (vec![0; x.len()], vec![0.0; codec.num_scales(x.len())]);
            codec.quantize(&x, &mut codes, &mut scales);
            let mut values = vec![0.0; x.len()];
            codec.dequantize(&codes, &scales, &mut values);
            let errors = x.iter().zip(&values).map(|(x, v)| f64::from((x - v).abs()));
            let mean = errors.sum::<f64>() / x.len() as f64;
            assert!(mean < 0.011, "block {block}: {mean}");
        }
    }
}
