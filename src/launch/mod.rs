//! From "a launcher started me" to "every rank knows where every other rank listens".
//!
//! [`discover`] reads what the launcher says, [`join`] lets the ranks meet, and [`supervisor`] is the
//! launcher of `train launch`.

mod address; // which interface reaches the others
mod discover; // flags and environment -> rank, world, nodes, master
mod environment; // typed reads of the launcher's variables
mod flags; // the command line's share
mod frame; // length-checked messages between ranks that do not know each other yet
mod launchers; // one function a launcher
mod meeting; // rank 0's side of the rendezvous
mod output; // prefixed or filed lines of a rank
mod rank_process; // a rank as a child of the launcher
mod rendezvous; // the other ranks' side, and the way to rank 0
mod slurm; // host lists and task counts
pub mod supervisor; // starts, watches, stops and restarts the ranks of this host
mod tcp_store; // a client of torch's TCPStore
mod token; // what tells a job's own ranks from strangers

pub use discover::{Launch, Master, Source, discover, discover_from};
pub use environment::Environment;
pub use flags::LaunchFlags;
pub use rank_process::follow_launcher;
pub use rendezvous::join;
pub use token::Token;
