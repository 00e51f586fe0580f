//! The validated config with what follows from it: the only thing the rest of the program reads.

use std::path::{Path, PathBuf};

use super::RawConfig;
use super::check::findings;
use super::explain::Origins;
use super::schema::{Kind, Schema, shortest};
use crate::comm::Topology;
use crate::{Error, Result, runtime};

/// A config whose values can work together.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    raw: RawConfig,
    resolved: String,
    /// The run folder, `run.dir/run.name`.
    pub run_dir: PathBuf,
    /// Sequences a step.
    pub global_batch: usize,
    /// Micro-batches a rank accumulates in a step.
    pub micro_steps: usize,
    /// Compute threads a rank.
    pub threads: usize,
    /// This rank among all.
    pub topology: Topology,
}

impl Plan {
    /// Loads as [`RawConfig::load`] does, and validates.
    ///
    /// # Errors
    /// [`Error::Config`] as there and in [`Plan::validate`], with where the values were set.
    pub fn load(path: &Path, sets: &[String]) -> Result<Self> {
        Self::load_for(path, sets, Topology::SOLO, 1)
    }

    /// [`Plan::load`] for a rank among others, of which `ranks_here` share its machine's cores.
    ///
    /// # Errors
    /// As [`Plan::load`].
    pub fn load_for(
        path: &Path,
        sets: &[String],
        topology: Topology,
        ranks_here: usize,
    ) -> Result<Self> {
        let (raw, origins) = RawConfig::load_with_origins(path, sets)?;
        Self::derive(raw, &origins, topology, ranks_here)
    }

    /// Checks every value and derives the rest.
    ///
    /// # Errors
    /// [`Error::Config`] with all findings, each naming key, value and what would be right.
    pub fn validate(raw: RawConfig) -> Result<Self> {
        Self::derive(raw, &Origins::default(), Topology::SOLO, 1)
    }

    fn derive(
        raw: RawConfig,
        origins: &Origins,
        topology: Topology,
        ranks_here: usize,
    ) -> Result<Self> {
        let num_ranks = topology.world();
        let found = findings(&raw, num_ranks).0;
        if !found.is_empty() {
            let found: Vec<String> = found.iter().map(|f| origins.annotate(f)).collect();
            return Err(Error::Config(found.join("\n        ")));
        }
        let at_once = raw.train.micro_batch * num_ranks;
        let global_batch = raw.train.global_batch.unwrap_or(at_once);
        Ok(Self {
            run_dir: raw.run.dir.join(&raw.run.name),
            global_batch,
            micro_steps: global_batch / at_once,
            threads: (raw.train.threads).unwrap_or_else(|| runtime::cores_each(ranks_here)),
            topology,
            resolved: to_toml(&raw)?,
            raw,
        })
    }

    /// The values as the user gave them, with defaults filled in.
    pub fn raw(&self) -> &RawConfig {
        &self.raw
    }

    /// Tokens a step.
    pub fn tokens_per_step(&self) -> usize {
        self.global_batch * self.raw.model.seq_len
    }

    /// The whole config as TOML, for the run folder: loading it gives the same [`RawConfig`].
    pub fn resolved_toml(&self) -> String {
        self.resolved.clone()
    }

    /// Rows of the embedding for a tokenizer of `tokenizer_vocab` tokens: `model.vocab_size` when
    /// given (it may be larger, as padded vocabularies are), the tokenizer's otherwise.
    ///
    /// # Errors
    /// [`Error::Config`] when `model.vocab_size` is too small for the tokenizer.
    pub fn check_vocab(&self, tokenizer_vocab: usize) -> Result<usize> {
        match self.raw.model.vocab_size {
            Some(vocab) if vocab < tokenizer_vocab => Err(Error::Config(format!(
                "model.vocab_size = {vocab}: the tokenizer has {tokenizer_vocab} tokens; raise it \
                 to at least that, or remove it to use the tokenizer's number"
            ))),
            Some(vocab) => Ok(vocab),
            None => Ok(tokenizer_vocab),
        }
    }
}

/// TOML text that reads back as `raw`.
fn to_toml(raw: &RawConfig) -> Result<String> {
    // Only values outside TOML's range get here, and only from code: a file cannot hold them.
    let wrong = |e: &dyn std::fmt::Display| {
        Error::Config(format!(
            "the config cannot be written as TOML (numbers end at 2^63 - 1, text is UTF-8): {e}"
        ))
    };
    let text = toml::to_string(raw).map_err(|e| wrong(&e))?;
    let mut document: toml_edit::DocumentMut = text.parse().map_err(|e| wrong(&e))?;
    // As short as they can be: eps = 1e-8, not the digits of the f64 next to it.
    for key in &Schema::get().keys {
        let Kind::Float { single } = key.kind else {
            continue;
        };
        let mut item = Some(document.as_item_mut());
        for name in key.path.split('.') {
            item = item.and_then(|item| item.get_mut(name));
        }
        let Some(value) = item.and_then(|item| item.as_value_mut()) else {
            continue;
        };
        if let Some(v) = value.as_float() {
            let v = if single { shortest(v as f32) } else { v };
            let mut short: toml_edit::Value = format!("{v:?}").parse().map_err(|e| wrong(&e))?;
            *short.decor_mut() = value.decor().clone();
            *value = short;
        }
    }
    Ok(document.to_string())
}
