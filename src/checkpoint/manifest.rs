//! What a checkpoint says of itself.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::config::RawConfig;
use crate::model::ModelConfig;
use crate::optim::OptimizerConfig;
use crate::{Error, Result};

/// Version of the folder's layout.
pub const FORMAT_VERSION: u32 = 1;

/// Where in the run a checkpoint stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Steps done; the next step has this number.
    pub step: u64,
    /// Updates applied: steps less the skipped ones.
    pub num_updates: u64,
    /// Steps skipped for values that were not finite.
    pub num_skipped: u64,
}

/// A file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Name in the folder.
    pub name: String,
    /// Exact size.
    pub num_bytes: u64,
    /// SHA-256 of the content, in hex.
    pub sha256: String,
}

/// `manifest.json`: position, what the tensors belong to, and the files with their hashes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The `FORMAT_VERSION` of the writer.
    pub format_version: u32,
    /// Where the run stood.
    pub position: Position,
    /// Seed of the run.
    pub seed: u64,
    /// The model the weights belong to.
    pub model: ModelConfig,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// The optimizer the state belongs to.
    pub optimizer: OptimizerConfig,
    /// Hash of the prepared data.
    pub data_hash: String,
    /// All other files of the folder.
    pub files: Vec<FileEntry>,
}

impl Manifest {
    /// The manifest of a run at `position`; the files are listed when they are written.
    pub fn new(position: Position, raw: &RawConfig, vocab_size: usize, data_hash: &str) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            position,
            seed: raw.run.seed,
            model: raw.model.clone(),
            vocab_size,
            optimizer: raw.optimizer.clone(),
            data_hash: data_hash.into(),
            files: Vec::new(),
        }
    }

    /// What makes `other` another run than this one; `None` when it is the same.
    pub fn first_difference(&self, other: &Self) -> Option<String> {
        let differ = |what: &str, a: &dyn std::fmt::Debug, b: &dyn std::fmt::Debug| {
            let (a, b) = (format!("{a:?}"), format!("{b:?}"));
            (a != b).then(|| format!("{what} was {a}, now it is {b}"))
        };
        differ("run.seed", &self.seed, &other.seed)
            .or_else(|| differ("[model]", &self.model, &other.model))
            .or_else(|| differ("the vocabulary", &self.vocab_size, &other.vocab_size))
            .or_else(|| differ("[optimizer]", &self.optimizer, &other.optimizer))
            .or_else(|| differ("the data's hash", &self.data_hash, &other.data_hash))
    }
}

impl FileEntry {
    /// Measures the file `name` in `folder`.
    pub fn of(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let mut file = File::open(&path).map_err(Error::io(&path))?;
        let mut hash = Sha256::new();
        let mut chunk = vec![0; 1 << 20];
        let mut num_bytes = 0;
        loop {
            match file.read(&mut chunk) {
                Ok(0) => break,
                Ok(n) => {
                    hash.update(&chunk[..n]);
                    num_bytes += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io(&path)(e)),
            }
        }
        let sha256 = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        Ok(Self {
            name: name.into(),
            num_bytes,
            sha256,
        })
    }
}
