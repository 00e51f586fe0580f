//! Instruction-set choice at run time.
//!
//! A kernel is one generic body. [`simd_kernel!`] compiles it for AVX-512, AVX2 and the build's
//! baseline, and calls the best one this CPU has; the baseline build is the portable twin that
//! tests compare the others with. Sums run over 16 lanes on every set, so that the sets differ by
//! the rounding of fused multiply-adds only.

use std::sync::OnceLock;

/// Lanes of every running sum.
pub const LANES: usize = 16;

/// Instruction sets a kernel is compiled for, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Whatever the build target guarantees.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

/// The levels this CPU can run, worst first.
pub fn levels() -> &'static [Level] {
    static LEVELS: OnceLock<Vec<Level>> = OnceLock::new();
    LEVELS.get_or_init(|| {
        #[allow(unused_mut)]
        let mut levels = vec![Level::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                levels.push(Level::Avx2);
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    levels.push(Level::Avx512);
                }
            }
        }
        levels
    })
}

/// The best level this CPU can run.
pub fn best() -> Level {
    levels()[levels().len() - 1]
}

/// Arithmetic that differs between levels.
pub trait Isa {
    /// `a * b + c`, rounded once where the hardware fuses it.
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

/// Levels with a fused multiply-add instruction.
pub struct Fused;

/// The build's baseline, where a software fused multiply-add would be a slow library call.
pub struct Plain;

impl Isa for Fused {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Isa for Plain {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// Compiles `$body::<Isa>` for every level: `$name` runs the best one, `$name::at(level, …)` a
/// chosen one. The body and all it calls must be `#[inline(always)]`.
#[macro_export]
macro_rules! simd_kernel {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            $name::at($crate::simd::best(), $($arg),*)
        }

        #[allow(clippy::too_many_arguments)]
        $vis mod $name {
            #[allow(unused_imports)]
            use super::*;

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                $body::<$crate::simd::Fused>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                $body::<$crate::simd::Fused>($($arg),*)
            }

            /// Runs the kernel at one level, which must be in [`crate::simd::levels`].
            pub fn at(level: $crate::simd::Level, $($arg: $ty),*) $(-> $ret)? {
                debug_assert!($crate::simd::levels().contains(&level));
                match level {
                    // SAFETY: `levels` lists a level only when the CPU has its features.
                    #[cfg(target_arch = "x86_64")]
                    $crate::simd::Level::Avx512 => unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    #[cfg(target_arch = "x86_64")]
                    $crate::simd::Level::Avx2 => unsafe { avx2($($arg),*) },
                    _ => $body::<$crate::simd::Plain>($($arg),*),
                }
            }
        }
    };
}

/// `exp(x)` to about 2 ulp, for any x: 0 below the smallest normal result, NaN stays NaN.
#[inline(always)]
pub fn exp<I: Isa>(x: f32) -> f32 {
    // x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to the integer n, which is
    // then in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    let clamped = if x > 88.0 { 88.0 } else { x };
    let clamped = if clamped < -87.0 { -87.0 } else { clamped };
    let t = I::fma(clamped, std::f32::consts::LOG2_E, MAGIC);
    let n = t - MAGIC;
    let r = I::fma(n, -0.693_359_4, clamped);
    let r = I::fma(n, 2.121_944_4e-4, r);
    let p = 1.987_569_1e-4;
    let p = I::fma(p, r, 1.398_199_9e-3);
    let p = I::fma(p, r, 8.333_452e-3);
    let p = I::fma(p, r, 4.166_579_6e-2);
    let p = I::fma(p, r, 0.166_666_65);
    let p = I::fma(p, r, 0.5);
    let p = I::fma(p * r, r, r + 1.0);
    let scale = f32::from_bits(t.to_bits().wrapping_sub(0x4b40_0000).wrapping_add(127) << 23);
    let y = p * scale;
    if x < -87.0 { 0.0 } else { y }
}

/// Sum of the lanes, always in the same order.
#[inline(always)]
pub fn sum_lanes(lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    let mut sums = lanes;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(always)]
    fn exp_all<I: Isa>(x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = exp::<I>(*x));
    }

    simd_kernel! { fn exp_slice(x: &mut [f32]) = exp_all }

    #[test]
    fn exp_matches_f64_at_every_level() {
        let xs: Vec<f32> = (-8700..8800).map(|i| i as f32 * 0.01).collect();
        for &level in levels() {
            let mut ys = xs.clone();
            exp_slice::at(level, &mut ys);
            for (&x, &y) in xs.iter().zip(&ys) {
                let exact = (x as f64).exp();
                assert!(
                    ((y as f64 - exact) / exact).abs() < 4e-7,
                    "{level:?} {x} {y}"
                );
            }
            exp_slice(&mut xs.clone());
            let mut edge = [f32::NEG_INFINITY, -1000.0, f32::NAN, 0.0];
            exp_slice::at(level, &mut edge);
            assert_eq!(edge[..2], [0.0, 0.0]);
            assert!(edge[2].is_nan());
            assert_eq!(edge[3], 1.0);
        }
    }
}
