//! Writing a checkpoint.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, View};

use super::load::step_folders;
use super::manifest::{FileEntry, Manifest};
use crate::durable;
use crate::optim::StateSlice;
use crate::zero::Engine;
use crate::{Error, Result};

/// Bytes of a tensor on their way into a file.
pub(super) struct Bytes<'a> {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: &'a [u8],
}

impl View for Bytes<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Saves `engine` as `root/step_NNNNNNNN` and deletes all but the newest `keep` checkpoints.
///
/// `manifest.files` is filled in here.
///
/// # Errors
/// [`Error::Io`] naming the path; a checkpoint that fails leaves the earlier ones untouched.
pub fn save(
    root: &Path,
    engine: &mut Engine,
    mut manifest: Manifest,
    keep: usize,
) -> Result<PathBuf> {
    let name = format!("step_{:08}", manifest.position.step);
    let temporary = root.join(format!(".{name}.tmp-{}", std::process::id()));
    fs::create_dir_all(root).map_err(Error::io(root))?;
    remove_abandoned(root)?;
    fs::create_dir(&temporary).map_err(Error::io(&temporary))?;
    let files = write_tensors(&temporary, engine);
    let written = files.and_then(|files| {
        manifest.files = files;
        let json = manifest.to_json()?;
        durable::write_file(&temporary.join("manifest.json"), |out| {
            std::io::Write::write_all(out, json.as_bytes())
        })?;
        durable::sync_folder(&temporary)?;
        let path = root.join(&name);
        if path.exists() {
            remove(&path)?;
        }
        durable::rename(&temporary, &path)?;
        Ok(path)
    });
    if written.is_err() {
        // The error that matters is at hand; a leftover is removed by the next save.
        let _ = fs::remove_dir_all(&temporary);
    }
    let path = written?;
    let folders = step_folders(root)?;
    for (_, old) in folders.iter().rev().skip(keep.max(1)) {
        remove(old)?;
    }
    Ok(path)
}

/// Deletes a checkpoint: first its name, so that a kill in between leaves no half of one.
fn remove(path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let hidden = path.with_file_name(format!(".{name}.tmp-deleted"));
    durable::rename(path, &hidden)?;
    fs::remove_dir_all(&hidden).map_err(Error::io(&hidden))
}

/// Deletes temporary folders of processes that died while saving.
fn remove_abandoned(root: &Path) -> Result<()> {
    for entry in fs::read_dir(root).map_err(Error::io(root))? {
        let path = entry.map_err(Error::io(root))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(".step_") && name.contains(".tmp-") {
            fs::remove_dir_all(&path).map_err(Error::io(&path))?;
        }
    }
    Ok(())
}

fn write_tensors(folder: &Path, engine: &mut Engine) -> Result<Vec<FileEntry>> {
    write_file(folder, "model.safetensors", |file| {
        let params = engine.model().params();
        // Weights are copied out one unit's parameter at a time only if the file format needs a
        // view of each at once, which it does.
        let values: Vec<Vec<f32>> = params
            .iter()
            .map(|p| p.read(|v| Ok(v.to_vec())))
            .collect::<candle_core::Result<_>>()?;
        let views = params.iter().zip(&values).map(|(param, values)| {
            let view = Bytes {
                dtype: Dtype::F32,
                shape: param.spec().shape.clone(),
                bytes: bytemuck::cast_slice(values),
            };
            (param.spec().name.clone(), view)
        });
        file(views.collect())
    })?;
    write_file(folder, "optimizer.safetensors", |file| {
        let mut views = Vec::new();
        for (_, optimizer) in engine.optimizers() {
            let names: Vec<String> = optimizer
                .segments()
                .iter()
                .map(|s| s.name.clone())
                .collect();
            for entry in optimizer.state() {
                let (dtype, bytes): (Dtype, &[u8]) = match entry.values {
                    StateSlice::F32(values) => (Dtype::F32, bytemuck::cast_slice(values)),
                    StateSlice::U8(codes) => (Dtype::U8, codes),
                };
                let view = Bytes {
                    shape: vec![bytes.len() / (dtype.bitsize() / 8)],
                    dtype,
                    bytes,
                };
                views.push((format!("{}/{}", names[entry.segment], entry.name), view));
            }
        }
        file(views)
    })?;
    ["model.safetensors", "optimizer.safetensors"]
        .iter()
        .map(|name| FileEntry::of(folder, name))
        .collect()
}

/// Writes one safetensors file and syncs it; `fill` passes the tensors on.
fn write_file(
    folder: &Path,
    name: &str,
    fill: impl FnOnce(&dyn Fn(Vec<(String, Bytes<'_>)>) -> Result<()>) -> Result<()>,
) -> Result<()> {
    let path = folder.join(name);
    let path = &path;
    fill(&|views| {
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        safetensors::serialize_to_file(views, Some(metadata), path)
            .map_err(|e| Error::Checkpoint(format!("{}: {e}", path.display())))
    })?;
    let file = fs::File::open(path).map_err(Error::io(path))?;
    file.sync_all().map_err(Error::io(path))
}
