//! What every codec can do.

use crate::Result;

/// Turns a run of f32 values into bytes and back. What it does to a block depends on the block
/// alone: never on its place, the world size or a bucket.
pub trait Codec: Send + Sync {
    /// Name for ledgers and logs, such as `dynamic8/256`.
    fn name(&self) -> String;

    /// Values that share a scale. A divisor of 2048; 1 when there are no scales.
    fn block(&self) -> usize;

    /// Whether the encoding is the values' own bytes in memory order: then nothing is encoded.
    fn is_identity(&self) -> bool {
        false
    }

    /// Exact number of bytes that `num_values` values encode to, scales included.
    fn encoded_bytes(&self, num_values: usize) -> usize;

    /// Encodes `values` into `bytes`, whose length is `encoded_bytes(values.len())`.
    fn encode(&self, values: &[f32], bytes: &mut [u8]);

    /// Decodes into `values`.
    ///
    /// # Errors
    /// [`crate::Error::Peer`] when `bytes` is not a valid encoding of that many values.
    fn decode(&self, bytes: &[u8], values: &mut [f32]) -> Result<()>;

    /// Adds the decoded values to `sums`, in f32.
    ///
    /// # Errors
    /// As [`Codec::decode`].
    fn decode_accumulate(&self, bytes: &[u8], sums: &mut [f32]) -> Result<()>;
}
