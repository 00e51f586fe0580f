//! Collectives between ranks.

mod assemble; // groups made of transports; ranks as threads
mod bootstrap; // from addresses to groups
mod call_id; // what a rank called, as others see it
mod config; // [comm]
mod frame; // messages on control connections
mod group; // the trait
mod handshake; // the first bytes on a connection
mod health; // the first cause of failure, who has left
mod hierarchical; // the world over nodes x local ranks
mod leaf; // a group over one transport
mod ledger; // what every collective moved
mod mesh; // connections between all ranks
mod reduce; // sums in rank order
mod shm; // transport: shared memory
mod steps; // what collectives are made of
mod stream; // collectives beside the computation
mod sys; // poll, futex
mod tcp; // transport: sockets
#[cfg(test)]
mod tests; // every collective against a naive twin
mod topology; // which ranks share a node
mod watch; // notices that a rank died

pub use assemble::{thread_groups, thread_groups_within};
pub use bootstrap::{Bootstrap, CommOptions, connect};
pub use config::{Backend, CommConfig, LocalTransport};
pub use group::{Call, Group, LinkBytes, ReduceOp, Solo};
pub use ledger::{Booking, Ledger, Purpose, PurposeTraffic, Totals, Traffic};
pub use stream::{Comm, Groups, Moved, Pending};
pub use topology::Topology;
