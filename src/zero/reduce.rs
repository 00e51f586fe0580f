//! Gradients from everybody to their owners, while the unit before computes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::pool::Pools;
use super::states::UnitStates;
use crate::Result;
use crate::comm::{
    Booking, Call, Comm, Group, Groups, LinkBytes, Moved, Pending, Purpose, ReduceOp,
};
use crate::quant::{Codec, F32};

/// What a reduction gives back.
struct Reduced {
    /// The gradients of the whole unit: used up, or under stage 0 the sums.
    whole: Vec<f32>,
    /// The sums of this rank's shard; empty under stage 0.
    shard: Vec<f32>,
}

/// Reduces units' gradients, a few at a time.
pub struct Reduce {
    codec: Arc<dyn Codec>,
    /// Reductions in flight while the computation goes on.
    in_flight: usize,
    pools: Pools,
    started: VecDeque<(usize, Pending<Reduced>)>,
    live_bytes: usize,
    peak_bytes: usize,
}

impl Reduce {
    /// A reducer that keeps up to `in_flight` reductions running.
    pub fn new(codec: Arc<dyn Codec>, in_flight: usize, pools: Pools) -> Self {
        Self {
            codec,
            in_flight,
            pools,
            started: VecDeque::new(),
            live_bytes: 0,
            peak_bytes: 0,
        }
    }

    /// Bytes of whole units' gradients that were lent or on their way, at most so far.
    pub fn peak_bytes(&self) -> usize {
        self.peak_bytes
    }

    /// Lends unit `unit` a gradient buffer for a microbatch, if it has none.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] when candle refuses access to the buffer.
    pub fn lend(&mut self, state: &UnitStates, world: usize) -> Result<()> {
        if state.master().is_some() && !state.unit.buffer().has_grads() {
            let whole = self.pools.values.take(state.shard_len() * world);
            self.live_bytes += whole.len() * 4;
            self.peak_bytes = self.peak_bytes.max(self.live_bytes);
            state.unit.buffer().lend_grads(whole)?;
        }
        Ok(())
    }

    /// Starts reducing the gradients of unit `unit`: to the shards, or with every rank holding the
    /// whole unit to all.
    ///
    /// # Errors
    /// As [`Reduce::finish`] of earlier ones.
    pub fn start(&mut self, states: &mut [UnitStates], comm: &Comm, unit: usize) -> Result<()> {
        let state = &states[unit];
        let mut whole = state.unit.buffer().take_grads()?;
        let is_sharded = state.master().is_some();
        let (codec, pools) = (self.codec.clone(), self.pools.clone());
        let booking = Booking {
            purpose: Purpose::GradientReduce,
            unit: state.unit.name().into(),
            algorithm: match is_sharded {
                true => "reduce_scatter",
                false => "all_reduce",
            },
            codec: match is_sharded {
                true => codec.name(),
                false => F32.name(),
            },
        };
        let mut shard = match is_sharded {
            true => self.pools.values.take(state.shard_len()),
            false => Vec::new(),
        };
        let pending = comm.start(booking, move |groups| {
            let bytes = match is_sharded {
                true => reduce_scatter(groups, &*codec, &pools, &whole, &mut shard)?,
                false => {
                    groups.world.all_reduce(&mut whole, ReduceOp::Sum)?;
                    groups.world.volume(Call::AllReduce {
                        bytes: whole.len() * 4,
                    })
                }
            };
            Ok(Moved {
                elements: whole.len(),
                value: Reduced { whole, shard },
                bytes,
            })
        });
        self.started.push_back((unit, pending));
        while self.started.len() > self.in_flight {
            self.finish_one(states)?;
        }
        Ok(())
    }

    fn finish_one(&mut self, states: &mut [UnitStates]) -> Result<()> {
        let Some((unit, pending)) = self.started.pop_front() else {
            return Ok(());
        };
        let Reduced { whole, shard } = pending.wait()?;
        let state = &mut states[unit];
        if state.master().is_some() {
            self.pools.values.give(state.add_grads(shard));
            self.live_bytes -= whole.len() * 4;
            self.pools.values.give(whole);
        } else {
            state.unit.buffer().return_grads(whole)?;
        }
        Ok(())
    }

    /// Waits for all reductions.
    ///
    /// # Errors
    /// [`crate::Error::Peer`] when a collective fails.
    pub fn finish(&mut self, states: &mut [UnitStates]) -> Result<()> {
        while !self.started.is_empty() {
            self.finish_one(states)?;
        }
        Ok(())
    }
}

