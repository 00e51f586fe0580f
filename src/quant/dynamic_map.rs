//! The dynamic maps: what the 256 codes of 8-bit state stand for (8-bit Optimizers, sections 1.3
//! and 2.2), and the tables that let SIMD code compute them instead of looking them up.
//!
//! Signed: {0, 1} and +-10^(i-6) (0.1 + 0.9 (k + 1/2) / 2^i), 0 <= k < 2^i.
//! Unsigned: {0, 1} and 10^(i-6) (0.1 + 0.9 (k + 1/2) / 2^(i+1)), 0 <= k < 2^(i+1); i = 0..6.
//! Codes number the values in ascending order.
//!
//! Within decade i both are straight lines, so a value is one fused multiply-add: that is how the
//! tables here are made (within 2 ulp of the closed form), and what the kernels repeat.

use std::sync::OnceLock;

/// Steps of 2^-16 by which [`LineTables`] looks early for code boundaries. Rounding moves a
/// boundary by about 3 of them; the exhaustive test checks it.
pub(crate) const BOUNDARY_MARGIN: u16 = 5;

/// A 256-code dynamic map with its exact boundaries.
pub struct DynamicMap {
    signed: bool,
    values: [f32; 256],
    /// `boundaries[j]` is the smallest f32 whose nearest non-negative value is number `j + 1`.
    boundaries: Vec<f32>,
    pub(crate) decode: DecodeTables,
    pub(crate) encode: LineTables,
}

/// Constants for decoding, indexed by the exponent of the code's number (mod 8), twice over.
pub(crate) struct DecodeTables {
    pub slope: [f32; 16],
    pub start: [f32; 16],
}

/// Constants for encoding, indexed by decade.
///
/// With y = |x| / scale, the place in decade i is w = 8/9 + slope[i] y, from 1 to 2, and the nearest
/// value's number is the integer part of 2^i w (signed) or 2^(i+1) w - 1 (unsigned).
pub(crate) struct LineTables {
    /// What y must reach, before rounding to f32, to be in the decade.
    bound: [f64; 8],
    slope: [f32; 8],
    /// What y must reach, before rounding, not to be 0: the unsigned map's decade 0 starts before.
    nonzero: f64,
}

/// [`LineTables`] for one block: in terms of |x|, so that no value is divided by the scale. Twice
/// over, to fill 16 lanes.
pub(crate) struct ScaledTables {
    /// The smallest |x| of the decade, exactly.
    pub bound: [f32; 16],
    /// Slope over scale: rounding makes up to 3 steps of [`BOUNDARY_MARGIN`].
    pub slope: [f32; 16],
    /// The smallest x whose value is not 0, exactly.
    pub nonzero: f32,
}

