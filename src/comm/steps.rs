//! What collectives are made of, and how [`Group`]'s are made of it.
//!
//! A step carries the id of the collective that the caller called, so that ranks which called
//! different ones learn which. The pure collectives are one step in a leaf group and several in the
//! hierarchical one; an all-reduce is the same two steps in both.

use std::sync::MutexGuard;

use super::call_id::{CallId, Op, Scope};
use super::reduce::combine;
use super::{Call, Group, LinkBytes, ReduceOp};
use crate::Result;

/// All-reduces up to this many bytes gather everybody's values instead: one step, not two.
const SMALL_BYTES: usize = 16 << 10;

/// A group, seen from the inside.
pub(super) trait Steps: Group {
    /// This process's place in the group.
    fn place(&self) -> usize;

    /// Number of ranks.
    fn num_ranks(&self) -> usize;

    /// Ranks are summed in runs of this many, then the runs.
    fn run_len(&self) -> usize;

    /// What a caller of this group calls it.
    fn scope(&self) -> Scope;

    /// `recv` becomes every rank's `send`.
    fn all_gather_step(&self, id: CallId, send: &[u8], recv: &mut [u8]) -> Result<()>;

    /// `recv` becomes the combination of everybody's piece for this rank.
    fn reduce_scatter_step(
        &self,
        id: CallId,
        op: ReduceOp,
        send: &[f32],
        recv: &mut [f32],
    ) -> Result<()>;

    /// Piece `r` of `send` goes to rank `r`; `recv` likewise.
    fn all_to_all_step(&self, id: CallId, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<()>;

    /// `data` becomes rank `root`'s; nobody returns before all have arrived.
    fn broadcast_step(&self, id: CallId, data: &mut [u8], root: usize) -> Result<()>;

    /// A buffer that calls on this group use one after another: fresh large ones cost page faults.
    fn scratch(&self) -> MutexGuard<'_, Vec<f32>>;

    /// What the steps of `call`, anything but an all-reduce, receive.
    fn step_volume(&self, call: Call) -> LinkBytes;

    /// What arrived for calls that were made on the group `scope`.
    fn received_in(&self, scope: Scope) -> LinkBytes;
}

/// How an all-reduce of `len` values is cut: so many by scatter and gather, the rest by gathering
/// everybody's values in runs of at most the second number.
fn cut(len: usize, num_ranks: usize) -> (usize, usize) {
    let small = SMALL_BYTES / size_of::<f32>();
    if len <= small {
        (0, small)
    } else {
        (len - len % num_ranks, small)
    }
}

/// The first `len` values of a buffer that only grows.
pub(super) fn first(scratch: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    &mut scratch[..len]
}

fn all_reduce(group: &dyn Steps, data: &mut [f32], op: ReduceOp) -> Result<()> {
    let id = CallId::all_reduce(group.scope(), size_of_val(data), op);
    if data.is_empty() {
        return group.broadcast_step(id, &mut [], 0);
    }
    let (main, small) = cut(data.len(), group.num_ranks());
    let (main, rest) = data.split_at_mut(main);
    if !main.is_empty() {
        let mut scratch = group.scratch();
        let shard = first(&mut scratch, main.len() / group.num_ranks());
        group.reduce_scatter_step(id, op, main, shard)?;
        let (shard, main) = (bytemuck::cast_slice(shard), bytemuck::cast_slice_mut(main));
        group.all_gather_step(id, shard, main)?;
    }
    for part in rest.chunks_mut(small) {
        let mut all = vec![0.0f32; part.len() * group.num_ranks()];
        group.all_gather_step(
            id,
            bytemuck::cast_slice(part),
            bytemuck::cast_slice_mut(&mut all),
        )?;
        let run_values = part.len() * group.run_len();
        let mut run_sum = vec![0.0; part.len()];
        for (i, run) in all.chunks(run_values).enumerate() {
            let parts: Vec<&[f32]> = run.chunks(part.len()).collect();
            if i == 0 {
                combine(op, &parts, part);
            } else {
                combine(op, &parts, &mut run_sum);
                let so_far = part.to_vec();
                combine(op, &[&so_far, &run_sum], part);
            }
        }
    }
    Ok(())
}

fn all_reduce_volume(group: &dyn Steps, bytes: usize) -> LinkBytes {
    if bytes == 0 {
        return group.step_volume(Call::Barrier);
    }
    let value = size_of::<f32>();
    let (main, small) = cut(bytes / value, group.num_ranks());
    let mut volume = LinkBytes::default();
    let mut add = |call| volume += group.step_volume(call);
    if main > 0 {
        let piece_bytes = main / group.num_ranks() * value;
        add(Call::ReduceScatter { piece_bytes });
        add(Call::AllGather { piece_bytes });
    }
    let mut rest = bytes / value - main;
    while rest > 0 {
        let part = rest.min(small);
        add(Call::AllGather {
            piece_bytes: part * value,
        });
        rest -= part;
    }
    volume
}

/// Cuts `bytes` into pieces of the given sizes.
fn pieces<'a>(mut bytes: &'a [u8], sizes: &[usize]) -> Vec<&'a [u8]> {
    sizes
        .iter()
        .map(|&size| bytes.split_off(..size).expect("sizes add up"))
        .collect()
}

