//! The collective trait, and the group of one rank.

use crate::Result;

/// How an all-reduce combines values. Sums accumulate in f32, in rank order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum over ranks.
    Sum,
    /// Maximum over ranks.
    Max,
}

/// One collective with the buffers it works on.
///
/// Buffers are owned while the collective runs and come back through [`Pending::wait`], so an
/// asynchronous backend needs no lifetimes and a caller reuses its allocations.
#[derive(Debug)]
pub enum Collective {
    /// `recv` becomes every rank's `send`, concatenated in rank order. Bytes: the type is the codec's.
    AllGather { send: Vec<u8>, recv: Vec<u8> },
    /// `send` is `size` equal pieces; `recv` becomes the sum over ranks of the caller's piece.
    ReduceScatter { send: Vec<f32>, recv: Vec<f32> },
    /// `data` becomes the combination over ranks.
    AllReduce { data: Vec<f32>, op: ReduceOp },
    /// Piece `r` of `send` (of `send_bytes[r]` bytes) goes to rank `r`; `recv` likewise.
    AllToAll {
        send: Vec<u8>,
        send_bytes: Vec<usize>,
        recv: Vec<u8>,
        recv_bytes: Vec<usize>,
    },
    /// `data` becomes rank `root`'s `data`.
    Broadcast { data: Vec<u8>, root: usize },
    /// Returns once every rank has arrived.
    Barrier,
}

/// A started collective.
pub struct Pending {
    wait: Box<dyn FnOnce() -> Result<Collective> + Send>,
}

impl Pending {
    /// A collective that `wait` finishes.
    pub fn new(wait: impl FnOnce() -> Result<Collective> + Send + 'static) -> Self {
        Self {
            wait: Box::new(wait),
        }
    }

    /// Blocks until the collective is done and gives its buffers back.
    ///
    /// # Errors
    /// [`crate::Error::Peer`] naming the rank that failed or is missing.
    pub fn wait(self) -> Result<Collective> {
        (self.wait)()
    }
}

/// Ranks that call the same collectives in the same order.
pub trait Group: Send + Sync {
    /// This process's place in the group, `0..size`.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Starts a collective; every rank of the group must start the same one.
    ///
    /// # Errors
    /// [`crate::Error::Peer`] when the group has already failed.
    fn start(&self, collective: Collective) -> Result<Pending>;

    /// Combines a few numbers over all ranks and waits.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    fn all_reduce(&self, values: &[f32], op: ReduceOp) -> Result<Vec<f32>> {
        let data = values.to_vec();
        match self.start(Collective::AllReduce { data, op })?.wait()? {
            Collective::AllReduce { data, .. } => Ok(data),
            other => unreachable!("an all-reduce came back as {other:?}"),
        }
    }
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

    fn start(&self, mut collective: Collective) -> Result<Pending> {
        match &mut collective {
            Collective::AllGather { send, recv } | Collective::AllToAll { send, recv, .. } => {
                recv.copy_from_slice(send)
            }
            Collective::ReduceScatter { send, recv } => recv.copy_from_slice(send),
            Collective::AllReduce { .. } | Collective::Broadcast { .. } | Collective::Barrier => {}
        }
        Ok(Pending::new(move || Ok(collective)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_reduces_to_itself() {
        let group = Solo;
        assert_eq!(
            group.all_reduce(&[1.0, 2.0], ReduceOp::Sum).unwrap(),
            [1.0, 2.0]
        );
        let pending = group.start(Collective::AllGather {
            send: vec![7, 8],
            recv: vec![0, 0],
        });
        match pending.unwrap().wait().unwrap() {
            Collective::AllGather { recv, .. } => assert_eq!(recv, [7, 8]),
            other => panic!("{other:?}"),
        }
    }
}
