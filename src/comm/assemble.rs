//! From transports to the groups of a rank; ranks as threads of one process.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::call_id::Scope;
use super::health::Health;
use super::hierarchical::Hierarchical;
use super::leaf::{Leaf, Members, Transport};
use super::shm::{Region, Shm};
use super::steps::Steps;
use super::watch::Lifeline;
use super::{Group, Groups, Solo, Topology};

/// The leaf groups of a rank; a group of one rank is None.
pub(super) struct Leaves {
    /// The ranks of this node.
    pub(super) local: Option<Arc<dyn Steps>>,
    /// The ranks with this local rank.
    pub(super) cross: Option<Arc<dyn Steps>>,
    /// All ranks, when there are several nodes of several ranks.
    pub(super) direct: Option<Arc<dyn Steps>>,
}

/// Makes the leaf groups of one rank.
pub(super) struct Builder<'a> {
    pub(super) topology: Topology,
    pub(super) health: &'a Arc<Health>,
    pub(super) timeout: Duration,
}

impl Builder<'_> {
    /// The ranks of this node, over `transport`.
    pub(super) fn local(&self, transport: impl Transport + 'static) -> Arc<dyn Steps> {
        let scope = match self.topology.num_nodes {
            1 => Scope::World,
            _ => Scope::Local,
        };
        self.leaf(Members::local(self.topology), scope, transport)
    }

    /// The ranks with this local rank.
    pub(super) fn cross(&self, transport: impl Transport + 'static) -> Arc<dyn Steps> {
        let scope = match self.topology.local_size {
            1 => Scope::World,
            _ => Scope::Cross,
        };
        self.leaf(Members::cross(self.topology), scope, transport)
    }

    /// All ranks.
    pub(super) fn direct(&self, transport: impl Transport + 'static) -> Arc<dyn Steps> {
        self.leaf(Members::world(self.topology), Scope::World, transport)
    }

    fn leaf(
        &self,
        members: Members,
        scope: Scope,
        transport: impl Transport + 'static,
    ) -> Arc<dyn Steps> {
        let health = self.health.clone();
        Arc::new(Leaf::new(members, scope, health, self.timeout, transport))
    }
}

impl Leaves {
    /// The groups made of them.
    pub(super) fn groups(self, topology: Topology, lifeline: Lifeline) -> Groups {
        let group = |leaf: &Option<Arc<dyn Steps>>| -> Arc<dyn Group> {
            match leaf {
                Some(leaf) => leaf.clone(),
                None => Arc::new(Solo),
            }
        };
        let (local, cross) = (group(&self.local), group(&self.cross));
        let world: Arc<dyn Group> = match (self.local, self.cross, self.direct) {
            (Some(local), Some(cross), Some(direct)) => {
                Arc::new(Hierarchical::new(topology, local, cross, direct))
            }
            (_, None, _) => local.clone(),
            _ => cross.clone(),
        };
        Groups {
            topology,
            world,
            local,
            cross,
            lifeline,
        }
    }
}

/// The groups of `num_nodes` x `local_size` ranks that are threads of this process, in rank order:
/// for tests and benchmarks. "Nodes" share memory too, but count as such.
///
/// # Panics
/// When the system has no memory for them.
pub fn thread_groups(num_nodes: usize, local_size: usize) -> Vec<Groups> {
    thread_groups_within(num_nodes, local_size, Duration::from_secs(300))
}

/// [`thread_groups`] whose collectives fail after `timeout` without progress.
///
/// # Panics
/// As [`thread_groups`].
pub fn thread_groups_within(num_nodes: usize, local_size: usize, timeout: Duration) -> Vec<Groups> {
    let world = num_nodes * local_size;
    let memory = |size: usize| -> Option<Arc<Region>> {
        let region = || -> io::Result<Region> { Region::anonymous(size) };
        (size > 1).then(|| Arc::new(region().expect("memory for the lanes of a group")))
    };
    let locals: Vec<_> = (0..num_nodes).map(|_| memory(local_size)).collect();
    let crosses: Vec<_> = (0..local_size).map(|_| memory(num_nodes)).collect();
    let direct = match num_nodes > 1 && local_size > 1 {
        true => memory(world),
        false => None,
    };
    let rank = |(rank, health): (usize, Arc<Health>)| {
        let topology = Topology {
            rank,
            num_nodes,
            local_size,
        };
        let builder = Builder {
            topology,
            health: &health,
            timeout,
        };
        let (node, place) = (topology.node(), topology.local_rank());
        let shm = |region: &Option<Arc<Region>>, me, size| {
            region.clone().map(|region| Shm::new(region, me, size))
        };
        let leaves = Leaves {
            local: shm(&locals[node], place, local_size).map(|t| builder.local(t)),
            cross: shm(&crosses[place], node, num_nodes).map(|t| builder.cross(t)),
            direct: shm(&direct, rank, world).map(|t| builder.direct(t)),
        };
        leaves.groups(topology, Lifeline::threads(health.clone()))
    };
    Health::threads(world)
        .into_iter()
        .enumerate()
        .map(rank)
        .collect()
}
