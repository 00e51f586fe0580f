//! Which ranks share a node.

use std::fmt;

use crate::{Error, Result};

/// The place of this rank among `num_nodes` x `local_size` ranks, which are numbered node by node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// This rank, `0..world`.
    pub rank: usize,
    /// Nodes.
    pub num_nodes: usize,
    /// Ranks on each node.
    pub local_size: usize,
}

impl Topology {
    /// The topology of one rank.
    pub const SOLO: Self = Self {
        rank: 0,
        num_nodes: 1,
        local_size: 1,
    };

    /// From the node of every rank, in rank order.
    ///
    /// # Errors
    /// [`Error::Config`] when nodes hold different numbers of ranks, or ranks of one node are not
    /// next to each other: hierarchical collectives would then not be what was asked for.
    pub fn from_nodes(rank: usize, node_of: &[usize]) -> Result<Self> {
        let num_nodes = node_of.iter().max().map_or(0, |last| last + 1);
        let world = node_of.len();
        let mut counts = vec![0usize; num_nodes];
        for &node in node_of {
            counts[node] += 1;
        }
        if num_nodes == 0 || counts.iter().any(|&count| count != counts[0]) {
            return Err(Error::Config(format!(
                "nodes have {counts:?} ranks: start the same number on every node \
                 (--nproc-per-node, --ntasks-per-node)"
            )));
        }
        let local_size = world / num_nodes;
        if let Some(wrong) = (0..world).find(|r| node_of[*r] != r / local_size) {
            return Err(Error::Config(format!(
                "rank {wrong} runs on node {} and not on node {}: ranks must be numbered node by node \
                 (srun --distribution=block, mpirun --map-by slot)",
                node_of[wrong],
                wrong / local_size
            )));
        }
        Ok(Self {
            rank,
            num_nodes,
            local_size,
        })
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.num_nodes * self.local_size
    }

    /// This rank's node.
    pub fn node(&self) -> usize {
        self.rank / self.local_size
    }

    /// This rank's place on its node.
    pub fn local_rank(&self) -> usize {
        self.rank % self.local_size
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        write!(
            f,
            "{} rank{} on {} node{}",
            self.world(),
            plural(self.world()),
            self.num_nodes,
            plural(self.num_nodes)
        )?;
        if self.num_nodes > 1 {
            write!(f, " of {}", self.local_size)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_must_be_even_and_in_order() {
        let topology = Topology::from_nodes(3, &[0, 0, 1, 1, 2, 2]).unwrap();
        assert_eq!((topology.num_nodes, topology.local_size), (3, 2));
        assert_eq!((topology.node(), topology.local_rank()), (1, 1));
        assert_eq!(topology.to_string(), "6 ranks on 3 nodes of 2");
        let ragged = Topology::from_nodes(0, &[0, 0, 1]).unwrap_err().to_string();
        assert!(ragged.contains("[2, 1]"), "{ragged}");
        let cyclic = Topology::from_nodes(0, &[0, 1, 0, 1]).unwrap_err();
        assert!(
            cyclic.to_string().contains("rank 1 runs on node 1"),
            "{cyclic}"
        );
    }
}
