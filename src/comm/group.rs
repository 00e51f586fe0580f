//! The collective trait, and the group of one rank.

use std::ops::{Add, AddAssign};

use serde::Serialize;

use crate::Result;

/// How an all-reduce combines values. Sums accumulate in f32, in rank order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum over ranks.
    Sum,
    /// Maximum over ranks; NaN if any is.
    Max,
}

/// Bytes by the link they cross.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LinkBytes {
    /// Between ranks of one node.
    pub intra_bytes: u64,
    /// Between nodes.
    pub inter_bytes: u64,
}

impl Add for LinkBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            intra_bytes: self.intra_bytes + other.intra_bytes,
            inter_bytes: self.inter_bytes + other.inter_bytes,
        }
    }
}

impl AddAssign for LinkBytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// A collective and its sizes, to ask what it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call<'a> {
    /// [`Group::all_gather`] of `piece_bytes` a rank.
    AllGather { piece_bytes: usize },
    /// [`Group::reduce_scatter`] of `piece_bytes` a rank.
    ReduceScatter { piece_bytes: usize },
    /// [`Group::all_reduce`] of `bytes` in all.
    AllReduce { bytes: usize },
    /// [`Group::all_to_all`].
    AllToAll { recv_bytes: &'a [usize] },
    /// [`Group::broadcast`] of `bytes` from `root`.
    Broadcast { bytes: usize, root: usize },
    /// [`Group::barrier`].
    Barrier,
}

/// Ranks that call the same collectives in the same order.
///
/// Calls block; [`Comm`](super::Comm) runs them beside the computation. Pieces are equal:
/// `send.len() / size` and so on must be whole and the same on every rank.
///
/// # Errors
/// Every collective fails with [`crate::Error::Peer`] naming the rank that is missing, has failed
/// or called another collective; from then on the group stays failed.
pub trait Group: Send + Sync {
    /// This process's place in the group, `0..size`.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// `recv` becomes every rank's `send`, in rank order. Bytes: the type is the codec's.
    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()>;

    /// `send` is `size` pieces; `recv` becomes the sum over ranks of the caller's piece. Ranks are
    /// added in rank order inside a node, then nodes in node order.
    fn reduce_scatter(&self, send: &[f32], recv: &mut [f32]) -> Result<()>;

    /// `data` becomes the combination over ranks: the same bits on every rank.
    fn all_reduce(&self, data: &mut [f32], op: ReduceOp) -> Result<()>;

    /// Piece `r` of `send` (`send_bytes[r]` bytes) goes to rank `r`; `recv` likewise, in rank
    /// order. `recv_bytes[r]` must be what rank `r` sends; 0 is a size.
    fn all_to_all(
        &self,
        send: &[u8],
        send_bytes: &[usize],
        recv: &mut [u8],
        recv_bytes: &[usize],
    ) -> Result<()>;

    /// `data` becomes rank `root`'s `data`.
    fn broadcast(&self, data: &mut [u8], root: usize) -> Result<()>;

    /// Returns once every rank has arrived.
    fn barrier(&self) -> Result<()>;

    /// What this rank receives in `call`, by the algorithm's formula, framing included.
    fn volume(&self, call: Call) -> LinkBytes;

    /// What this rank has received so far, counted where the bytes arrive.
    fn received(&self) -> LinkBytes;
}

/// The group of one rank: every collective is a copy.
#[derive(Debug, Default)]
pub struct Solo;

impl Group for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        recv.copy_from_slice(send);
        Ok(())
    }

    fn reduce_scatter(&self, send: &[f32], recv: &mut [f32]) -> Result<()> {
        recv.copy_from_slice(send);
        Ok(())
    }

    fn all_reduce(&self, _: &mut [f32], _: ReduceOp) -> Result<()> {
        Ok(())
    }

    fn all_to_all(&self, send: &[u8], _: &[usize], recv: &mut [u8], _: &[usize]) -> Result<()> {
        recv.copy_from_slice(send);
        Ok(())
    }

    fn broadcast(&self, _: &mut [u8], _: usize) -> Result<()> {
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn volume(&self, _: Call) -> LinkBytes {
        LinkBytes::default()
    }

    fn received(&self) -> LinkBytes {
        LinkBytes::default()
    }
}
