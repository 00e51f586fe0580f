//! The run folder: who may write into it, and what a run finds there.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use crate::config::Plan;
use crate::metrics::{jsonl, logging, tensorboard};
use crate::{Error, Result, durable};

/// How a run begins.
#[derive(Clone, Debug, PartialEq)]
pub enum Start {
    /// From the newest checkpoint of the run folder, or from the beginning when there is none.
    Resume,
    /// From the beginning.
    New {
        /// Whether to delete an earlier run of the same name.
        overwrite: bool,
        /// Weights to start from instead of random ones.
        weights: Option<PathBuf>,
    },
}

/// `run.dir/run.name`.
pub struct RunFolder {
    path: PathBuf,
    /// Locked while this process writes into the folder.
    lock: Option<File>,
}

impl RunFolder {
    /// The folder of `plan`, which nothing has touched yet.
    pub fn at(plan: &Plan) -> Self {
        Self {
            path: plan.run_dir.clone(),
            lock: None,
        }
    }

    /// Whether a run may start in it: a new one never mixes with an earlier one.
    ///
    /// # Errors
    /// [`Error::Config`] when it holds a run and `start` says neither to resume nor to overwrite.
    pub fn check(&self, start: &Start) -> Result<()> {
        let new = matches!(
            start,
            Start::New {
                overwrite: false,
                ..
            }
        );
        if new && (self.metrics().exists() || self.checkpoints().exists()) {
            return Err(Error::Config(format!(
                "{} already holds a run: --resume continues it, --overwrite starts over, \
                 --set run.name=NAME starts another",
                self.path.display()
            )));
        }
        Ok(())
    }

    /// Makes the folder ready for the run: deletes an earlier one where `start` says so, and writes
    /// the resolved config.
    ///
    /// # Errors
    /// [`Error::Config`] when another process trains in it; [`Error::Io`] naming the path.
    pub fn create(&mut self, plan: &Plan, start: &Start) -> Result<()> {
        fs::create_dir_all(&self.path).map_err(Error::io(&self.path))?;
        self.lock()?;
        if matches!(
            start,
            Start::New {
                overwrite: true,
                ..
            }
        ) {
            self.remove_run()?;
        }
        let text = plan.resolved_toml();
        durable::write_file(&self.path.join("config.toml"), |out| {
            std::io::Write::write_all(out, text.as_bytes())
        })
    }

    /// Keeps other processes out. The file stays: removing it would let two processes hold locks on
    /// two files of the same name.
    fn lock(&mut self) -> Result<()> {
        let path = self.path.join(".lock");
        let file = File::create(&path).map_err(Error::io(&path))?;
        // Some network file systems have no locks; that is no reason not to train on them.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(Error::Config(format!(
                "another process is training in {}: wait for its end, or --set run.name=NAME",
                self.path.display()
            )));
        }
        self.lock = Some(file);
        Ok(())
    }

    /// Deletes what a run writes and nothing else a person may have put there.
    fn remove_run(&self) -> Result<()> {
        // All checkpoints at once, so that a kill in between leaves no half of one.
        let deleted = self.path.join(".deleted");
        if deleted.exists() {
            fs::remove_dir_all(&deleted).map_err(Error::io(&deleted))?;
        }
        if self.checkpoints().exists() {
            durable::rename(&self.checkpoints(), &deleted)?;
            fs::remove_dir_all(&deleted).map_err(Error::io(&deleted))?;
        }
        let files = [
            jsonl::FILE_NAME,
            logging::FILE_NAME,
            "config.toml",
            "tokenizer.json",
        ];
        for path in files.map(|name| self.path.join(name)) {
            if path.exists() {
                fs::remove_file(&path).map_err(Error::io(&path))?;
            }
        }
        let path = self.tensorboard();
        if path.exists() {
            fs::remove_dir_all(&path).map_err(Error::io(&path))?;
        }
        Ok(())
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `metrics.jsonl`.
    pub fn metrics(&self) -> PathBuf {
        self.path.join(jsonl::FILE_NAME)
    }

    /// `tensorboard/`.
    pub fn tensorboard(&self) -> PathBuf {
        self.path.join(tensorboard::DIR_NAME)
    }

    /// `checkpoints/`.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }
}
