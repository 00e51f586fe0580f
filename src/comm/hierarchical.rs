//! The world group over nodes x local ranks: what crosses nodes enters each of them once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::call_id::{CallId, Scope};
use super::steps::{Steps, first};
use super::{Call, LinkBytes, ReduceOp, Topology};
use crate::Result;

/// All ranks, as nodes of local ranks, more than one of either.
pub(super) struct Hierarchical {
    topology: Topology,
    local: Arc<dyn Steps>,
    cross: Arc<dyn Steps>,
    /// All ranks, each connected to each: for an all-to-all between nodes.
    direct: Arc<dyn Steps>,
    /// Reused from call to call: fresh large buffers cost page faults.
    scratch: Mutex<Vec<f32>>,
    /// Between the hops of a reduction and of a gather.
    partial_sums: Mutex<Vec<f32>>,
    node_pieces: Mutex<Vec<u8>>,
}

impl Hierarchical {
    pub(super) fn new(
        topology: Topology,
        local: Arc<dyn Steps>,
        cross: Arc<dyn Steps>,
        direct: Arc<dyn Steps>,
    ) -> Self {
        Self {
            topology,
            local,
            cross,
            direct,
            scratch: Mutex::default(),
            partial_sums: Mutex::default(),
            node_pieces: Mutex::default(),
        }
    }

    /// A buffer; what a panicking call left in it is overwritten.
    fn lock<B>(buffer: &Mutex<B>) -> MutexGuard<'_, B> {
        buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ranks of this node.
    fn node(&self) -> std::ops::Range<usize> {
        let first = self.topology.node() * self.topology.local_size;
        first..first + self.topology.local_size
    }
}

/// `times` as much.
fn times(volume: LinkBytes, times: usize) -> LinkBytes {
    LinkBytes {
        intra_bytes: volume.intra_bytes * times as u64,
        inter_bytes: volume.inter_bytes * times as u64,
    }
}

impl Steps for Hierarchical {
    fn place(&self) -> usize {
        self.topology.rank
    }

    fn num_ranks(&self) -> usize {
        self.topology.world()
    }

    fn run_len(&self) -> usize {
        self.topology.local_size
    }

    fn scope(&self) -> Scope {
        Scope::World
    }

    /// Across nodes, then each node's pieces inside the node.
    fn all_gather_step(&self, id: CallId, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let (piece, nodes) = (send.len(), self.topology.num_nodes);
        let mut bytes = Self::lock(&self.node_pieces);
        let bytes = &mut *bytes;
        bytes.resize(bytes.len().max(piece * nodes), 0);
        let mine = &mut bytes[..piece * nodes];
        self.cross.all_gather_step(id, send, mine)?;
        let node_bytes = piece * self.topology.local_size;
        for node in 0..nodes {
            let mine = &mine[node * piece..(node + 1) * piece];
            let run = &mut recv[node * node_bytes..(node + 1) * node_bytes];
            self.local.all_gather_step(id, mine, run)?;
        }
        Ok(())
    }

    /// Each node's pieces inside the node, then across nodes.
    fn reduce_scatter_step(
        &self,
        id: CallId,
        op: ReduceOp,
        send: &[f32],
        recv: &mut [f32],
    ) -> Result<()> {
        let (piece, nodes) = (recv.len(), self.topology.num_nodes);
        let mut values = Self::lock(&self.partial_sums);
        let mine = first(&mut values, piece * nodes);
        let node_values = piece * self.topology.local_size;
        for node in 0..nodes {
            let run = &send[node * node_values..(node + 1) * node_values];
            let mine = &mut mine[node * piece..(node + 1) * piece];
            self.local.reduce_scatter_step(id, op, run, mine)?;
        }
        self.cross.reduce_scatter_step(id, op, mine, recv)
    }

    /// Inside the node over the local group, between nodes directly.
    fn all_to_all_step(&self, id: CallId, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<()> {
        let node = self.node();
        self.local
            .all_to_all_step(id, &send[node.clone()], &mut recv[node.clone()])?;
        let send: Vec<&[u8]> = (send.iter().enumerate())
            .map(|(rank, piece)| if node.contains(&rank) { &[] } else { *piece })
            .collect();
        let mut recv: Vec<&mut [u8]> = (recv.iter_mut().enumerate())
            .map(|(rank, piece)| match node.contains(&rank) {
                true => &mut [][..],
                false => &mut **piece,
            })
            .collect();
        self.direct.all_to_all_step(id, &send, &mut recv)
    }

    /// To the root's peer on each node, then inside the nodes.
    fn broadcast_step(&self, id: CallId, data: &mut [u8], root: usize) -> Result<()> {
        let (node, local) = (
            root / self.topology.local_size,
            root % self.topology.local_size,
        );
        // With nobody ahead of the local ranks, those who leave the cross step know of all nodes'.
        let ahead = if local == self.topology.local_rank() {
            &mut *data
        } else {
            &mut []
        };
        self.local.broadcast_step(id, &mut [], local)?;
        self.cross.broadcast_step(id, ahead, node)?;
        self.local.broadcast_step(id, data, local)
    }

    fn scratch(&self) -> MutexGuard<'_, Vec<f32>> {
        Self::lock(&self.scratch)
    }

    fn step_volume(&self, call: Call) -> LinkBytes {
        let (nodes, local_size) = (self.topology.num_nodes, self.topology.local_size);
        match call {
            Call::AllGather { .. } | Call::ReduceScatter { .. } => {
                self.cross.step_volume(call) + times(self.local.step_volume(call), nodes)
            }
            Call::AllToAll { recv_bytes } => {
                let node = self.node();
                let mut far = recv_bytes.to_vec();
                far[node.clone()].fill(0);
                let near = Call::AllToAll {
                    recv_bytes: &recv_bytes[node],
                };
                let far = Call::AllToAll { recv_bytes: &far };
                self.local.step_volume(near) + self.direct.step_volume(far)
            }
            Call::Broadcast { bytes, root } => {
                let (node, local) = (root / local_size, root % local_size);
                let ahead = local == self.topology.local_rank();
                let cross = Call::Broadcast {
                    bytes: if ahead { bytes } else { 0 },
                    root: node,
                };
                let local = Call::Broadcast { bytes, root: local };
                self.local.step_volume(Call::Barrier)
                    + self.cross.step_volume(cross)
                    + self.local.step_volume(local)
            }
            Call::Barrier => times(self.local.step_volume(call), 2) + self.cross.step_volume(call),
            Call::AllReduce { .. } => unreachable!("made of other steps"),
        }
    }

    fn received_in(&self, scope: Scope) -> LinkBytes {
        match scope {
            Scope::World => {
                self.local.received_in(scope)
                    + self.cross.received_in(scope)
                    + self.direct.received_in(scope)
            }
            Scope::Local => self.local.received_in(scope),
            Scope::Cross => self.cross.received_in(scope),
        }
    }
}
