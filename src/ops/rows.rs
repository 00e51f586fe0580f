//! Rows of activations: access to candle's CPU storage, and work split over rows.
//!
//! Work is split into chunks of a fixed number of rows, and sums over rows are summed per chunk and
//! then in chunk order, so that no result depends on the number of threads.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Storage, Tensor, bail};
use rayon::prelude::*;

/// Rows in a chunk of parallel work.
const CHUNK_ROWS: usize = 64;

/// The contiguous f32 values of an op's argument.
pub fn values<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let values = match storage {
        CpuStorage::F32(values) => values,
        other => bail!("expected f32 activations, got {:?}", dtype(other)),
    };
    match layout.contiguous_offsets() {
        Some((start, end)) => match values.get(start..end) {
            Some(values) => Ok(values),
            // A unit's weights between their uses.
            None => bail!("the values were released"),
        },
        None => bail!(
            "expected contiguous activations, got strides {:?}",
            layout.stride()
        ),
    }
}

fn dtype(storage: &CpuStorage) -> candle_core::DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
}

/// Calls `f` with the contiguous f32 values of `tensor`.
pub fn with_values<R>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => f(values(storage, layout)?),
        _ => bail!("expected a tensor on the CPU"),
    }
}

/// A buffer for `len` values that the caller writes before anyone reads it.
///
/// Activations are written once, whole: clearing them first would cost a pass over memory each.
/// With the feature `poison`, and in unit tests, it is full of NaN, so that an element nobody wrote
/// shows; otherwise it holds whatever the allocator left there.
pub fn buffer(len: usize) -> Vec<f32> {
    #[cfg(all(
        any(target_arch = "x86_64", target_arch = "aarch64"),
        not(any(feature = "poison", test))
    ))]
    {
        let mut values: Vec<f32> = Vec::with_capacity(len);
        let start = values.as_mut_ptr();
        // SAFETY: the empty assembly may write anything through the pointer as far as the compiler
        // knows, so the memory counts as initialised; any bits are an f32; the capacity is `len`.
        unsafe {
            std::arch::asm!("/* {} */", in(reg) start, options(nostack, preserves_flags));
            values.set_len(len);
        }
        values
    }
    #[cfg(not(all(
        any(target_arch = "x86_64", target_arch = "aarch64"),
        not(any(feature = "poison", test))
    )))]
    vec![f32::NAN; len]
}

/// The tensor made of `values`.
pub fn tensor(values: Vec<f32>, shape: impl Into<Shape>) -> Tensor {
    let storage = Storage::Cpu(CpuStorage::F32(values));
    Tensor::from_storage(storage, shape, candle_core::op::BackpropOp::none(), false)
}

/// Calls `f(first_row, rows of out)` for chunks of rows of `width` values, in parallel.
pub fn for_each(out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    out.par_chunks_mut(CHUNK_ROWS * width)
        .enumerate()
        .for_each(|(i, rows)| f(i * CHUNK_ROWS, rows));
}

/// As [`for_each`], where each chunk also sums something over its rows: `f(first_row, rows, sums)`
/// adds to `num_sums` values that start at zero, and the chunks' sums are added in order.
pub fn for_each_summing(
    out: &mut [f32],
    width: usize,
    num_sums: usize,
    f: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
) -> Vec<f32> {
    let num_chunks = out.len().div_ceil(CHUNK_ROWS * width);
    let mut sums = vec![0.0; num_chunks * num_sums];
    out.par_chunks_mut(CHUNK_ROWS * width)
        .zip(sums.par_chunks_mut(num_sums))
        .enumerate()
        .for_each(|(i, (rows, sums))| f(i * CHUNK_ROWS, rows, sums));
    let (total, rest) = sums.split_at_mut(num_sums);
    for chunk in rest.chunks(num_sums) {
        add_assign(total, chunk);
    }
    sums.truncate(num_sums);
    sums
}

/// The sum over rows of a matrix with `width` columns.
pub fn column_sums(matrix: &[f32], width: usize) -> Vec<f32> {
    let num_chunks = matrix.len().div_ceil(CHUNK_ROWS * width);
    let mut sums = vec![0.0; num_chunks * width];
    matrix
        .par_chunks(CHUNK_ROWS * width)
        .zip(sums.par_chunks_mut(width))
        .for_each(|(rows, sums)| {
            for row in rows.chunks_exact(width) {
                add_assign(sums, row);
            }
        });
    let (total, rest) = sums.split_at_mut(width);
    for chunk in rest.chunks(width) {
        add_assign(total, chunk);
    }
    sums.truncate(width);
    sums
}

/// `to += from`.
pub fn add_assign(to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}

/// Stores a sum over rows as a parameter's gradient: overwrites the first time in a step, adds after.
pub fn store_sums(grad: &mut [f32], sums: &[f32], fresh: bool) {
    if fresh {
        grad.copy_from_slice(sums);
    } else {
        add_assign(grad, sums);
    }
}

/// Elementwise sum, in parallel.
pub struct Add;

impl CustomOp2 for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (a, b) = (values(s1, l1)?, values(s2, l2)?);
        if a.len() != b.len() {
            bail!("add: {:?} and {:?} differ", l1.shape(), l2.shape());
        }
        let mut out = buffer(a.len());
        for_each(&mut out, 256, |first, out| {
            let start = first * 256;
            for ((out, a), b) in out.iter_mut().zip(&a[start..]).zip(&b[start..]) {
                *out = a + b;
            }
        });
        Ok((CpuStorage::F32(out), l1.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(grad.clone()), Some(grad.clone())))
    }
}
