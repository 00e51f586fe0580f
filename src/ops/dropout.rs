//! Dropout whose mask is a function of position, never of rank or microbatch.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::rows;
use crate::rng::{self, Purpose};

/// Where in the run a mask belongs: f(seed, step, sequence of the global batch, site, position).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutAt {
    /// Share of values that become zero; the rest is divided by `1 - rate`.
    pub rate: f32,
    /// Seed of the run.
    pub seed: u64,
    /// Step of the run.
    pub step: u64,
    /// Index in the global batch of the first sequence at hand.
    pub first_sequence: u64,
    /// Which of the model's dropouts.
    pub site: u64,
}

impl DropoutAt {
    /// The mask of the `i`-th sequence at hand.
    pub fn mask(&self, i: usize) -> Mask {
        let step = rng::hash(self.seed, Purpose::Dropout, self.step);
        let sequence = rng::hash(step, Purpose::Dropout, self.first_sequence + i as u64);
        let key = rng::hash(sequence, Purpose::Dropout, self.site);
        Mask {
            key: (key as u32, (key >> 32) as u32),
            threshold: (self.rate as f64 * 4_294_967_296.0) as u32,
            keep_scale: 1.0 / (1.0 - self.rate),
        }
    }
}

/// The mask of one sequence.
#[derive(Clone, Copy)]
pub struct Mask {
    key: (u32, u32),
    threshold: u32,
    keep_scale: f32,
}

impl Mask {
    /// The mask of part `i` of the sequence (a head): positions then count from 0 again, so that
    /// heads x S x S needs no more than 32 bits for S x S.
    pub fn part(&self, i: usize) -> Mask {
        let key = (self.key.1 as u64) << 32 | self.key.0 as u64;
        let key = rng::hash(key, Purpose::Dropout, i as u64);
        Mask {
            key: (key as u32, (key >> 32) as u32),
            ..*self
        }
    }

    /// 0 or `1 / (1 - rate)`, for the value at `position`.
    #[inline(always)]
    pub fn factor(&self, position: usize) -> f32 {
        // A 32-bit mix that vectorises; the two halves of the key keep sequences apart.
        let mut h = (position as u32).wrapping_add(self.key.0);
        h = (h ^ (h >> 16)).wrapping_mul(0x7feb_352d);
        h = (h ^ (h >> 15) ^ self.key.1).wrapping_mul(0x846c_a68b);
        h ^= h >> 16;
        if h >= self.threshold {
            self.keep_scale
        } else {
            0.0
        }
    }
}

/// Multiplies by the mask: (B, ..) to (B, ..).
pub struct Dropout(pub DropoutAt);

impl Dropout {
    fn apply(&self, x: &[f32], num_sequences: usize) -> Vec<f32> {
        let width = x.len() / num_sequences.max(1);
        let mut out = rows::buffer(x.len());
        let masks: Vec<Mask> = (0..num_sequences).map(|i| self.0.mask(i)).collect();
        // Rows of one value: chunks end anywhere, so a long sequence is shared by all threads.
        rows::for_each(&mut out, 64, |first, out| {
            let start = first * 64;
            for (i, out) in out.iter_mut().enumerate() {
                let at = start + i;
                *out = x[at] * masks[at / width].factor(at % width);
            }
        });
        out
    }
}

impl CustomOp1 for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::values(storage, layout)?;
        let out = self.apply(x, layout.dims().first().copied().unwrap_or(1));
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let dx = rows::with_values(grad, |dy| Ok(self.apply(dy, x.dim(0)?)))?;
        Ok(Some(rows::tensor(dx, x.shape())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::naive::Check;

    fn at(first_sequence: u64) -> DropoutAt {
        DropoutAt {
            rate: 0.3,
            seed: 5,
            step: 2,
            first_sequence,
            site: 1,
        }
    }

    #[test]
    fn matches_its_naive_twin() {
        let check = Check::new(&[]);
        let x = check.input(0, &[3, 7, 11]);
        let factors: Vec<f64> = (0..3)
            .flat_map(|b| (0..77).map(move |i| at(4).mask(b).factor(i) as f64))
            .collect();
        check.agrees1(&[], &x, Dropout(at(4)), |_, x| {
            x * Tensor::from_slice(&factors, (3, 7, 11), x.device())?
        });
    }

    #[test]
    fn parts_of_a_sequence_have_masks_of_their_own() {
        let mask = at(0).mask(0);
        let of = |mask: Mask| (0..64).map(|i| mask.factor(i)).collect::<Vec<_>>();
        let masks = [
            of(mask),
            of(mask.part(0)),
            of(mask.part(1)),
            of(mask.part(1 << 20)),
        ];
        for (i, a) in masks.iter().enumerate() {
            assert!(masks[..i].iter().all(|b| a != b), "part {i}");
        }
    }

    #[test]
    fn the_mask_belongs_to_the_sequence_of_the_global_batch() {
        let x = vec![1.0; 4 * 1000];
        let whole = Dropout(at(0)).apply(&x, 4);
        let halves = [0, 2].map(|first| Dropout(at(first)).apply(&x[..2000], 2));
        assert_eq!(whole, halves.concat());
        assert_ne!(whole[..1000], whole[1000..2000]);
        let dropped = whole.iter().filter(|&&v| v == 0.0).count();
        assert!((dropped as f32 / 4000.0 - 0.3).abs() < 0.03, "{dropped}");
        let mean = whole.iter().sum::<f32>() / 4000.0;
        assert!((mean - 1.0).abs() < 0.04, "{mean}");
    }
}