impl DynamicMap {
    /// The map for values of either sign: code 127 is 0, 255 is 1, 0 is -0.99297.
    pub fn signed() -> &'static DynamicMap {
        static MAP: OnceLock<DynamicMap> = OnceLock::new();
        MAP.get_or_init(|| DynamicMap::new(true))
    }

    /// The map for non-negative values, with twice the resolution: code 0 is 0, 255 is 1.
    pub fn unsigned() -> &'static DynamicMap {
        static MAP: OnceLock<DynamicMap> = OnceLock::new();
        MAP.get_or_init(|| DynamicMap::new(false))
    }

    /// Whether it has negative values.
    pub fn is_signed(&self) -> bool {
        self.signed
    }

    /// The values, ascending; the index is the code.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// The code of 0.
    pub fn zero_code(&self) -> u8 {
        if self.signed { 127 } else { 0 }
    }

    /// The code of the value nearest to `y`, in -1..=1. Ties go away from zero; the signed map has
    /// no -1, so what is below its lowest value gets that; the unsigned map takes a negative `y`
    /// as 0. This is the readable twin of the kernels.
    pub fn nearest(&self, y: f32) -> u8 {
        let number = self.boundaries.partition_point(|&b| b <= y.abs()) as i32;
        match (self.signed, y < 0.0) {
            (true, true) => (127 - number).max(0) as u8,
            (true, false) => (127 + number) as u8,
            (false, true) => 0,
            (false, false) => number as u8,
        }
    }

    fn new(signed: bool) -> DynamicMap {
        // The non-negative values by number: 0, the decades, 1. Decade i has 2^bits of them.
        let bits = |i: i32| if signed { i } else { i + 1 };
        let mut numbers = vec![0.0f32];
        let (mut slope, mut start) = ([0.0f32; 8], [0.0f32; 8]);
        for i in 0..7 {
            let scale = 10f64.powi(i - 6);
            let steps = 1 << bits(i);
            let (a, b) = (scale * 0.9 / steps as f64, scale * 0.1);
            // A kernel works with the number + 1/2 (signed: number = 2^i + k) or the number + 1
            // (unsigned: number + 1 = 2^(i+1) + k); below its leading bit that leaves k + 1/2 or k.
            let offset = if signed { 0.5 } else { 0.0 };
            let slot = ((127 + bits(i)) % 8) as usize;
            slope[slot] = a as f32;
            start[slot] = (b + a * (0.5 - offset)) as f32;
            for k in 0..steps {
                let k = (k as f64 + offset) as f32;
                numbers.push(k.mul_add(slope[slot], start[slot]));
            }
        }
        numbers.push(1.0);
        if signed {
            // Numbers 0 and 128 share slot 6: 0.5 and 128.5 leave 0 and 0.5 below the leading bit.
            (slope[6], start[6]) = (2.0, 0.0);
        } else {
            // Numbers 0 and 255 share slot 7, which gives 1; kernels take the minimum with the code.
            (slope[7], start[7]) = (0.0, 1.0);
        }

        let boundaries: Vec<f32> = numbers
            .windows(2)
            .map(|w| midpoint_up(w[0], w[1]))
            .collect();
        let mut values = [0.0; 256];
        if signed {
            for (j, &value) in numbers.iter().enumerate() {
                values[127 + j] = value;
                if (1..=127).contains(&j) {
                    values[127 - j] = -value;
                }
            }
        } else {
            values.copy_from_slice(&numbers);
        }
        DynamicMap {
            signed,
            values,
            encode: LineTables::new(signed, &boundaries),
            boundaries,
            decode: DecodeTables {
                slope: twice(slope),
                start: twice(start),
            },
        }
    }
}

impl LineTables {
    fn new(signed: bool, boundaries: &[f32]) -> LineTables {
        let (mut bound, mut slope) = ([0.0; 8], [0.0; 8]);
        for i in 0..8 {
            // Number of the decade's first value; decade 0 has the value 0 as well.
            let first = if signed { 1usize << i } else { (2 << i) - 1 };
            if i > 0 {
                bound[i] = rounds_up_to(boundaries[first - 1]);
            }
            slope[i] = match i {
                // One value, from the boundary to 0 on.
                0 if signed => 1.0 / (9.0 * f64::from(boundaries[0])),
                // The value 1: w a little above 1 for every y from the bound to 1.
                7 => 1.0 / 9.0 + 1.0 / 512.0,
                _ => 10f64.powi(6 - i as i32) / 0.9,
            } as f32;
        }
        LineTables {
            bound,
            slope,
            nonzero: rounds_up_to(boundaries[0]),
        }
    }

    /// The tables for blocks of this scale, between 1e-21 and 1e30.
    #[inline(always)]
    pub(crate) fn scaled(&self, scale: f32) -> ScaledTables {
        let inverse = 1.0 / scale;
        let bound: [f32; 8] = std::array::from_fn(|i| f32_from(self.bound[i] * f64::from(scale)));
        let slope: [f32; 8] = std::array::from_fn(|i| self.slope[i] * inverse);
        ScaledTables {
            bound: twice(bound),
            slope: twice(slope),
            nonzero: f32_from(self.nonzero * f64::from(scale)),
        }
    }
}

/// What a real quotient must reach for its f32 to be `y` or more: half a step below, which rounds
/// up if `y` is even; just above that if `y` is odd. Times an f32 it is exact in f64, or keeps to
/// its side of the exact product.
fn rounds_up_to(y: f32) -> f64 {
    let half_way = (f64::from(y) + f64::from(y.next_down())) / 2.0;
    if y.to_bits().is_multiple_of(2) {
        half_way
    } else {
        half_way.next_up()
    }
}

