//! `[data]`.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::data::tokenizer::TokenizerSpec;
use crate::{Error, Result};

/// What the model learns from: text to tokenize, or files of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Text files, folders and globs, in order; `${CARGO_HOME}` and other `${VARIABLE}` are expanded.
    pub text: Vec<String>,
    /// Packages ("name-version") whose Rust sources in cargo's registry folder are text, after `text`.
    pub crates: Vec<String>,
    /// Extensions of the files taken from a folder in `text`.
    pub extensions: Vec<String>,
    /// "char", "byte", "bpe:4096" (trained on the corpus) or the path of a tokenizer.json.
    pub tokenizer: String,
    /// Folder that keeps prepared data.
    pub dir: PathBuf,
    /// Share of the tokens, the last ones, kept for validation.
    pub val_fraction: f64,
    /// Files of tokens, instead of text.
    pub shards: Option<ShardsConfig>,
}

/// Already tokenized files: llm.c's .bin format or nanoGPT's headerless u16.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ShardsConfig {
    /// Tokens to train on.
    pub train: PathBuf,
    /// Tokens to evaluate on.
    pub val: PathBuf,
    /// Number of different tokens: every token is below it.
    pub vocab_size: usize,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            text: Vec::new(),
            crates: Vec::new(),
            extensions: ["txt", "md", "rs"].map(String::from).to_vec(),
            tokenizer: "bpe:4096".into(),
            dir: "data".into(),
            val_fraction: 0.1,
            shards: None,
        }
    }
}

impl DataConfig {
    /// Checks everything that can be checked without touching a file.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key and what would be right.
    pub fn validate(&self) -> Result<()> {
        let wrong = |message: String| Err(Error::Config(message));
        TokenizerSpec::parse(&self.tokenizer)?;
        let has_text = !self.text.is_empty() || !self.crates.is_empty();
        if let Some(shards) = &self.shards {
            if has_text {
                return wrong(
                    "data.shards is set beside data.text or data.crates: keep either the token \
                     files or the text"
                        .into(),
                );
            }
            if shards.vocab_size == 0 || shards.vocab_size > u32::MAX as usize {
                return wrong(format!(
                    "data.shards.vocab_size = {}: must be at least 1 and below 2^32",
                    shards.vocab_size
                ));
            }
            let default = Self::default();
            let no_effect = |key: &str, value: &dyn std::fmt::Debug| {
                wrong(format!(
                    "{key} = {value:?} has no effect beside data.shards: remove it"
                ))
            };
            if self.val_fraction != default.val_fraction {
                return no_effect("data.val_fraction", &self.val_fraction);
            }
            if self.extensions != default.extensions {
                return no_effect("data.extensions", &self.extensions);
            }
            return Ok(());
        }
        if !has_text {
            return wrong(
                "no data: set data.text (files, folders or globs), data.crates or data.shards"
                    .into(),
            );
        }
        if !(self.val_fraction > 0.0 && self.val_fraction < 1.0) {
            return wrong(format!(
                "data.val_fraction = {}: must be above 0 and below 1",
                self.val_fraction
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> DataConfig {
        DataConfig {
            text: vec!["a.txt".into()],
            ..DataConfig::default()
        }
    }

    fn shards(vocab_size: usize) -> Option<ShardsConfig> {
        Some(ShardsConfig {
            train: "train.bin".into(),
            val: "val.bin".into(),
            vocab_size,
        })
    }

    #[test]
    fn a_wrong_value_is_an_error_that_names_its_key() {
        let faults: [(&str, DataConfig); 11] = [
            ("data.text", DataConfig::default()),
            (
                "data.val_fraction",
                DataConfig {
                    val_fraction: 0.0,
                    ..text()
                },
            ),
            (
                "data.val_fraction",
                DataConfig {
                    val_fraction: 1.0,
                    ..text()
                },
            ),
            (
                "data.val_fraction",
                DataConfig {
                    val_fraction: f64::NAN,
                    ..text()
                },
            ),
            (
                "data.tokenizer",
                DataConfig {
                    tokenizer: "bpe:many".into(),
                    ..text()
                },
            ),
            (
                "data.tokenizer",
                DataConfig {
                    tokenizer: "bpe:255".into(),
                    ..text()
                },
            ),
            (
                "data.tokenizer",
                DataConfig {
                    tokenizer: String::new(),
                    ..text()
                },
            ),
            (
                "data.shards",
                DataConfig {
                    shards: shards(256),
                    ..text()
                },
            ),
            (
                "data.shards.vocab_size",
                DataConfig {
                    shards: shards(0),
                    ..DataConfig::default()
                },
            ),
            (
                "data.val_fraction",
                DataConfig {
                    shards: shards(256),
                    val_fraction: 0.2,
                    ..DataConfig::default()
                },
            ),
            (
                "data.extensions",
                DataConfig {
                    shards: shards(256),
                    extensions: vec!["py".into()],
                    ..DataConfig::default()
                },
            ),
        ];
        for (key, config) in faults {
            match config.validate() {
                Err(Error::Config(message)) => assert!(message.contains(key), "{message}"),
                other => panic!("{key}: {other:?}"),
            }
        }
        text().validate().unwrap();
        let only_shards = DataConfig {
            shards: shards(50257),
            ..DataConfig::default()
        };
        only_shards.validate().unwrap();
    }
}
