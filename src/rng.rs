//! Counter-based random numbers: f(seed, purpose, index).
//!
//! There is no generator state, so a number depends on what it is for and not on who drew what
//! before: any rank, thread or resumed run computes the same one. The mixer is SplitMix64's
//! finalizer (Steele, Lea and Flood 2014, constants of Stafford's variant 13), applied twice with
//! two keys, so that streams of different seeds or purposes are not shifts of one another.

/// What a random number is for: each purpose is an independent stream of the same seed.
///
/// The numbers are part of what a seed means, so they never change and are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Initial parameters.
    Init = 1,
    /// Where training samples start.
    Sample = 2,
    /// Dropout masks.
    Dropout = 3,
    /// Tokens drawn when a model writes text.
    Text = 4,
    /// Stochastic rounding.
    Rounding = 5,
}

/// 2^64 divided by the golden ratio, odd.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A bijection of 64 bits in which each input bit flips each output bit with probability 1/2.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// 64 random bits for number `index` of stream `purpose` under `seed`.
#[inline]
pub fn hash(seed: u64, purpose: Purpose, index: u64) -> u64 {
    let key0 = mix(seed.wrapping_add(GOLDEN)) ^ (purpose as u64).wrapping_mul(GOLDEN);
    // Two rounds of mixing, so that key1 is no mix(key0 + i * GOLDEN) of an i that all seeds share:
    // number i would cancel it, and be the same under every seed.
    let key1 = mix(mix(key0 ^ 0xD1B5_4A32_D192_ED03));
    mix(mix(index.wrapping_mul(GOLDEN).wrapping_add(key0)) ^ key1)
}

/// A uniform number in [0, 1), a multiple of 2^-24.
#[inline]
pub fn uniform(seed: u64, purpose: Purpose, index: u64) -> f32 {
    const SCALE: f32 = 1.0 / (1u32 << 24) as f32;
    (hash(seed, purpose, index) >> 40) as f32 * SCALE
}

