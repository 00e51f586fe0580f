//! [`Lanes`] with AVX2 and FMA: 8 lanes.

use std::arch::x86_64::*;

use super::lanes::Lanes;

/// 8 lanes.
pub(crate) struct Avx2;

// SAFETY: each method is the intrinsic it names; the trait's contract covers the instruction set
// and the pointers.
unsafe impl Lanes for Avx2 {
    const N: usize = 8;
    type F = __m256;
    type I = __m256i;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(x: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(x) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m256) {
        unsafe { _mm256_storeu_ps(to, x) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sqrt(a: __m256) -> __m256 {
        unsafe { _mm256_sqrt_ps(a) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn fnma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn bits(a: __m256) -> __m256i {
        unsafe { _mm256_castps_si256(a) }
    }
    #[inline(always)]
    unsafe fn from_bits(a: __m256i) -> __m256 {
        unsafe { _mm256_castsi256_ps(a) }
    }
    #[inline(always)]
    unsafe fn splat_i(x: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn and(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_and_si256(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_or_si256(a, b) }
    }
    #[inline(always)]
    unsafe fn add_i(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn abs_i(a: __m256i) -> __m256i {
        unsafe { _mm256_abs_epi32(a) }
    }
    #[inline(always)]
    unsafe fn to_f32(a: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn shift_right<const BITS: u32>(a: __m256i) -> __m256i {
        // The intrinsic wants an i32 constant; the count form folds to the same instruction.
        unsafe { _mm256_srl_epi32(a, _mm_cvtsi32_si128(BITS as i32)) }
    }
    #[inline(always)]
    unsafe fn shift_left<const BITS: u32>(a: __m256i) -> __m256i {
        unsafe { _mm256_sll_epi32(a, _mm_cvtsi32_si128(BITS as i32)) }
    }
    #[inline(always)]
    unsafe fn max_u32(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_max_epu32(a, b) }
    }
    #[inline(always)]
    unsafe fn reduce_max_u32(a: __m256i) -> u32 {
        unsafe {
            let m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let m = _mm_max_epu32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
            let m = _mm_max_epu32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m));
            _mm_cvtsi128_si32(m) as u32
        }
    }
    #[inline(always)]
    unsafe fn min_i32(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_min_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn max_i32(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_max_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn less_one_where_lt(i: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(i, _mm256_cmpgt_epi32(b, a)) }
    }
    #[inline(always)]
    unsafe fn zero_where_lt(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_andnot_si256(_mm256_cmpgt_epi32(b, a), a) }
    }
    #[inline(always)]
    unsafe fn look_up(table: &[f32; 16], i: __m256i) -> __m256 {
        unsafe { permute(_mm256_loadu_ps(table.as_ptr()), i) }
    }
    #[inline(always)]
    unsafe fn sub_saturate_u16(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_subs_epu16(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_high_u16(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_mulhi_epu16(a, b) }
    }
    #[inline(always)]
    unsafe fn min_u16(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_min_epu16(a, b) }
    }
    #[inline(always)]
    unsafe fn any_u16_below(a: __m256i, limit: u16) -> bool {
        unsafe {
            let low = _mm256_min_epu16(a, _mm256_set1_epi16((limit - 1) as i16));
            _mm256_movemask_epi8(_mm256_cmpeq_epi16(low, a)) != 0
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(x: *const u8) -> __m256i {
        unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(x.cast())) }
    }
    #[inline(always)]
    unsafe fn store_signed_codes(to: *mut u8, t: [__m256i; 4], x: [__m256; 4]) {
        unsafe {
            let bytes = _mm256_packus_epi16(
                signed_words(t[0], t[1], x[0], x[1]),
                signed_words(t[2], t[3], x[2], x[3]),
            );
            _mm256_storeu_si256(to.cast(), in_order(bytes));
        }
    }
    #[inline(always)]
    unsafe fn store_unsigned_codes<const KEEP_NONZERO: bool>(
        to: *mut u8,
        t: [__m256i; 4],
        x: [__m256; 4],
    ) {
        unsafe {
            let bytes = _mm256_packus_epi16(
                unsigned_words::<KEEP_NONZERO>(t[0], t[1], x[0], x[1]),
                unsigned_words::<KEEP_NONZERO>(t[2], t[3], x[2], x[3]),
            );
            _mm256_storeu_si256(to.cast(), in_order(bytes));
        }
    }
}

/// `vpermps`, written out so that the table is in a register: from memory, where the compiler puts
/// it when registers are short, the instruction takes twice as long (Zen 3).
#[inline]
#[target_feature(enable = "avx2")]
fn permute(table: __m256, i: __m256i) -> __m256 {
    let values: __m256;
    // SAFETY: one instruction of AVX2, on registers.
    unsafe {
        std::arch::asm!(
            "vpermps {values}, {i}, {table}",
            values = lateout(ymm_reg) values,
            i = in(ymm_reg) i,
            table = in(ymm_reg) table,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    values
}

// Functions, not closures: a closure cannot be `inline(always)`, and as a call it costs as much as
// the arithmetic.

/// Signed codes, before saturation, of two vectors.
#[inline(always)]
unsafe fn signed_words(t0: __m256i, t1: __m256i, x0: __m256, x1: __m256) -> __m256i {
    unsafe {
        // Words of t >> 16; the low byte is the number, the high byte an exponent.
        let words = _mm256_packus_epi32(_mm256_srli_epi32::<16>(t0), _mm256_srli_epi32::<16>(t1));
        let size = _mm256_and_si256(words, _mm256_set1_epi16(0xff));
        // Saturation keeps the sign bit of x; a word is 0 only where x is +0 or so small a
        // denormal that its size is 0 anyway.
        let sign = _mm256_packs_epi32(_mm256_castps_si256(x0), _mm256_castps_si256(x1));
        _mm256_add_epi16(_mm256_sign_epi16(size, sign), _mm256_set1_epi16(127))
    }
}

/// Unsigned codes of two vectors.
#[inline(always)]
unsafe fn unsigned_words<const KEEP_NONZERO: bool>(
    t0: __m256i,
    t1: __m256i,
    x0: __m256,
    x1: __m256,
) -> __m256i {
    unsafe {
        let words = _mm256_packus_epi32(_mm256_srli_epi32::<15>(t0), _mm256_srli_epi32::<15>(t1));
        let code = _mm256_subs_epu16(words, _mm256_set1_epi16(0x8601u16 as i16));
        if !KEEP_NONZERO {
            return code;
        }
        let x = _mm256_packus_epi32(_mm256_castps_si256(x0), _mm256_castps_si256(x1));
        _mm256_max_epu16(code, _mm256_min_epu16(x, _mm256_set1_epi16(1)))
    }
}

/// Undoes the interleaving of two levels of 128-bit packs.
#[inline(always)]
unsafe fn in_order(bytes: __m256i) -> __m256i {
    unsafe { _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)) }
}
