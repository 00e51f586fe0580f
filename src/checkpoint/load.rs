//! Finding, checking and reading a checkpoint.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use super::manifest::{FileEntry, Manifest};
use crate::model::{Gpt, Unit};
use crate::optim::StateSlice;
use crate::zero::Engine;
use crate::{Error, Result};

/// A checkpoint whose files match its manifest.
pub struct Checkpoint {
    path: PathBuf,
    /// What it says of itself.
    pub manifest: Manifest,
}

/// The newest checkpoint under `root`, checked; `None` when there is none.
///
/// # Errors
/// [`Error::Checkpoint`] naming the file that is missing or does not match, and what to do.
pub fn latest(root: &Path) -> Result<Option<Checkpoint>> {
    if !root.exists() {
        return Ok(None);
    }
    match step_folders(root)?.pop() {
        Some((_, path)) => Checkpoint::open(&path).map(Some),
        None => Ok(None),
    }
}

/// Folders `step_N` under `root` by step.
pub(super) fn step_folders(root: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(root).map_err(Error::io(root))? {
        let path = entry.map_err(Error::io(root))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some(step) = name.strip_prefix("step_").and_then(|s| s.parse().ok()) {
            folders.push((step, path));
        }
    }
    folders.sort();
    Ok(folders)
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path` and compares every file with the manifest.
    ///
    /// # Errors
    /// As [`latest`].
    pub fn open(path: &Path) -> Result<Self> {
        let checkpoint = Self::open_unchecked(path)?;
        checkpoint.check_files()?;
        Ok(checkpoint)
    }

    /// Opens a checkpoint whose files another rank has compared with the manifest.
    ///
    /// # Errors
    /// As [`latest`], for the manifest.
    pub fn open_unchecked(path: &Path) -> Result<Self> {
        let file = path.join("manifest.json");
        let json = fs::read(&file).map_err(|e| damaged(&file, &e.to_string()))?;
        let manifest = Manifest::from_json(&json).map_err(|e| match e {
            Error::Checkpoint(what) => Error::Checkpoint(format!("{}: {what}", file.display())),
            Error::Data(what) => damaged(&file, &what),
            other => other,
        })?;
        for name in ["model.safetensors", "optimizer.safetensors"] {
            if !manifest.files.iter().any(|f| f.name == name) {
                return Err(damaged(&file, &format!("it lists no {name}")));
            }
        }
        Ok(Self {
            path: path.to_path_buf(),
            manifest,
        })
    }

    fn check_files(&self) -> Result<()> {
        let path = &self.path;
        for expected in &self.manifest.files {
            let found = FileEntry::of(path, &expected.name)
                .map_err(|e| damaged(&path.join(&expected.name), &e.to_string()))?;
            if found != *expected {
                let reason = format!(
                    "{} bytes with hash {}, but the manifest says {} bytes with hash {}",
                    found.num_bytes, found.sha256, expected.num_bytes, expected.sha256
                );
                return Err(damaged(&path.join(&expected.name), &reason));
            }
        }
        Ok(())
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its weights.
    ///
    /// # Errors
    /// As [`Weights::open`].
    pub fn weights(&self) -> Result<Weights> {
        Weights::open(&self.path.join("model.safetensors"))
    }

    /// Overwrites this rank's part of the state of the engine's optimizers, and its number of
    /// updates. It does not matter how many ranks saved it.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming a tensor that is missing, or has another shape, precision or
    /// block size.
    pub fn load_optimizer(&self, engine: &mut Engine) -> Result<()> {
        let file = Mapped::open(&self.path.join("optimizer.safetensors"))?;
        let tensors = file.tensors()?;
        for state in engine.states() {
            let layout = state.unit.buffer().layout();
            let lens: HashMap<&str, usize> = (layout.params.iter())
                .map(|param| (param.name.as_str(), param.len()))
                .collect();
            let segments = state.optimizer.segments().to_vec();
            for entry in state.optimizer.state() {
                let segment = &segments[entry.segment];
                let name = format!("{}/{}", segment.name, entry.name);
                let whole = lens.get(segment.name.as_str()).copied().unwrap_or_default();
                let shape = [whole.div_ceil(entry.block)];
                let first = segment.offset / entry.block;
                match entry.values {
                    StateSlice::F32(values) => {
                        let bytes = file.tensor(&tensors, &name, Dtype::F32, &shape)?;
                        copy_f32(&bytes[first * 4..], values);
                    }
                    StateSlice::U8(codes) => {
                        let bytes = file.tensor(&tensors, &name, Dtype::U8, &shape)?;
                        codes.copy_from_slice(&bytes[first..first + codes.len()]);
                    }
                }
            }
        }
        engine.set_num_updates(self.manifest.position.num_updates);
        Ok(())
    }
}

/// Weights in a safetensors file.
pub struct Weights(Mapped);

impl Weights {
    /// Opens a file.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when it is not a safetensors file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = Mapped::open(path)?;
        file.tensors()?;
        Ok(Self(file))
    }

    /// Warns of tensors that `model` has no parameter for.
    ///
    /// # Errors
    /// As [`Weights::open`].
    pub fn warn_of_others(&self, model: &Gpt) -> Result<()> {
        let params = model.params();
        let tensors = self.0.tensors()?;
        let mut others = tensors.names();
        others.retain(|name| params.iter().all(|param| param.spec().name != *name));
        if !others.is_empty() {
            others.sort_unstable();
            tracing::warn!(
                "{}: the model has no {}: not loaded",
                self.0.path.display(),
                others.join(", ")
            );
        }
        Ok(())
    }

    /// Fills the weights of one unit.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming a tensor that is missing or has another shape.
    pub fn fill(&self, unit: &Arc<dyn Unit>) -> Result<()> {
        let tensors = self.0.tensors()?;
        for param in unit.buffer().params() {
            let spec = param.spec();
            let bytes = (self.0).tensor(&tensors, &spec.name, Dtype::F32, &spec.shape)?;
            let mut values = vec![0.0; spec.len()];
            copy_f32(bytes, &mut values);
            param.write(&values)?;
        }
        Ok(())
    }
}

/// A safetensors file in memory.
struct Mapped {
    path: PathBuf,
    map: Mmap,
}

impl Mapped {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(path))?;
        // SAFETY: the map is only read; a file changed by others while it is mapped could change
        // values under us, which the manifest's hash was there to exclude.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        Ok(Self {
            path: path.to_path_buf(),
            map,
        })
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.map).map_err(|e| {
            let path = self.path.display();
            Error::Checkpoint(format!("{path}: no safetensors file: {e}"))
        })
    }

    fn tensor<'a>(
        &self,
        tensors: &SafeTensors<'a>,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
    ) -> Result<&'a [u8]> {
        let wrong = |found: String| {
            Error::Checkpoint(format!(
                "{}: {name} is {found}, but the config makes it {dtype:?} {shape:?}: train with \
                 the config of the checkpoint, or start a new run",
                self.path.display()
            ))
        };
        let view = tensors.tensor(name).map_err(|_| wrong("missing".into()))?;
        if view.dtype() != dtype || view.shape() != shape {
            return Err(wrong(format!("{:?} {:?}", view.dtype(), view.shape())));
        }
        Ok(view.data())
    }
}

fn copy_f32(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *value = f32::from_le_bytes(*bytes);
    }
}

fn damaged(path: &Path, reason: &str) -> Error {
    let folder = path.parent().unwrap_or(path);
    Error::Checkpoint(format!(
        "{}: {reason}. The checkpoint is damaged: delete {} to resume from the one before it",
        path.display(),
        folder.display()
    ))
}