/// A number from the standard normal distribution (Box-Muller on the two halves of one hash), at
/// most 6.7 from zero.
#[inline]
pub fn normal(seed: u64, purpose: Purpose, index: u64) -> f32 {
    const SCALE: f64 = 1.0 / (1u64 << 32) as f64;
    let bits = hash(seed, purpose, index);
    let radius_uniform = ((bits >> 32) + 1) as f64 * SCALE; // in (0, 1]: its logarithm is finite
    let angle = (bits & 0xFFFF_FFFF) as f64 * SCALE * std::f64::consts::TAU;
    ((-2.0 * radius_uniform.ln()).sqrt() * angle.cos()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const PURPOSES: [Purpose; 5] = [
        Purpose::Init,
        Purpose::Sample,
        Purpose::Dropout,
        Purpose::Text,
        Purpose::Rounding,
    ];

    /// Changing these changes every run that was ever made.
    #[test]
    fn numbers_are_the_ones_of_the_first_release() {
        let got: Vec<u64> = PURPOSES.iter().map(|&p| hash(1337, p, 42)).collect();
        assert_eq!(got, GOLDEN_HASHES);
    }
    const GOLDEN_HASHES: [u64; 5] = [
        7184071779095506300,
        1504854723887388839,
        16638370816952667891,
        11905797513420822330,
        4863120004253816888,
    ];

    /// Pearson's statistic of `n` draws in `k` cells is k-1 +- sqrt(2(k-1)).
    fn chi_square(cells: &[u32], n: usize) -> f64 {
        let expected = n as f64 / cells.len() as f64;
        cells
            .iter()
            .map(|&c| (c as f64 - expected).powi(2) / expected)
            .sum()
    }

    #[test]
    fn uniform_fills_cells_evenly_in_every_stream() {
        let n = 1 << 18;
        for seed in [0, 1, u64::MAX] {
            for purpose in PURPOSES {
                let mut cells = [0u32; 256];
                for i in 0..n {
                    let u = uniform(seed, purpose, i as u64);
                    assert!((0.0..1.0).contains(&u));
                    cells[(u * 256.0) as usize] += 1;
                }
                let x = chi_square(&cells, n);
                assert!((255.0 - 130.0..255.0 + 130.0).contains(&x), "{x}");
            }
        }
    }

    /// Pairs (number i, number i + 1) and pairs across streams and seeds fill the square evenly.
    #[test]
    fn streams_are_independent() {
        let n = 1 << 18;
        let draws: [fn(u64) -> (f32, f32); 4] = [
            |i| {
                (
                    uniform(7, Purpose::Init, i),
                    uniform(7, Purpose::Init, i + 1),
                )
            },
            |i| {
                (
                    uniform(7, Purpose::Init, i),
                    uniform(7, Purpose::Dropout, i),
                )
            },
            |i| {
                (
                    uniform(7, Purpose::Sample, i),
                    uniform(8, Purpose::Sample, i),
                )
            },
            |i| {
                (
                    uniform(i, Purpose::Sample, 0),
                    uniform(i, Purpose::Sample, 1 << 32),
                )
            },
        ];
        for (case, draw) in draws.iter().enumerate() {
            let mut cells = vec![0u32; 1024];
            for i in 0..n {
                let (x, y) = draw(i as u64);
                cells[(x * 32.0) as usize * 32 + (y * 32.0) as usize] += 1;
            }
            let x = chi_square(&cells, n);
            assert!(
                (1023.0 - 260.0..1023.0 + 260.0).contains(&x),
                "case {case}: {x}"
            );
        }
    }

    /// A seed must matter at every single index: a key that a small index cancels would give all
    /// seeds the same number there, which no statistic over many indices notices.
    #[test]
    fn every_index_differs_between_seeds_and_purposes() {
        let small = (0..300).flat_map(|i: u64| [i, i << 32, i.wrapping_neg(), (i << 32) + 1]);
        for index in small {
            let mut seen: Vec<u64> = (0..50)
                .flat_map(|seed| PURPOSES.map(|p| hash(seed, p, index)))
                .collect();
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), 250, "index {index}");
        }
    }

    /// Flipping any one bit of the seed or the index flips each output bit half of the time.
    #[test]
    fn one_flipped_bit_flips_half_of_the_output() {
        let trials = 4096u32;
        for bit in 0..64 {
            let mut flips = [[0u32; 64]; 2];
            for t in 0..trials as u64 {
                let base = hash(t, Purpose::Sample, t * 977);
                let by_seed = base ^ hash(t ^ (1 << bit), Purpose::Sample, t * 977);
                let by_index = base ^ hash(t, Purpose::Sample, (t * 977) ^ (1 << bit));
                for (flips, flipped) in flips.iter_mut().zip([by_seed, by_index]) {
                    for (out, count) in flips.iter_mut().enumerate() {
                        *count += (flipped >> out & 1) as u32;
                    }
                }
            }
            // 6 standard deviations of a fair coin over the trials.
            let slack = 6 * 32;
            for count in flips.iter().flatten() {
                assert!(count.abs_diff(trials / 2) < slack, "bit {bit}: {count}");
            }
        }
    }

    #[test]
    fn normal_has_the_moments_of_the_standard_normal() {
        let n = 1 << 20;
        let mut sums = [0f64; 4];
        for i in 0..n {
            let z = normal(3, Purpose::Init, i) as f64;
            for (k, sum) in sums.iter_mut().enumerate() {
                *sum += z.powi(k as i32 + 1);
            }
        }
        let moments = sums.map(|s| s / n as f64);
        // Standard errors at n = 2^20: 0.001, 0.0014, 0.0038, 0.0096.
        for (got, (want, slack)) in
            moments
                .iter()
                .zip([(0.0, 0.005), (1.0, 0.007), (0.0, 0.02), (3.0, 0.05)])
        {
            assert!((got - want).abs() < slack, "{moments:?}");
        }
    }
}
