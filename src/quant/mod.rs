//! Codecs: f32 values to bytes and back.

mod codec;

pub use codec::Codec;
