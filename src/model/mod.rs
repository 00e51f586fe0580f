//! GPT-2's architecture as a list of units. Nothing here knows of ranks.

mod block;
mod config;
mod gpt;
mod head;
mod stable_embedding;
mod unit;

pub use config::{Init, ModelConfig};
pub use gpt::Gpt;
pub use unit::{Pass, Unit};
