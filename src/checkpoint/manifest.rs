//! What a checkpoint says of itself.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
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
    /// SHA-256 of this file as it was with [`NO_HASH`] here.
    pub manifest_sha256: String,
}

/// Stands in the place of the manifest's own hash while that is computed.
const NO_HASH: &str = "0000000000000000000000000000000000000000000000000000000000000000";

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
            manifest_sha256: NO_HASH.into(),
        }
    }

    /// The content of `manifest.json`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for what JSON cannot hold.
    pub fn to_json(&self) -> Result<String> {
        let unhashed = Self {
            manifest_sha256: NO_HASH.into(),
            ..self.clone()
        };
        let text = serde_json::to_string_pretty(&unhashed)
            .map_err(|e| Error::Checkpoint(format!("manifest: {e}")))?;
        let hash = hex(&Sha256::digest(&text));
        Ok(text.replace(NO_HASH, &hash))
    }

    /// Reads what [`Manifest::to_json`] wrote.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for another version; [`Error::Data`] with what is wrong when the text
    /// is not what was written.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        /// The field that every version has.
        #[derive(Deserialize)]
        struct Version {
            format_version: u32,
        }
        let wrong = |e: &dyn std::fmt::Display| Error::Data(e.to_string());
        let text = std::str::from_utf8(text).map_err(|e| wrong(&e))?;
        let Version { format_version } = serde_json::from_str(text).map_err(|e| wrong(&e))?;
        if format_version != FORMAT_VERSION {
            return Err(Error::Checkpoint(format!(
                "format_version is {format_version}, but this program reads {FORMAT_VERSION}: \
                 resume with the program that wrote it"
            )));
        }
        let manifest: Self = serde_json::from_str(text).map_err(|e| wrong(&e))?;
        let unhashed = text.replace(&manifest.manifest_sha256, NO_HASH);
        let found = hex(&Sha256::digest(unhashed));
        if found != manifest.manifest_sha256 {
            return Err(wrong(&format!(
                "its hash is {found}, but it says {}",
                manifest.manifest_sha256
            )));
        }
        Ok(manifest)
    }

    /// What makes `other` another run than this one; `None` when it is the same.
    pub fn first_difference(&self, other: &Self) -> Option<String> {
        difference("run.seed", &self.seed, &other.seed)
            .or_else(|| difference("model", &self.model, &other.model))
            .or_else(|| difference("the vocabulary", &self.vocab_size, &other.vocab_size))
            .or_else(|| difference("optimizer", &self.optimizer, &other.optimizer))
            .or_else(|| difference("the hash of [data]", &self.data_hash, &other.data_hash))
    }
}

/// The first value in `a` that is another one in `b`, by its key.
fn difference(key: &str, a: &impl Serialize, b: &impl Serialize) -> Option<String> {
    fn first(key: &str, a: &Value, b: &Value) -> Option<String> {
        match (a, b) {
            (Value::Object(a), Value::Object(b)) => a.iter().find_map(|(name, value)| {
                let other = b.get(name).unwrap_or(&Value::Null);
                first(&format!("{key}.{name}"), value, other)
            }),
            _ => (a != b).then(|| format!("{key} was {a}, now it is {b}")),
        }
    }
    first(key, &as_written(a), &as_written(b))
}

/// A value as its JSON text says it: 0.1, where the f32 itself is 0.10000000149.
fn as_written(value: &impl Serialize) -> Value {
    let text = serde_json::to_string(value);
    // Numbers and short texts: JSON holds all of them.
    text.and_then(|text| serde_json::from_str(&text))
        .unwrap_or_default()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
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
        let sha256 = hex(&hash.finalize());
        Ok(Self {
            name: name.into(),
            num_bytes,
            sha256,
        })
    }
}
