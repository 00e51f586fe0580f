//! Finding, checking and reading a checkpoint.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use super::manifest::{FileEntry, Manifest};
use crate::model::Gpt;
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
        for expected in &manifest.files {
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
        Ok(Self {
            path: path.to_path_buf(),
            manifest,
        })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Overwrites the weights of `model`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming a tensor that is missing or has another shape.
    pub fn load_model(&self, model: &Gpt) -> Result<()> {
        load_weights(&self.path.join("model.safetensors"), model)
    }

    /// Overwrites the state of the engine's optimizers and its number of updates.
    ///
    /// # Errors
    /// As [`Checkpoint::load_model`], also when state has another precision or block size.
    pub fn load_optimizer(&self, engine: &mut Engine) -> Result<()> {
        let path = self.path.join("optimizer.safetensors");
        with_tensors(&path, |tensors| {
            for (_, optimizer) in engine.optimizers() {
                let names: Vec<String> = optimizer
                    .segments()
                    .iter()
                    .map(|s| s.name.clone())
                    .collect();
                for entry in optimizer.state() {
                    let name = format!("{}/{}", names[entry.segment], entry.name);
                    let (dtype, len) = match &entry.values {
                        StateSlice::F32(values) => (Dtype::F32, values.len()),
                        StateSlice::U8(codes) => (Dtype::U8, codes.len()),
                    };
                    let bytes = tensor(&path, tensors, &name, dtype, &[len])?;
                    match entry.values {
                        StateSlice::F32(values) => copy_f32(bytes, values),
                        StateSlice::U8(codes) => codes.copy_from_slice(bytes),
                    }
                }
            }
            Ok(())
        })?;
        engine.set_num_updates(self.manifest.position.num_updates);
        Ok(())
    }
}

/// Overwrites the weights of `model` with the tensors of the same names in a safetensors file.
///
/// # Errors
/// As [`Checkpoint::load_model`].
pub fn load_weights(path: &Path, model: &Gpt) -> Result<()> {
    with_tensors(path, |tensors| {
        let params = model.params();
        let mut others = tensors.names();
        others.retain(|name| params.iter().all(|param| param.spec().name != *name));
        if !others.is_empty() {
            others.sort_unstable();
            tracing::warn!(
                "{}: the model has no {}: not loaded",
                path.display(),
                others.join(", ")
            );
        }
        for param in params {
            let spec = param.spec();
            let bytes = tensor(path, tensors, &spec.name, Dtype::F32, &spec.shape)?;
            let mut values = vec![0.0; spec.len()];
            copy_f32(bytes, &mut values);
            param.write(&values)?;
        }
        Ok(())
    })
}

fn with_tensors<R>(path: &Path, f: impl FnOnce(&SafeTensors) -> Result<R>) -> Result<R> {
    let file = File::open(path).map_err(Error::io(path))?;
    // SAFETY: the map is only read; a file changed by others while it is mapped could change
    // values under us, which the manifest's hash was there to exclude.
    let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
    let tensors = SafeTensors::deserialize(&map)
        .map_err(|e| Error::Checkpoint(format!("{}: no safetensors file: {e}", path.display())))?;
    f(&tensors)
}

fn tensor<'a>(
    path: &Path,
    tensors: &SafeTensors<'a>,
    name: &str,
    dtype: Dtype,
    shape: &[usize],
) -> Result<&'a [u8]> {
    let wrong = |found: String| {
        Error::Checkpoint(format!(
            "{}: {name} is {found}, but the config makes it {dtype:?} {shape:?}: train with the \
             config of the checkpoint, or start a new run",
            path.display()
        ))
    };
    let view = tensors.tensor(name).map_err(|_| wrong("missing".into()))?;
    if view.dtype() != dtype || view.shape() != shape {
        return Err(wrong(format!("{:?} {:?}", view.dtype(), view.shape())));
    }
    Ok(view.data())
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
