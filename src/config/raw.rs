//! The config as its sources say it: TOML file < environment < `--set`.

use std::ffi::OsString;
use std::path::Path;

use figment::Figment;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::explain::{Origins, explain};
use super::layer::{ENV_PREFIX, Layer};
use crate::comm::CommConfig;
use crate::data::DataConfig;
use crate::metrics::{HardwareConfig, MetricsConfig};
use crate::model::ModelConfig;
use crate::optim::OptimizerConfig;
use crate::optim::lr::LrConfig;
use crate::trainer::{CheckpointConfig, RunConfig, TrainConfig};
use crate::{Error, Result};

/// Every key, by section. Each section is owned by the component that reads it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RawConfig {
    /// What the run is called, where its folder lies, and its seed.
    pub run: RunConfig,
    /// What the model learns from: text to tokenize, or files of tokens.
    pub data: DataConfig,
    /// The model: GPT-2 with options.
    pub model: ModelConfig,
    /// The optimizer and the precision of its state.
    pub optimizer: OptimizerConfig,
    /// The learning rate as a function of the step.
    pub lr: LrConfig,
    /// The training loop.
    pub train: TrainConfig,
    /// How ranks talk to each other.
    pub comm: CommConfig,
    /// When checkpoints are saved and how many stay.
    pub checkpoint: CheckpointConfig,
    /// What a run writes down about itself.
    pub metrics: MetricsConfig,
    /// What the machine can do, for figures that compare against it.
    pub hardware: HardwareConfig,
}

impl RawConfig {
    /// Reads `path`, then the process's `TRAIN__SECTION__KEY` variables, then `sets`
    /// ("section.key=value"); the later wins.
    ///
    /// # Errors
    /// [`Error::Config`] naming the file that cannot be read, or the key, its value, its source
    /// and what would be right.
    pub fn load(path: &Path, sets: &[String]) -> Result<Self> {
        Self::load_with_origins(path, sets).map(|(raw, _)| raw)
    }

    /// [`RawConfig::load`], with where the values came from.
    pub(super) fn load_with_origins(path: &Path, sets: &[String]) -> Result<(Self, Origins)> {
        let text = std::fs::read_to_string(path).map_err(|e| {
            Error::Config(format!(
                "cannot read the config file {}: {e}",
                path.display()
            ))
        })?;
        Self::merge(&path.display().to_string(), text, std::env::vars_os(), sets)
    }

    /// [`RawConfig::load`] with the sources at hand: a file called `name` with content `text`,
    /// and environment variables, of which those without the prefix `TRAIN__` are passed over.
    ///
    /// # Errors
    /// As [`RawConfig::load`].
    pub fn from_sources(
        name: &str,
        text: String,
        env: impl IntoIterator<Item = (OsString, OsString)>,
        sets: &[String],
    ) -> Result<Self> {
        Self::merge(name, text, env, sets).map(|(raw, _)| raw)
    }

    fn merge(
        name: &str,
        text: String,
        env: impl IntoIterator<Item = (OsString, OsString)>,
        sets: &[String],
    ) -> Result<(Self, Origins)> {
        let mut layers = vec![Layer::file(name.to_owned(), text)?];
        let mut variables = Vec::new();
        for (variable, value) in env {
            let Ok(variable) = variable.into_string() else {
                continue;
            };
            if variable.starts_with(ENV_PREFIX) {
                let value = value.into_string().map_err(|value| {
                    Error::Config(format!(
                        "environment variable {variable} = {value:?} is not UTF-8"
                    ))
                })?;
                variables.push((variable, value));
            }
        }
        // The environment has no order of its own: sorted, the same error comes first each time.
        variables.sort();
        for (variable, value) in variables {
            layers.push(Layer::env(variable, &value)?);
        }
        for argument in sets {
            layers.push(Layer::set(argument)?);
        }
        let figment = layers
            .iter()
            .fold(Figment::new(), |f, layer| f.merge(layer));
        match figment.extract() {
            Ok(raw) => Ok((raw, Origins::new(&figment, &layers))),
            Err(error) => Err(explain(error, &figment, &layers)),
        }
    }
}
