//! Floats as they are, and rounded to bf16: the codecs without scales.

use super::Codec;
use crate::{Error, Result};

/// A float format on the wire: N little-endian bytes a value.
trait Format<const N: usize> {
    const NAME: &'static str;

    fn to_bytes(value: f32) -> [u8; N];

    fn from_bytes(bytes: [u8; N]) -> f32;
}

/// Little-endian f32: what no codec at all sends.
#[derive(Clone, Copy, Debug, Default)]
pub struct F32;

/// bf16, the upper half of an f32, rounded half to even. NaN stays NaN, overflow is infinity.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bf16;

impl Format<4> for F32 {
    const NAME: &'static str = "f32";

    fn to_bytes(value: f32) -> [u8; 4] {
        value.to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 4]) -> f32 {
        f32::from_le_bytes(bytes)
    }
}

impl Format<2> for Bf16 {
    const NAME: &'static str = "bf16";

    fn to_bytes(value: f32) -> [u8; 2] {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // Rounding could carry a NaN's last bits away.
        let nan = bits >> 16 | 0x40;
        ((if value.is_nan() { nan } else { rounded }) as u16).to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
    }
}

/// `bytes` as pieces of N for `num_values` values.
fn pieces<const N: usize>(bytes: &[u8], num_values: usize) -> Result<&[[u8; N]]> {
    match bytes.as_chunks() {
        (pieces, []) if pieces.len() == num_values => Ok(pieces),
        _ => Err(Error::Peer(format!(
            "{} bytes for {num_values} values of {N} bytes",
            bytes.len()
        ))),
    }
}

/// What both codecs do, by their formats.
macro_rules! codec {
    ($format:ty, $bytes:literal, $is_identity:expr) => {
        impl Codec for $format {
            fn name(&self) -> String {
                Self::NAME.into()
            }

            fn is_identity(&self) -> bool {
                $is_identity
            }

            fn block(&self) -> usize {
                1
            }

            fn encoded_bytes(&self, num_values: usize) -> usize {
                num_values * $bytes
            }

            fn encode(&self, values: &[f32], bytes: &mut [u8]) {
                for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                    *bytes = Self::to_bytes(*value);
                }
            }

            fn decode(&self, bytes: &[u8], values: &mut [f32]) -> Result<()> {
                let pieces = pieces(bytes, values.len())?;
                for (value, bytes) in values.iter_mut().zip(pieces) {
                    *value = Self::from_bytes(*bytes);
                }
                Ok(())
            }

            fn decode_accumulate(&self, bytes: &[u8], sums: &mut [f32]) -> Result<()> {
                let pieces = pieces(bytes, sums.len())?;
                for (sum, bytes) in sums.iter_mut().zip(pieces) {
                    *sum += Self::from_bytes(*bytes);
                }
                Ok(())
            }
        }
    };
}

codec!(F32, 4, cfg!(target_endian = "little"));
codec!(Bf16, 2, false);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip(codec: &dyn Codec, values: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0; codec.encoded_bytes(values.len())];
        codec.encode(values, &mut bytes);
        let mut decoded = vec![f32::NAN; values.len()];
        codec.decode(&bytes, &mut decoded).unwrap();
        let mut sums = vec![1.0; values.len()];
        codec.decode_accumulate(&bytes, &mut sums).unwrap();
        for (sum, value) in sums.iter().zip(&decoded) {
            assert_eq!(sum.to_bits(), (1.0 + value).to_bits());
        }
        decoded
    }

    /// The nearest of the two bf16 neighbours, ties to the even one.
    fn naive(value: f32) -> f32 {
        let down = f32::from_bits(value.to_bits() & 0xffff_0000);
        let up = f32::from_bits((value.to_bits() & 0xffff_0000).wrapping_add(0x1_0000));
        let gap = |to: f32| (value as f64 - to as f64).abs();
        // The step beyond the largest finite value counts as another step of the same size.
        let to_up = match up.is_finite() {
            true => gap(up),
            false => {
                (down as f64 - f64::from(f32::from_bits(down.to_bits() - 0x1_0000))).abs()
                    - gap(down)
            }
        };
        let even = down.to_bits() >> 16 & 1 == 0;
        match gap(down).total_cmp(&to_up) {
            std::cmp::Ordering::Less => down,
            std::cmp::Ordering::Greater => up,
            std::cmp::Ordering::Equal => {
                if even {
                    down
                } else {
                    up
                }
            }
        }
    }

    proptest! {
        #[test]
        fn bf16_is_the_nearest_and_f32_exact(bits in prop::collection::vec(any::<u32>(), 0..40)) {
            let values: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
            for (value, decoded) in values.iter().zip(round_trip(&Bf16, &values)) {
                if value.is_nan() || value.is_infinite() {
                    prop_assert_eq!(value.is_nan(), decoded.is_nan());
                    prop_assert!(value.is_nan() || *value == decoded);
                } else {
                    prop_assert_eq!(decoded.to_bits(), naive(*value).to_bits(), "{}", value);
                }
            }
            let finite: Vec<f32> = values.into_iter().filter(|v| !v.is_nan()).collect();
            let exact = round_trip(&F32, &finite);
            prop_assert!(exact.iter().zip(&finite).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }

    #[test]
    fn a_wrong_number_of_bytes_is_refused() {
        for codec in [&F32 as &dyn Codec, &Bf16] {
            for len in [0, 3, 9, 100] {
                let error = codec.decode(&vec![0; len], &mut [0.0; 4]).unwrap_err();
                assert!(error.to_string().contains("for 4 values"), "{error}");
            }
        }
    }
}
