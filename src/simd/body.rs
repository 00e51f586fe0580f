//! Plain loops that the compiler vectorises.
//!
//! Sums run over 16 lanes on every instruction set, so that sets differ by the rounding of fused
//! multiply-adds only.

/// Lanes of every running sum.
pub const LANES: usize = 16;

/// Arithmetic that differs between instruction sets.
pub trait Arithmetic {
    /// `a * b + c`, rounded once where the hardware fuses it.
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

/// Sets with a fused multiply-add instruction.
pub struct Fused;

/// The build's baseline, where a software fused multiply-add would be a slow library call.
pub struct Plain;

impl Arithmetic for Fused {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Arithmetic for Plain {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// Compiles `$body::<A: Arithmetic>` for every [`Isa`](crate::simd::Isa): `$name(…)` runs the best
/// one of this CPU, `$name::on(isa, …)` a chosen one. The body and all it calls must be `#[inline(always)]`.
#[macro_export]
macro_rules! simd_kernel {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$doc])*
        #[allow(dead_code, clippy::too_many_arguments)]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            $name::on($crate::simd::Isa::best(), $($arg),*)
        }

        #[allow(clippy::too_many_arguments)]
        $vis mod $name {
            #[allow(unused_imports)]
            use super::*;

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                $body::<$crate::simd::body::Fused>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                $body::<$crate::simd::body::Fused>($($arg),*)
            }

            /// Runs the kernel compiled for `isa`, one of those this CPU supports.
            pub fn on(isa: $crate::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
                match isa.within_cpu() {
                    // SAFETY: the CPU has this set.
                    #[cfg(target_arch = "x86_64")]
                    $crate::simd::Isa::Avx512 => unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    #[cfg(target_arch = "x86_64")]
                    $crate::simd::Isa::Avx2 => unsafe { avx2($($arg),*) },
                    _ => $body::<$crate::simd::body::Plain>($($arg),*),
                }
            }
        }
    };
}

/// `exp(x)` to about 2 ulp: 0 where the result would not be a normal number, exp(88) for larger x,
/// NaN for NaN.
#[inline(always)]
pub fn exp<I: Arithmetic>(x: f32) -> f32 {
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
    use crate::simd::Isa;

    #[inline(always)]
    fn exp_all<I: Arithmetic>(x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = exp::<I>(*x));
    }

    simd_kernel! { fn exp_slice(x: &mut [f32]) = exp_all }

    #[test]
    fn exp_matches_f64_on_every_set() {
        let xs: Vec<f32> = (-8700..8800).map(|i| i as f32 * 0.01).collect();
        for isa in Isa::supported() {
            let mut ys = xs.clone();
            exp_slice::on(isa, &mut ys);
            for (&x, &y) in xs.iter().zip(&ys) {
                let exact = (x as f64).exp();
                assert!(((y as f64 - exact) / exact).abs() < 4e-7, "{isa:?} {x} {y}");
            }
            exp_slice(&mut xs.clone());
            let mut edge = [f32::NEG_INFINITY, -1000.0, f32::NAN, 0.0];
            exp_slice::on(isa, &mut edge);
            assert_eq!(edge[..2], [0.0, 0.0]);
            assert!(edge[2].is_nan());
            assert_eq!(edge[3], 1.0);
        }
    }
}