/// The sum over ranks of their `whole`, this rank's part of it, into `shard`.
///
/// An all-to-all and a sum in order: local ranks, then nodes. Each hop goes through `codec`; sums
/// are f32.
pub fn reduce_scatter(
    groups: &Groups,
    codec: &dyn Codec,
    pools: &Pools,
    whole: &[f32],
    shard: &mut [f32],
) -> Result<LinkBytes> {
    if codec.is_identity() {
        groups.world.reduce_scatter(whole, shard)?;
        return Ok(groups.world.volume(Call::ReduceScatter {
            piece_bytes: shard.len() * 4,
        }));
    }
    two_hop(groups, codec, pools, whole, shard)
}

/// [`reduce_scatter`] with any codec.
fn two_hop(
    groups: &Groups,
    codec: &dyn Codec,
    pools: &Pools,
    whole: &[f32],
    shard: &mut [f32],
) -> Result<LinkBytes> {
    let (nodes, locals) = (groups.cross.size(), groups.local.size());
    // Rank `node * locals + local` owns that piece: for every node, its pieces lie side by side,
    // one a local rank.
    let mut partial = pools.values.take(shard.len() * nodes);
    let mut moved = LinkBytes::default();
    for (run, sums) in whole
        .chunks(shard.len() * locals)
        .zip(partial.chunks_mut(shard.len()))
    {
        moved += hop(&*groups.local, codec, pools, run, sums)?;
    }
    moved += hop(&*groups.cross, codec, pools, &partial, shard)?;
    pools.values.give(partial);
    Ok(moved)
}

/// One all-to-all of encoded pieces and the sum of what arrives, in rank order. Alone, a rank has
/// nothing to send and nothing to round.
fn hop(
    group: &dyn Group,
    codec: &dyn Codec,
    pools: &Pools,
    pieces: &[f32],
    sums: &mut [f32],
) -> Result<LinkBytes> {
    let size = group.size();
    if size == 1 {
        sums.copy_from_slice(pieces);
        return Ok(LinkBytes::default());
    }
    let piece_bytes = codec.encoded_bytes(sums.len());
    let mut send = pools.bytes.take(piece_bytes * size);
    for (piece, bytes) in pieces.chunks(sums.len()).zip(send.chunks_mut(piece_bytes)) {
        codec.encode(piece, bytes);
    }
    let mut received = pools.bytes.take(piece_bytes * size);
    let sizes = vec![piece_bytes; size];
    group.all_to_all(&send, &sizes, &mut received, &sizes)?;
    let (first, rest) = received.split_at(piece_bytes);
    codec.decode(first, sums)?;
    for bytes in rest.chunks(piece_bytes) {
        codec.decode_accumulate(bytes, sums)?;
    }
    pools.bytes.give(send);
    pools.bytes.give(received);
    Ok(group.volume(Call::AllToAll { recv_bytes: &sizes }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::thread_groups;
    use proptest::prelude::*;

    /// Every rank's shard of the sums, by `reduce`.
    fn on_all_ranks(
        nodes: usize,
        local: usize,
        shard_len: usize,
        reduce: fn(&Groups, &[f32], &mut [f32]) -> LinkBytes,
    ) -> Vec<Vec<f32>> {
        let ranks = thread_groups(nodes, local).into_iter().map(|groups| {
            std::thread::spawn(move || {
                let world = groups.world.size();
                let whole: Vec<f32> = (0..shard_len * world)
                    .map(|i| value(groups.topology.rank, i))
                    .collect();
                let mut shard = vec![f32::NAN; shard_len];
                let before = groups.received();
                let moved = reduce(&groups, &whole, &mut shard);
                assert_eq!(before + moved, groups.received());
                shard
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    fn value(rank: usize, i: usize) -> f32 {
        ((i * 37 + rank * 101) % 64) as f32 * 0.37 - 11.0
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// I2: with 32 bits, the path of a codec gives the sums of the path without, bit for bit.
        #[test]
        fn the_identity_codec_sums_like_no_codec(
            nodes in 1usize..4,
            local in 1usize..4,
            shard_len in 1usize..50,
        ) {
            let plain = on_all_ranks(nodes, local, shard_len, |groups, whole, shard| {
                reduce_scatter(groups, &F32, &Pools::default(), whole, shard).unwrap()
            });
            let through_codec = on_all_ranks(nodes, local, shard_len, |groups, whole, shard| {
                two_hop(groups, &F32, &Pools::default(), whole, shard).unwrap()
            });
            prop_assert_eq!(&plain, &through_codec);
            for (rank, shard) in plain.iter().enumerate() {
                for (i, sum) in shard.iter().enumerate() {
                    let place = rank * shard_len + i;
                    let expected: f32 = (0..nodes * local).map(|r| value(r, place)).sum();
                    prop_assert!((sum - expected).abs() < 1e-3, "{} {}", sum, expected);
                }
            }
        }
    }
}