/// The smallest f32 not below `x`, which is positive or 0 and no larger than an f32.
#[inline(always)]
fn f32_from(x: f64) -> f32 {
    let near = x as f32;
    f32::from_bits(near.to_bits() + u32::from(f64::from(near) < x))
}

#[inline(always)]
fn twice(entries: [f32; 8]) -> [f32; 16] {
    std::array::from_fn(|i| entries[i % 8])
}

/// The smallest f32 not below (a + b) / 2.
fn midpoint_up(a: f32, b: f32) -> f32 {
    f32_from((f64::from(a) + f64::from(b)) / 2.0) // exact: both have 24 bits, few binades apart
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The closed form, in f64.
    fn closed_form(signed: bool) -> Vec<f64> {
        let mut values = vec![0.0, 1.0];
        for i in 0..7 {
            let steps = if signed { 1 << i } else { 2 << i };
            for k in 0..steps {
                let y = 10f64.powi(i - 6) * (0.1 + 0.9 * (k as f64 + 0.5) / steps as f64);
                values.push(y);
                if signed {
                    values.push(-y);
                }
            }
        }
        values.sort_by(f64::total_cmp);
        values
    }

    fn ulps(a: f32, b: f32) -> u32 {
        assert_eq!(a.is_sign_negative(), b.is_sign_negative());
        a.to_bits().abs_diff(b.to_bits())
    }

    /// Golden values: bitsandbytes' `create_dynamic_map`, one `signed unsigned` pair of f32 bit
    /// patterns a line.
    #[test]
    fn values_are_within_2_ulp_of_the_reference() {
        let golden = include_str!("../../tests/golden/dynamic_map.txt");
        let mut lines = 0;
        for (code, line) in golden.lines().filter(|l| !l.starts_with('#')).enumerate() {
            let (signed, unsigned) = line.split_once(' ').unwrap();
            for (map, bits) in [
                (DynamicMap::signed(), signed),
                (DynamicMap::unsigned(), unsigned),
            ] {
                let reference = f32::from_bits(u32::from_str_radix(bits, 16).unwrap());
                let value = map.values()[code];
                assert!(ulps(value, reference) <= 2, "{code}: {value} {reference}");
            }
            lines += 1;
        }
        assert_eq!(lines, 256);
    }

    #[test]
    fn values_are_within_2_ulp_of_the_closed_form() {
        for map in [DynamicMap::signed(), DynamicMap::unsigned()] {
            let exact = closed_form(map.is_signed());
            assert_eq!(exact.len(), 256);
            for (&value, &exact) in map.values().iter().zip(&exact) {
                assert!(ulps(value, exact as f32) <= 2, "{value} {exact}");
            }
            assert_eq!(map.values()[map.zero_code() as usize].to_bits(), 0);
            assert_eq!(map.values()[255], 1.0);
        }
    }

    #[test]
    fn nearest_is_nearest() {
        for map in [DynamicMap::signed(), DynamicMap::unsigned()] {
            let distance =
                |code: usize, y: f32| (f64::from(map.values()[code]) - f64::from(y)).abs();
            let low = if map.is_signed() { -1.0f32 } else { 0.0 };
            let mut ys: Vec<f32> = (0..20_000)
                .map(|i| low + (1.0 - low) * i as f32 / 19_999.0)
                .collect();
            for w in map.values().windows(2) {
                let mid = ((f64::from(w[0]) + f64::from(w[1])) / 2.0) as f32;
                ys.extend([mid.next_down(), mid, mid.next_up(), w[0], w[1]]);
            }
            for y in ys {
                let code = map.nearest(y) as usize;
                let best = (0..256).map(|c| distance(c, y)).fold(f64::MAX, f64::min);
                assert_eq!(distance(code, y), best, "{y} got code {code}");
                // A tie goes to the code further from zero.
                for other in [code.wrapping_sub(1), code + 1] {
                    if other < 256 && distance(other, y) == best {
                        assert!(map.values()[other].abs() < map.values()[code].abs());
                    }
                }
            }
            assert_eq!(map.nearest(0.0), map.zero_code());
            assert_eq!(map.nearest(-0.0), map.zero_code());
            for (code, &value) in map.values().iter().enumerate() {
                assert_eq!(map.nearest(value) as usize, code);
            }
        }
    }
}
