//! [`Lanes`] with AVX-512 F, BW and VL: 16 lanes.
//!
//! Same operations as `avx2.rs`, in the same order, so results are bit-identical. Compiled, but not yet
//! run: the tests take every instruction set that the CPU has, and none so far had this one.

use std::arch::x86_64::*;

use super::lanes::Lanes;

/// 16 lanes.
pub(crate) struct Avx512;

// SAFETY: each method is the intrinsic it names; the trait's contract covers the instruction set
// and the pointers.
unsafe impl Lanes for Avx512 {
    const N: usize = 16;
    type F = __m512;
    type I = __m512i;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(x: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(x) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(to, x) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sqrt(a: __m512) -> __m512 {
        unsafe { _mm512_sqrt_ps(a) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn fnma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn bits(a: __m512) -> __m512i {
        unsafe { _mm512_castps_si512(a) }
    }
    #[inline(always)]
    unsafe fn from_bits(a: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(a) }
    }
    #[inline(always)]
    unsafe fn splat_i(x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn add_i(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn abs_i(a: __m512i) -> __m512i {
        unsafe { _mm512_abs_epi32(a) }
    }
    #[inline(always)]
    unsafe fn to_f32(a: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn shift_right<const BITS: u32>(a: __m512i) -> __m512i {
        // The intrinsic wants an i32 constant; the count form folds to the same instruction.
        unsafe { _mm512_srl_epi32(a, _mm_cvtsi32_si128(BITS as i32)) }
    }
    #[inline(always)]
    unsafe fn shift_left<const BITS: u32>(a: __m512i) -> __m512i {
        unsafe { _mm512_sll_epi32(a, _mm_cvtsi32_si128(BITS as i32)) }
    }
    #[inline(always)]
    unsafe fn max_u32(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_max_epu32(a, b) }
    }
    #[inline(always)]
    unsafe fn reduce_max_u32(a: __m512i) -> u32 {
        unsafe { _mm512_reduce_max_epu32(a) }
    }
    #[inline(always)]
    unsafe fn min_i32(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_min_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn max_i32(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_max_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn less_one_where_lt(i: __m512i, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_mask_sub_epi32(i, _mm512_cmplt_epi32_mask(a, b), i, _mm512_set1_epi32(1)) }
    }
    #[inline(always)]
    unsafe fn zero_where_lt(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_maskz_mov_epi32(_mm512_cmpge_epi32_mask(a, b), a) }
    }
    #[inline(always)]
    unsafe fn look_up(table: &[f32; 16], i: __m512i) -> __m512 {
        unsafe { _mm512_permutexvar_ps(i, _mm512_loadu_ps(table.as_ptr())) }
    }
    #[inline(always)]
    unsafe fn sub_saturate_u16(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_subs_epu16(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_high_u16(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_mulhi_epu16(a, b) }
    }
    #[inline(always)]
    unsafe fn min_u16(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_min_epu16(a, b) }
    }
    #[inline(always)]
    unsafe fn any_u16_below(a: __m512i, limit: u16) -> bool {
        unsafe { _mm512_cmplt_epu16_mask(a, _mm512_set1_epi16(limit as i16)) != 0 }
    }
    #[inline(always)]
    unsafe fn load_bytes(x: *const u8) -> __m512i {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(x.cast())) }
    }
    #[inline(always)]
    unsafe fn store_signed_codes(to: *mut u8, t: [__m512i; 4], x: [__m512; 4]) {
        unsafe {
            for k in 0..4 {
                let size = _mm512_and_si512(_mm512_srli_epi32::<16>(t[k]), _mm512_set1_epi32(0xff));
                let minus =
                    _mm512_cmplt_epi32_mask(_mm512_castps_si512(x[k]), _mm512_setzero_si512());
                let zero = _mm512_setzero_si512();
                let signed = _mm512_mask_sub_epi32(size, minus, zero, size);
                let code = _mm512_add_epi32(signed, _mm512_set1_epi32(127));
                let code = _mm512_max_epi32(code, zero);
                _mm_storeu_si128(to.add(16 * k).cast(), _mm512_cvtepi32_epi8(code));
            }
        }
    }
    #[inline(always)]
    unsafe fn store_unsigned_codes<const KEEP_NONZERO: bool>(
        to: *mut u8,
        t: [__m512i; 4],
        x: [__m512; 4],
    ) {
        unsafe {
            for k in 0..4 {
                let above =
                    _mm512_sub_epi32(_mm512_srli_epi32::<15>(t[k]), _mm512_set1_epi32(0x8601));
                let code = _mm512_max_epi32(above, _mm512_setzero_si512());
                let code = if KEEP_NONZERO {
                    let one = _mm512_set1_epi32(1);
                    let x = _mm512_castps_si512(x[k]);
                    // As signed numbers: a negative x, and -0, keeps its code.
                    _mm512_max_epi32(code, _mm512_min_epi32(x, one))
                } else {
                    code
                };
                _mm_storeu_si128(to.add(16 * k).cast(), _mm512_cvtepi32_epi8(code));
            }
        }
    }
}
