//! Text to token shards to samples.

pub mod config; // [data]

pub use config::{DataConfig, ShardsConfig};
