//! Shards as they travel: blocks through the codec, the plain region of small parameters as f32.

use std::sync::Arc;

use crate::ops::UnitLayout;
use crate::quant::{Codec, F32};
use crate::{Error, Result};

/// How the shards of one unit are encoded. Every rank's piece has the same size, that of the largest.
#[derive(Clone)]
pub struct ShardCodec {
    codec: Arc<dyn Codec>,
    shard_len: usize,
    /// Elements before this go through the codec.
    coded: usize,
    /// Elements up to this are parameters; what follows is padding, which is not sent.
    end: usize,
}

impl ShardCodec {
    /// The encoding of shards of `shard_len` elements of a unit. A codec without scales takes the
    /// plain region too.
    pub fn new(codec: Arc<dyn Codec>, layout: &UnitLayout, shard_len: usize) -> Self {
        let ends = (0..layout.params.len()).map(|index| layout.range(index).end);
        let end = ends.max().unwrap_or(0).max(layout.plain_start);
        Self {
            coded: if codec.block() > 1 {
                layout.plain_start
            } else {
                end
            },
            codec,
            shard_len,
            end,
        }
    }

    /// Elements of `rank`'s shard that go through the codec, and that do not.
    fn split(&self, rank: usize) -> (usize, usize) {
        let start = rank * self.shard_len;
        let upto = |end: usize| end.clamp(start, start + self.shard_len) - start;
        (upto(self.coded), upto(self.end) - upto(self.coded))
    }

    /// Bytes of a piece.
    pub fn piece_bytes(&self, world: usize) -> usize {
        let bytes = |rank| {
            let (coded, plain) = self.split(rank);
            self.codec.encoded_bytes(coded) + F32.encoded_bytes(plain)
        };
        (0..world).map(bytes).max().unwrap_or(0)
    }

    /// Encodes `rank`'s shard into a piece.
    pub fn encode(&self, rank: usize, shard: &[f32], piece: &mut [u8]) {
        let (coded, plain) = self.split(rank);
        let (codes, rest) = piece.split_at_mut(self.codec.encoded_bytes(coded));
        self.codec.encode(&shard[..coded], codes);
        let (raw, unused) = rest.split_at_mut(F32.encoded_bytes(plain));
        F32.encode(&shard[coded..coded + plain], raw);
        unused.fill(0);
    }

    /// Decodes `rank`'s piece; padding becomes zero.
    ///
    /// # Errors
    /// [`Error::Peer`] when the piece is too short.
    pub fn decode(&self, rank: usize, piece: &[u8], shard: &mut [f32]) -> Result<()> {
        let (coded, plain) = self.split(rank);
        let codes = self.codec.encoded_bytes(coded);
        let end = codes + F32.encoded_bytes(plain);
        let (Some(coded_bytes), Some(raw)) = (piece.get(..codes), piece.get(codes..end)) else {
            return Err(Error::Peer(format!(
                "a piece of {} bytes from rank {rank}: expected {end}",
                piece.len()
            )));
        };
        self.codec.decode(coded_bytes, &mut shard[..coded])?;
        F32.decode(raw, &mut shard[coded..coded + plain])?;
        shard[coded + plain..].fill(0.0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::Symmetric;
    use crate::zero::partition::tests::layout;
    use crate::zero::shard_len;
    use proptest::prelude::*;

    /// The unit's values after a trip through `world` pieces.
    fn travel(layout: &UnitLayout, values: &[f32], world: usize) -> Vec<f32> {
        let len = shard_len(layout.num_elements, world);
        let codec = ShardCodec::new(Arc::new(Symmetric::new(8, 2048)), layout, len);
        let mut values = values.to_vec();
        values.resize(len * world, 0.0);
        let mut arrived = vec![f32::NAN; values.len()];
        for (rank, (shard, out)) in values.chunks(len).zip(arrived.chunks_mut(len)).enumerate() {
            let mut piece = vec![0xff; codec.piece_bytes(world)];
            codec.encode(rank, shard, &mut piece);
            codec.decode(rank, &piece, out).unwrap();
        }
        arrived.truncate(layout.num_elements);
        arrived
    }

    proptest! {
        /// What the quantizer does depends on the parameter alone, and not at all on small ones.
        #[test]
        fn the_number_of_ranks_changes_no_value(
            lens in prop::collection::vec(1usize..9000, 1..6),
            world in 1usize..9,
        ) {
            let layout = layout(&lens);
            let mut values = vec![0.0; layout.num_elements];
            for i in 0..lens.len() {
                for at in layout.range(i) {
                    values[at] = ((at * 37 % 101) as f32 - 50.0) * 0.01;
                }
            }
            let arrived = travel(&layout, &values, world);
            prop_assert_eq!(&arrived, &travel(&layout, &values, 1));
            prop_assert_eq!(&arrived[layout.plain_start..], &values[layout.plain_start..]);
            for (a, b) in arrived.iter().zip(&values) {
                prop_assert!((a - b).abs() <= 0.51 * 0.505 / 127.0);
            }
        }
    }
}
