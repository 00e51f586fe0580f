//! Collectives between ranks.

mod group;

pub use group::{Collective, Group, Pending, ReduceOp, Solo};