/// [`pieces`] to write to.
fn pieces_mut<'a>(mut bytes: &'a mut [u8], sizes: &[usize]) -> Vec<&'a mut [u8]> {
    sizes
        .iter()
        .map(|&size| bytes.split_off_mut(..size).expect("sizes add up"))
        .collect()
}

impl<S: Steps> Group for S {
    fn rank(&self) -> usize {
        self.place()
    }

    fn size(&self) -> usize {
        self.num_ranks()
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        assert_eq!(recv.len(), send.len() * self.num_ranks(), "all_gather");
        let id = CallId::new(self.scope(), Op::AllGather, send.len());
        self.all_gather_step(id, send, recv)
    }

    fn reduce_scatter(&self, send: &[f32], recv: &mut [f32]) -> Result<()> {
        assert_eq!(send.len(), recv.len() * self.num_ranks(), "reduce_scatter");
        let id = CallId::new(self.scope(), Op::ReduceScatter, size_of_val(recv));
        self.reduce_scatter_step(id, ReduceOp::Sum, send, recv)
    }

    fn all_reduce(&self, data: &mut [f32], op: ReduceOp) -> Result<()> {
        all_reduce(self, data, op)
    }

    fn all_to_all(
        &self,
        send: &[u8],
        send_bytes: &[usize],
        recv: &mut [u8],
        recv_bytes: &[usize],
    ) -> Result<()> {
        let counts = [send_bytes.len(), recv_bytes.len()];
        assert_eq!(counts, [self.num_ranks(); 2], "all_to_all: pieces");
        assert_eq!(
            send.len(),
            send_bytes.iter().sum::<usize>(),
            "all_to_all: send"
        );
        assert_eq!(
            recv.len(),
            recv_bytes.iter().sum::<usize>(),
            "all_to_all: recv"
        );
        let id = CallId::new(self.scope(), Op::AllToAll, 0);
        let mut recv = pieces_mut(recv, recv_bytes);
        self.all_to_all_step(id, &pieces(send, send_bytes), &mut recv)
    }

    fn broadcast(&self, data: &mut [u8], root: usize) -> Result<()> {
        assert!(root < self.num_ranks(), "broadcast from rank {root}");
        let id = CallId::broadcast(self.scope(), data.len(), root);
        self.broadcast_step(id, data, root)
    }

    fn barrier(&self) -> Result<()> {
        let id = CallId::new(self.scope(), Op::Barrier, 0);
        self.broadcast_step(id, &mut [], 0)
    }

    fn volume(&self, call: Call) -> LinkBytes {
        match call {
            Call::AllReduce { bytes } => all_reduce_volume(self, bytes),
            call => self.step_volume(call),
        }
    }

    fn received(&self) -> LinkBytes {
        self.received_in(self.scope())
    }
}
