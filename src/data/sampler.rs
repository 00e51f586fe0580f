//! Training samples and validation windows.
//!
//! S is the sequence length. A sample is S + 1 consecutive tokens: the first S are the inputs, the
//! last S the targets.

use crate::data::shard::Shard;
use crate::rng::{Purpose, hash};
use crate::{Error, Result};

/// Draws training samples: sample = f(seed, step, index in the global batch).
///
/// It knows nothing of ranks or microbatches, so however a global batch is cut, the samples are
/// the same. Starts are independent and uniform over every valid window, as in nanoGPT.
#[derive(Clone, Copy, Debug)]
pub struct Sampler<'a> {
    shard: &'a Shard,
    seed: u64,
    seq_len: usize,
}

impl<'a> Sampler<'a> {
    /// A sampler of `seq_len` + 1 tokens at a time.
    ///
    /// # Errors
    /// [`Error::Data`] where the shard has fewer tokens than one sample.
    pub fn new(shard: &'a Shard, seed: u64, seq_len: usize) -> Result<Self> {
        check_length(shard, seq_len)?;
        Ok(Self {
            shard,
            seed,
            seq_len,
        })
    }

    /// Samples `first_index .. first_index + count` of the global batch of `step`: inputs and
    /// targets, both (count, S) in row order.
    ///
    /// # Panics
    /// Where a step or an index reaches 2^32.
    pub fn fill(&self, step: u64, first_index: u64, count: usize) -> (Vec<u32>, Vec<u32>) {
        let starts = (first_index..).take(count).map(|i| self.start(step, i));
        windows(self.shard, self.seq_len, count, starts)
    }

    /// First token of a sample, in 0 ..= num_tokens - S - 1.
    fn start(&self, step: u64, index: u64) -> usize {
        assert!(
            step < 1 << 32 && index < 1 << 32,
            "step {step}, index {index}"
        );
        let num_starts = (self.shard.num_tokens() - self.seq_len) as u64;
        let bits = hash(self.seed, Purpose::Sample, step << 32 | index);
        // The high half of the product maps 64 bits to the range without a division.
        ((bits as u128 * num_starts as u128) >> 64) as usize
    }
}

/// A shard as consecutive windows of S + 1 tokens that advance by S, as llm.c evaluates: each
/// token but the first is a target once. An incomplete last window is left out.
#[derive(Clone, Copy, Debug)]
pub struct Windows<'a> {
    shard: &'a Shard,
    seq_len: usize,
}

impl<'a> Windows<'a> {
    /// The windows of a shard.
    ///
    /// # Errors
    /// [`Error::Data`] where the shard has fewer tokens than one window.
    pub fn new(shard: &'a Shard, seq_len: usize) -> Result<Self> {
        check_length(shard, seq_len)?;
        Ok(Self { shard, seq_len })
    }

    /// Number of windows, at least 1.
    pub fn num_windows(&self) -> usize {
        (self.shard.num_tokens() - 1) / self.seq_len
    }

    /// Windows `first .. first + count`: inputs and targets, both (count, S) in row order.
    ///
    /// # Panics
    /// Where the range passes [`Windows::num_windows`].
    pub fn fill(&self, first: usize, count: usize) -> (Vec<u32>, Vec<u32>) {
        let starts = (first..first + count).map(|w| w * self.seq_len);
        windows(self.shard, self.seq_len, count, starts)
    }

    /// All windows in order, up to `batch` of them at a time.
    pub fn batches(self, batch: usize) -> impl Iterator<Item = (Vec<u32>, Vec<u32>)> + 'a {
        let num_windows = self.num_windows();
        (0..num_windows)
            .step_by(batch)
            .map(move |first| self.fill(first, batch.min(num_windows - first)))
    }
}

fn check_length(shard: &Shard, seq_len: usize) -> Result<()> {
    if seq_len == 0 {
        return Err(Error::Config(
            "model.seq_len = 0: must be at least 1".into(),
        ));
    }
    if shard.num_tokens() <= seq_len {
        return Err(Error::Data(format!(
            "{}: {} tokens, but a window of model.seq_len = {seq_len} takes {}: use more text or a \
             shorter sequence",
            shard.path().display(),
            shard.num_tokens(),
            seq_len + 1
        )));
    }
    Ok(())
}

/// Reads one window of S + 1 tokens at each start.
fn windows(
    shard: &Shard,
    seq_len: usize,
    count: usize,
    starts: impl Iterator<Item = usize>,
) -> (Vec<u32>, Vec<u32>) {
    let mut inputs = Vec::with_capacity(count * seq_len);
    let mut targets = Vec::with_capacity(count * seq_len);
    let mut window = vec![0; seq_len + 1];
    for start in starts {
        shard.read(start, &mut window);
        inputs.extend_from_slice(&window[..seq_len]);
        targets.extend_from_slice(&window[1..]);
    }
    (inputs, targets)
}
