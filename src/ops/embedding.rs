//! Token embedding and learned positions.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::gemm::MatMut;
use super::param::Param;
use super::rows;

/// Rows of a table (V, D) by token: (B, S) u32 to (B, S, D).
pub struct Embedding(pub Param);

/// Adds row s of a table (positions, D) to x (B, S, D).
pub struct AddPositions(pub Param);

fn tokens<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [u32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::U32(tokens), Some((start, end))) => Ok(&tokens[start..end]),
        _ => bail!("an embedding takes contiguous u32 token ids"),
    }
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let tokens = tokens(storage, layout)?;
        let (vocab, width) = (self.0.height(), self.0.width());
        if let Some(token) = tokens.iter().find(|&&t| t as usize >= vocab) {
            bail!("token {token} is past the vocabulary of {vocab}");
        }
        let mut out = rows::buffer(tokens.len() * width);
        self.0.read(|table| {
            rows::for_each(&mut out, width, |first, out| {
                for (out, &token) in out.chunks_exact_mut(width).zip(&tokens[first..]) {
                    let start = token as usize * width;
                    out.copy_from_slice(&table[start..start + width]);
                }
            });
            Ok(())
        })?;
        let mut dims = layout.dims().to_vec();
        dims.push(width);
        Ok((CpuStorage::F32(out), dims.into()))
    }

    fn bwd(&self, ids: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let (ids, layout) = ids.storage_and_layout();
        let candle_core::Storage::Cpu(ids) = &*ids else {
            bail!("expected token ids on the CPU")
        };
        let tokens = tokens(ids, layout)?;
        let width = self.0.width();
        rows::with_values(grad, |dy| {
            self.0.accumulate(|table, fresh| {
                if fresh {
                    table
                        .par_chunks_mut(1 << 16)
                        .for_each(|rows| rows.fill(0.0));
                }
                // A token may occur many times, so threads share the columns, not the tokens: each
                // sum is formed in token order whatever the number of threads.
                let cols = column_share(width);
                let height = table.len() / width;
                MatMut::blocks(table, width, height, cols)
                    .into_par_iter()
                    .enumerate()
                    .for_each(|(block, mut table)| {
                        for (row, &token) in dy.chunks_exact(width).zip(tokens) {
                            let share = &row[block * cols..(block + 1) * cols];
                            rows::add_assign(table.row(token as usize), share);
                        }
                    });
                Ok(())
            })
        })?;
        Ok(None)
    }
}

/// Columns a task of the embedding gradient takes: a divisor of the width, a few cache lines wide.
fn column_share(width: usize) -> usize {
    let target = width.div_ceil(rayon::current_num_threads()).max(16);
    (1..=width.min(target))
        .rev()
        .find(|c| width.is_multiple_of(*c))
        .unwrap_or(width)
}

impl CustomOp1 for AddPositions {
    fn name(&self) -> &'static str {
        "add_positions"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::values(storage, layout)?;
        let &[_, seq_len, width] = layout.dims() else {
            bail!("add_positions takes (B, S, D), got {:?}", layout.shape())
        };
        if seq_len > self.0.height() || width != self.0.width() {
            bail!(
                "{}: {:?} has no place for {:?}",
                self.0.spec().name,
                self.0.spec().shape,
                layout.shape()
            );
        }
        let mut out = rows::buffer(x.len());
        self.0.read(|table| {
            rows::for_each(&mut out, width, |first, out| {
                for (i, out) in out.chunks_exact_mut(width).enumerate() {
                    let x = &x[(first + i) * width..];
                    let position = &table[(first + i) % seq_len * width..];
                    for ((out, x), p) in out.iter_mut().zip(x).zip(position) {
                        *out = x + p;
                    }
                }
            });
            Ok(())
        })?;
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let (_, seq_len, width) = x.dims3()?;
        let used = seq_len * width;
        rows::with_values(grad, |dy| {
            self.0.accumulate(|table, fresh| {
                let (table, unused) = table.split_at_mut(used);
                if fresh {
                    unused.fill(0.0);
                }
                rows::for_each(table, width, |first, table| {
                    let range = first * width..first * width + table.len();
                    for (b, dy) in dy.chunks_exact(used).enumerate() {
                        if fresh && b == 0 {
                            table.copy_from_slice(&dy[range.clone()]);
                        } else {
                            rows::add_assign(table, &dy[range.clone()]);
                        }
                    }
                });
                Ok(())
            })
        })?;
        Ok(Some(grad.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Tape;
    use crate::ops::naive::Check;

    #[test]
    fn positions_match_their_naive_twin() {
        let check = Check::new(&[("wpe", &[9, 20])]);
        let x = check.input(0, &[3, 7, 20]);
        check.agrees1(&["wpe"], &x, AddPositions(check.param("wpe")), |p, x| {
            x.broadcast_add(&p["wpe"].narrow(0, 0, 7)?)
        });
    }

    #[test]
    fn rows_match_a_scatter_by_hand() {
        let check = Check::new(&[("wte", &[11, 24])]);
        let table = check.param("wte");
        let ids: Vec<u32> = vec![3, 3, 10, 0, 3, 7];
        let x = Tensor::from_slice(&ids, (2, 3), &candle_core::Device::Cpu).unwrap();
        let dy = check.input(1, &[2, 3, 24]);
        for times in 1..=2 {
            let tape = Tape::recording();
            let y = tape.apply1(&x, Embedding(table.clone())).unwrap();
            assert_eq!(y.dims(), [2, 3, 24]);
            assert!(tape.backward(&y, dy.clone(), &x).unwrap().is_none());
            let (y, dy) = (y.flatten_all().unwrap(), dy.flatten_all().unwrap());
            let (y, dy): (Vec<f32>, Vec<f32>) = (y.to_vec1().unwrap(), dy.to_vec1().unwrap());
            let mut grad = vec![0.0; 11 * 24];
            table
                .read(|table| {
                    for (i, &id) in ids.iter().enumerate() {
                        let row = id as usize * 24;
                        assert_eq!(y[i * 24..(i + 1) * 24], table[row..row + 24]);
                        for _ in 0..times {
                            rows::add_assign(&mut grad[row..row + 24], &dy[i * 24..(i + 1) * 24]);
                        }
                    }
                    Ok(())
                })
                .unwrap();
            for (a, b) in table.grad().unwrap().iter().zip(&grad) {
                assert!((a - b).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn a_token_past_the_vocabulary_is_refused() {
        let check = Check::new(&[("wte", &[11, 24])]);
        let x = Tensor::new(&[[11u32]], &candle_core::Device::Cpu).unwrap();
        let error = Tape::inference().apply1(&x, Embedding(check.param("wte")));
        assert!(error.unwrap_err().to_string().contains("token 11"));
    }
}
