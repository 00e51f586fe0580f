//! Explicit vectors: the operations that register-level kernels are written in.
//!
//! Arithmetic is the same on all instruction sets (fused multiply-adds, correctly rounded division
//! and square root, no approximate reciprocals), so results are bit-identical.

/// Vector operations. `F` holds `N` f32 values, `I` as many 32-bit integers (also seen as twice
/// as many 16-bit words).
///
/// # Safety
/// Every method needs the instruction set of the implementing type; pointers must be valid for
/// the lanes read or written. They need no alignment.
#[allow(clippy::missing_safety_doc)] // the contract is the trait's
pub(crate) unsafe trait Lanes {
    /// Lanes of a vector.
    const N: usize;
    /// `N` f32 values.
    type F: Copy;
    /// `N` 32-bit integers.
    type I: Copy;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(x: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, x: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sqrt(a: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c - a * b`, rounded once.
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The bits of `a`.
    unsafe fn bits(a: Self::F) -> Self::I;
    /// The f32 with bits `a`.
    unsafe fn from_bits(a: Self::I) -> Self::F;

    unsafe fn splat_i(x: i32) -> Self::I;
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn abs_i(a: Self::I) -> Self::I;
    unsafe fn to_f32(a: Self::I) -> Self::F;
    unsafe fn shift_right<const BITS: u32>(a: Self::I) -> Self::I;
    unsafe fn shift_left<const BITS: u32>(a: Self::I) -> Self::I;
    /// Lane-wise maximum as unsigned integers.
    unsafe fn max_u32(a: Self::I, b: Self::I) -> Self::I;
    /// The largest lane as an unsigned integer.
    unsafe fn reduce_max_u32(a: Self::I) -> u32;
    // Non-negative f32 values order as their bits do, and integer units are less busy.
    /// Lane-wise minimum as signed integers.
    unsafe fn min_i32(a: Self::I, b: Self::I) -> Self::I;
    /// Lane-wise maximum as signed integers.
    unsafe fn max_i32(a: Self::I, b: Self::I) -> Self::I;
    /// `i - 1` where `a < b` as signed integers, else `i`.
    unsafe fn less_one_where_lt(i: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// 0 where `a < b` as signed integers, else `a`.
    unsafe fn zero_where_lt(a: Self::I, b: Self::I) -> Self::I;
    /// `table[i mod 8]`; `i` is non-negative. Tables repeat their 8 entries to fill 16.
    unsafe fn look_up(table: &[f32; 16], i: Self::I) -> Self::F;
    /// 16-bit words: `max(a - b, 0)`, unsigned.
    unsafe fn sub_saturate_u16(a: Self::I, b: Self::I) -> Self::I;
    /// 16-bit words: the high half of the unsigned product.
    unsafe fn mul_high_u16(a: Self::I, b: Self::I) -> Self::I;
    /// 16-bit words: unsigned minimum.
    unsafe fn min_u16(a: Self::I, b: Self::I) -> Self::I;
    /// Whether any 16-bit word is below `limit` (at least 1), unsigned.
    unsafe fn any_u16_below(a: Self::I, limit: u16) -> bool;

    /// `N` bytes, zero-extended.
    unsafe fn load_bytes(x: *const u8) -> Self::I;
    /// Writes `4 N` bytes `max(0, 127 +- (t >> 16 & 0xff))`, minus where `x` has its sign bit.
    unsafe fn store_signed_codes(to: *mut u8, t: [Self::I; 4], x: [Self::F; 4]);
    /// Writes `4 N` bytes `max(0, (t >> 15) - 0x8601)`, which must be below 256; with `KEEP_NONZERO` at least 1 where `x > 0`.
    unsafe fn store_unsigned_codes<const KEEP_NONZERO: bool>(
        to: *mut u8,
        t: [Self::I; 4],
        x: [Self::F; 4],
    );
}

/// Defines `fn name(isa: Isa, args...) -> R`, which runs `body::<L>(args...)` compiled for `isa`,
/// or `portable(args...)`.
///
/// `body` is an `#[inline(always)] unsafe fn` generic over [`Lanes`] whose only requirement is the
/// instruction set of `L`.
macro_rules! lanes_kernel {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?
        = $body:ident or $portable:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(isa: $crate::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn on_avx2($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this function is compiled for, and only called with, AVX2 and FMA.
                    unsafe { $body::<$crate::simd::avx2::Avx2>($($arg),*) }
                }
                #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl")]
                #[allow(clippy::too_many_arguments)]
                fn on_avx512($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: as above, with AVX-512 F, BW and VL.
                    unsafe { $body::<$crate::simd::avx512::Avx512>($($arg),*) }
                }
                match isa.within_cpu() {
                    // SAFETY: the CPU has this set.
                    $crate::simd::Isa::Avx512 => return unsafe { on_avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::Isa::Avx2 => return unsafe { on_avx2($($arg),*) },
                    $crate::simd::Isa::Portable => {}
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = isa;
            $portable($($arg),*)
        }
    };
}
pub(crate) use lanes_kernel;
