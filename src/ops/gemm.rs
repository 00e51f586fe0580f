//! Matrix products of strided views, by the crate gemm.

use std::marker::PhantomData;

/// A matrix to read: `rows` x `cols` values with strides in elements.
#[derive(Clone, Copy)]
pub struct Mat<'a> {
    data: *const f32,
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
    life: PhantomData<&'a [f32]>,
}

/// A matrix to write. Rows are contiguous.
pub struct MatMut<'a> {
    data: *mut f32,
    rows: usize,
    cols: usize,
    row_stride: usize,
    life: PhantomData<&'a mut [f32]>,
}

impl<'a> Mat<'a> {
    /// The first `rows` x `cols` of `data`, whose rows are contiguous and `row_stride` apart.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        check(data.len(), rows, cols, row_stride);
        Self {
            data: data.as_ptr(),
            rows,
            cols,
            row_stride,
            col_stride: 1,
            life: PhantomData,
        }
    }

    /// The transposed view.
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

// SAFETY: a view has exclusive access to its elements, as a `&mut [f32]` has.
unsafe impl Send for MatMut<'_> {}

impl<'a> MatMut<'a> {
    /// As [`Mat::new`].
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        check(data.len(), rows, cols, row_stride);
        Self {
            data: data.as_mut_ptr(),
            rows,
            cols,
            row_stride,
            life: PhantomData,
        }
    }

    /// Cuts a row-major matrix of `row_width` columns into blocks of `rows` rows and `cols` columns:
    /// first along a row, then down. Both must divide the matrix.
    pub fn blocks(data: &'a mut [f32], row_width: usize, rows: usize, cols: usize) -> Vec<Self> {
        assert!(
            row_width.is_multiple_of(cols) && data.len().is_multiple_of(rows * row_width),
            "blocks of {rows} x {cols} do not divide rows of {row_width}"
        );
        let across = row_width / cols;
        let num_blocks = data.len() / (rows * cols);
        let start = data.as_mut_ptr();
        (0..num_blocks)
            .map(|i| Self {
                // SAFETY: block i starts inside `data`, and no element is in two blocks.
                data: unsafe { start.add(i / across * rows * row_width + i % across * cols) },
                rows,
                cols,
                row_stride: row_width,
                life: PhantomData,
            })
            .collect()
    }

    /// Row `i`.
    pub fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: the row lies in the view, which is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(i * self.row_stride), self.cols) }
    }

    /// Rows `start..end`.
    pub fn rows(&mut self, start: usize, end: usize) -> MatMut<'_> {
        assert!(
            start <= end && end <= self.rows,
            "rows {start}..{end} of {}",
            self.rows
        );
        MatMut {
            // SAFETY: the rows lie in the view, which is borrowed exclusively.
            data: unsafe { self.data.add(start * self.row_stride) },
            rows: end - start,
            cols: self.cols,
            row_stride: self.row_stride,
            life: PhantomData,
        }
    }
}

fn check(len: usize, rows: usize, cols: usize, row_stride: usize) {
    let end = rows.checked_sub(1).map_or(Some(0), |last| {
        last.checked_mul(row_stride)?.checked_add(cols)
    });
    let fits = end.is_some_and(|end| end <= len || cols == 0);
    assert!(
        fits && row_stride >= cols,
        "{rows} x {cols} with stride {row_stride} does not fit {len} values"
    );
}

/// `out = a b`, or `out += a b` with `add`, on `threads` threads of the current pool.
pub fn gemm(out: MatMut, a: Mat, b: Mat, add: bool, threads: usize) {
    assert_eq!(
        (out.rows, out.cols, a.cols),
        (a.rows, b.cols, b.rows),
        "shapes of a matrix product"
    );
    let parallelism = match threads {
        0 | 1 => gemm::Parallelism::None,
        n => gemm::Parallelism::Rayon(n),
    };
    // SAFETY: the views were checked against their slices (or vouched for) when they were made,
    // `out` is exclusive, and strides and sizes are in elements as gemm wants them.
    unsafe {
        gemm::gemm(
            out.rows,
            out.cols,
            a.cols,
            out.data,
            1,
            out.row_stride as isize,
            add,
            a.data,
            a.col_stride as isize,
            a.row_stride as isize,
            b.data,
            b.col_stride as isize,
            b.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn naive(
        a: impl Fn(usize, usize) -> f32,
        b: impl Fn(usize, usize) -> f32,
        k: usize,
    ) -> impl Fn(usize, usize) -> f32 {
        move |i, j| (0..k).map(|p| a(i, p) * b(p, j)).sum()
    }

    proptest! {
        #[test]
        fn matches_the_triple_loop(m in 1usize..70, n in 1usize..70, k in 1usize..70, add: bool, pad in 0usize..3) {
            let value = |i: usize| ((i * 37 % 19) as f32 - 9.0) / 8.0;
            let a: Vec<f32> = (0..m * (k + pad)).map(value).collect();
            let bt: Vec<f32> = (0..n * (k + pad)).map(|i| value(i + 5)).collect();
            let mut out = vec![1.0; m * (n + pad)];
            let out_mat = MatMut::new(&mut out, m, n, n + pad);
            gemm(out_mat, Mat::new(&a, m, k, k + pad), Mat::new(&bt, n, k, k + pad).t(), add, 2);
            let expected = naive(|i, p| a[i * (k + pad) + p], |p, j| bt[j * (k + pad) + p], k);
            for i in 0..m {
                for j in 0..n + pad {
                    let want = if j >= n { 1.0 } else { expected(i, j) + if add { 1.0 } else { 0.0 } };
                    prop_assert!((out[i * (n + pad) + j] - want).abs() < 1e-4);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "does not fit")]
    fn a_view_beyond_its_data_is_refused() {
        Mat::new(&[0.0; 10], 3, 4, 4);
    }
}
