//! Collectives between ranks.

mod group;
mod ledger;
mod stream;
mod topology;

pub use group::{Call, Group, LinkBytes, ReduceOp, Solo};
pub use ledger::{Label, Ledger, Purpose, PurposeTraffic, Totals, Traffic};
pub use stream::{Comm, Groups, Moved, Pending};
pub use topology::Topology;
