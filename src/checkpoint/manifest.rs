//! What a checkpoint says of itself.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::config::Plan;
use crate::durable::{hex, sha256_file};
use crate::model::ModelConfig;
use crate::optim::OptimizerConfig;
use crate::optim::lr::LrConfig;
use crate::zero::PrecisionConfig;
use crate::{Error, Result};

/// Version of the folder's layout.
pub const FORMAT_VERSION: u32 = 3;

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
    /// Sequences a step: they decide which samples a step has.
    pub global_batch: usize,
    /// The learning rate so far.
    pub lr: LrConfig,
    /// Steps of the whole run, on which the learning rate depends.
    pub steps: u64,
    /// Largest gradient norm so far.
    pub grad_clip: f32,
    /// Float formats between ranks so far.
    pub precision: PrecisionConfig,
    /// Ranks so far: they decide in which order gradients are summed.
    pub num_ranks: usize,
    /// All other files of the folder.
    pub files: Vec<FileEntry>,
    /// SHA-256 of this file as it was with 64 zeros here.
    pub manifest_sha256: String,
}

/// Stands in the place of the manifest's own hash while that is computed.
const NO_HASH: &str = "0000000000000000000000000000000000000000000000000000000000000000";

impl Manifest {
    /// The manifest of a run at `position`; the files are listed when they are written.
    pub fn new(position: Position, plan: &Plan, vocab_size: usize, data_hash: &str) -> Self {
        let raw = plan.raw();
        Self {
            format_version: FORMAT_VERSION,
            position,
            seed: raw.run.seed,
            model: raw.model.clone(),
            vocab_size,
            optimizer: raw.optimizer.clone(),
            data_hash: data_hash.into(),
            global_batch: plan.global_batch,
            lr: raw.lr.clone(),
            steps: raw.train.steps,
            grad_clip: raw.train.grad_clip,
            precision: raw.precision.clone(),
            num_ranks: plan.topology.world(),
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
    pub fn first_difference(&self, other: &Self) -> Option<Difference> {
        let all = [
            differences("run.seed", &self.seed, &other.seed),
            differences("model", &self.model, &other.model),
            differences("the vocabulary", &self.vocab_size, &other.vocab_size),
            differences("optimizer", &self.optimizer, &other.optimizer),
            differences("the hash of [data]", &self.data_hash, &other.data_hash),
            differences(
                "train.global_batch",
                &self.global_batch,
                &other.global_batch,
            ),
        ];
        all.into_iter().flatten().next()
    }

    /// What `other` does differently from here on, as the same run.
    pub fn changes(&self, other: &Self) -> Vec<Difference> {
        let mut changes = differences("lr", &self.lr, &other.lr);
        changes.extend(differences("train.steps", &self.steps, &other.steps));
        changes.extend(differences(
            "train.grad_clip",
            &self.grad_clip,
            &other.grad_clip,
        ));
        changes.extend(differences("precision", &self.precision, &other.precision));
        changes.extend(differences(
            "the number of ranks",
            &self.num_ranks,
            &other.num_ranks,
        ));
        changes
    }
}

/// A value of one manifest that is another one in a later manifest.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    key: String,
    was: Value,
    now: Value,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} was {}, now it is {}", self.key, self.was, self.now)
    }
}

/// The values in `a` that are others in `b`, by their keys.
fn differences(key: &str, a: &impl Serialize, b: &impl Serialize) -> Vec<Difference> {
    fn collect(key: &str, a: &Value, b: &Value, found: &mut Vec<Difference>) {
        match (a, b) {
            (Value::Object(a), Value::Object(b)) => {
                for (name, value) in a {
                    let other = b.get(name).unwrap_or(&Value::Null);
                    collect(&format!("{key}.{name}"), value, other, found);
                }
            }
            _ if a != b => found.push(Difference {
                key: key.into(),
                was: a.clone(),
                now: b.clone(),
            }),
            _ => {}
        }
    }
    let mut found = Vec::new();
    collect(key, &as_written(a), &as_written(b), &mut found);
    found
}

/// A value as its JSON text says it: 0.1, where the f32 itself is 0.10000000149.
fn as_written(value: &impl Serialize) -> Value {
    let text = serde_json::to_string(value);
    // Numbers and short texts: JSON holds all of them.
    text.and_then(|text| serde_json::from_str(&text))
        .unwrap_or_default()
}

impl FileEntry {
    /// Measures the file `name` in `folder`.
    pub fn of(folder: &Path, name: &str) -> Result<Self> {
        let (num_bytes, sha256) = sha256_file(&folder.join(name))?;
        Ok(Self {
            name: name.into(),
            num_bytes,
            sha256,
        })
    }
}
