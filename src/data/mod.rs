//! Text to token shards to samples.
//!
//! `prepare` reads the corpus once, tokenizes it and leaves two memory-mapped shards in a cache
//! folder named after the content; the training loop draws samples from the first and evaluates
//! on the second.

pub mod config; // [data]
pub mod corpus; // files, folders, globs and crates -> documents and their hash
pub mod ngram; // unigram and bigram cross-entropy, the baselines a model has to beat
pub mod prepare; // corpus -> tokenizer -> split -> cached shards
pub mod sampler; // training samples and validation windows
pub mod shard; // token files: llm.c's and nanoGPT's formats
mod subword; // byte-pair encoding and tokenizer.json
pub mod tokenizer; // text <-> token ids: bytes, characters, subwords

pub use config::{DataConfig, ShardsConfig};
pub use prepare::{Dataset, Meta, prepare};
pub use sampler::{Sampler, Windows};
pub use shard::Shard;
pub use tokenizer::Tokenizer;
