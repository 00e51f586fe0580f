//! Collectives between ranks.

mod group;
mod stream;
mod topology;

pub use group::{Call, Group, LinkBytes, ReduceOp, Solo};
pub use stream::{Comm, Finished, Groups, Pending};
pub use topology::Topology;
