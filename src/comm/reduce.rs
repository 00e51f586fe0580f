//! Combining what ranks sent, in rank order.

use super::ReduceOp;
use crate::simd::body::Arithmetic;
use crate::simd_kernel;

/// Values combined at a time: they stay in the first-level cache from one rank to the next.
const BLOCK: usize = 1024;

/// `out` becomes `parts[0]`, then `parts[1]` added to it and so on. A NaN anywhere stays a NaN, in a
/// maximum too, so that it hides from nobody.
pub(super) fn combine(op: ReduceOp, parts: &[&[f32]], out: &mut [f32]) {
    assert!(parts.iter().all(|part| part.len() == out.len()));
    match op {
        ReduceOp::Sum => sum(parts, out),
        ReduceOp::Max => max(parts, out),
    }
}

simd_kernel! { fn sum(parts: &[&[f32]], out: &mut [f32]) = sum_body }
simd_kernel! { fn max(parts: &[&[f32]], out: &mut [f32]) = max_body }

// Adding needs no `A`: the macro compiles one body a set.
#[allow(clippy::extra_unused_type_parameters)]
#[inline(always)]
fn sum_body<A: Arithmetic>(parts: &[&[f32]], out: &mut [f32]) {
    fold(parts, out, |a, b| a + b);
}

#[allow(clippy::extra_unused_type_parameters)]
#[inline(always)]
fn max_body<A: Arithmetic>(parts: &[&[f32]], out: &mut [f32]) {
    fold(parts, out, |a, b| if b > a || b.is_nan() { b } else { a });
}

#[inline(always)]
fn fold(parts: &[&[f32]], out: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    for (i, out) in out.chunks_mut(BLOCK).enumerate() {
        let block = i * BLOCK..i * BLOCK + out.len();
        match parts {
            [first] => out.copy_from_slice(&first[block]),
            [first, second, rest @ ..] => {
                let (first, second) = (&first[block.clone()], &second[block.clone()]);
                for ((out, &a), &b) in out.iter_mut().zip(first).zip(second) {
                    *out = f(a, b);
                }
                for part in rest {
                    for (out, &b) in out.iter_mut().zip(&part[block.clone()]) {
                        *out = f(*out, b);
                    }
                }
            }
            [] => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;

    #[test]
    fn every_set_adds_in_rank_order() {
        for num_parts in 1..6 {
            let parts: Vec<Vec<f32>> = (0..num_parts)
                .map(|p| {
                    (0..2500)
                        .map(|i| ((i * 7 + p * 13) as f32).sin() * 1e3)
                        .collect()
                })
                .collect();
            let slices: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
            let naive = |f: fn(f32, f32) -> f32| -> Vec<f32> {
                let at = |i| parts.iter().map(|p| p[i]).reduce(f).unwrap();
                (0..2500).map(at).collect()
            };
            let mut out = vec![0.0; 2500];
            for isa in Isa::supported() {
                sum::on(isa, &slices, &mut out);
                assert_eq!(out, naive(|a, b| a + b), "{isa:?}");
                max::on(isa, &slices, &mut out);
                assert_eq!(out, naive(f32::max), "{isa:?}");
            }
        }
    }

    #[test]
    fn a_maximum_keeps_nan() {
        for parts in [[&[f32::NAN][..], &[1.0]], [&[1.0], &[f32::NAN]]] {
            let mut out = [0.0];
            combine(ReduceOp::Max, &parts, &mut out);
            assert!(out[0].is_nan());
        }
    }
}
