//! Codecs: f32 values to bytes and back.

mod blockwise;
mod codec;
pub(crate) mod dynamic_kernel;
mod dynamic_map;
pub(crate) mod dynamic_naive;
mod float;
mod symmetric;

pub use blockwise::Blockwise;
pub use codec::Codec;
pub use dynamic_map::DynamicMap;
pub use float::{Bf16, F32};
pub use symmetric::Symmetric;
