//! Weights from their owners to everybody, for as long as a unit computes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::pool::Pools;
use super::shard_codec::ShardCodec;
use super::states::UnitStates;
use crate::comm::{Booking, Call, Comm, Groups, LinkBytes, Moved, Pending, Purpose};
use crate::quant::Codec;
use crate::{Error, Result};

/// A gather of one unit to come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Index of the unit.
    pub unit: usize,
    /// What it is for.
    pub purpose: Purpose,
}

/// Gathers units in the order in which they will be used, some ahead.
pub struct Gather {
    codec: Arc<dyn Codec>,
    /// Gathers started ahead of the one waited for.
    ahead: usize,
    pools: Pools,
    /// Not started yet.
    plan: VecDeque<Request>,
    started: VecDeque<(Request, u64, Pending<Vec<f32>>)>,
    live_bytes: usize,
    peak_bytes: usize,
}

impl Gather {
    /// A gatherer that keeps `ahead` gathers in flight and sends weights through `codec`.
    pub fn new(codec: Arc<dyn Codec>, ahead: usize, pools: Pools) -> Self {
        Self {
            codec,
            ahead,
            pools,
            plan: VecDeque::new(),
            started: VecDeque::new(),
            live_bytes: 0,
            peak_bytes: 0,
        }
    }

    /// Says what will be acquired next, after what was said before.
    pub fn plan(&mut self, requests: impl IntoIterator<Item = Request>) {
        self.plan.extend(requests);
    }

    /// Waits for the weights of the next unit of the plan, which is `unit`, and lends them to it.
    ///
    /// # Errors
    /// [`Error::Peer`] when the collective fails; [`Error::Tensor`] on a bug: another unit is
    /// next, or the weights are not of this version.
    pub fn acquire(&mut self, states: &[UnitStates], comm: &Comm, unit: usize) -> Result<()> {
        while self.started.len() <= self.ahead
            && let Some(request) = self.plan.pop_front()
        {
            self.start(states, comm, request);
        }
        let (name, version) = (states[unit].unit.name(), states[unit].version);
        match self.started.pop_front() {
            Some((request, gathered, pending)) if request.unit == unit => {
                let weights = pending.wait()?;
                if gathered != version {
                    return bug(format!(
                        "{name}: version {gathered} of {version} was gathered"
                    ));
                }
                Ok(states[unit].unit.buffer().lend_weights(weights)?)
            }
            other => {
                let next = other.map(|(request, ..)| request);
                bug(format!("{name} is used where {next:?} was planned"))
            }
        }
    }

    fn start(&mut self, states: &[UnitStates], comm: &Comm, request: Request) {
        let state = &states[request.unit];
        let Some(master) = state.master().cloned() else {
            return;
        };
        let booking = Booking {
            purpose: request.purpose,
            unit: state.unit.name().into(),
            algorithm: "all_gather",
            codec: self.codec.name(),
        };
        let len = master.len() * comm.topology().world();
        let weights = self.pools.values.take(len);
        self.live_bytes += len * 4;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        let layout = state.unit.buffer().layout();
        let is_exact = self.codec.is_identity();
        let codec = ShardCodec::new(self.codec.clone(), layout, master.len());
        let pools = self.pools.clone();
        let pending = comm.start(booking, move |groups| {
            let mut weights = weights;
            let bytes = match is_exact {
                true => all_gather_exact(groups, &master, &mut weights)?,
                false => all_gather(groups, &codec, &pools, &master, &mut weights)?,
            };
            Ok(Moved {
                elements: weights.len(),
                value: weights,
                bytes,
            })
        });
        self.started.push_back((request, state.version, pending));
    }

    /// Takes a unit's weights away again.
    ///
    /// # Errors
    /// [`Error::Tensor`] when candle refuses access to the buffer.
    pub fn release(&mut self, state: &UnitStates) -> Result<()> {
        if state.master().is_some() {
            let weights = state.unit.buffer().take_weights()?;
            self.live_bytes -= weights.len() * 4;
            self.pools.values.give(weights);
        }
        Ok(())
    }

    /// Bytes of gathered weights at most so far, lent or on their way.
    pub fn peak_bytes(&self) -> usize {
        self.peak_bytes
    }
}

fn bug<T>(what: String) -> Result<T> {
    Err(Error::Tensor(candle_core::Error::Msg(what)))
}

/// Every rank's `shard` into `whole`, through `codec`. Owners too see what the codec makes of
/// their weights.
fn all_gather(
    groups: &Groups,
    codec: &ShardCodec,
    pools: &Pools,
    shard: &[f32],
    whole: &mut [f32],
) -> Result<LinkBytes> {
    let world = &groups.world;
    let piece_bytes = codec.piece_bytes(world.size());
    let mut send = pools.bytes.take(piece_bytes);
    codec.encode(world.rank(), shard, &mut send);
    let mut all = pools.bytes.take(piece_bytes * world.size());
    world.all_gather(&send, &mut all)?;
    let pieces = all.chunks(piece_bytes).zip(whole.chunks_mut(shard.len()));
    for (rank, (piece, values)) in pieces.enumerate() {
        codec.decode(rank, piece, values)?;
    }
    pools.bytes.give(send);
    pools.bytes.give(all);
    Ok(world.volume(Call::AllGather { piece_bytes }))
}

/// [`all_gather`] without a codec: straight from the owners' memory into everybody's.
fn all_gather_exact(groups: &Groups, shard: &[f32], whole: &mut [f32]) -> Result<LinkBytes> {
    let piece_bytes = size_of_val(shard);
    let world = &groups.world;
    world.all_gather(bytemuck::cast_slice(shard), bytemuck::cast_slice_mut(whole))?;
    Ok(world.volume(Call::AllGather { piece_bytes }))
}
