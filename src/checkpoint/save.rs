//! Writing a checkpoint.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::collect::{Named, collect};
use super::load::step_folders;
use super::manifest::{FileEntry, Manifest};
use crate::durable;
use crate::zero::Engine;
use crate::{Error, Result};

/// Saves `engine` as `root/step_NNNNNNNN` and deletes all but the newest `keep` checkpoints. All
/// ranks call this; rank 0 writes.
///
/// `manifest.files` is filled in here.
///
/// # Errors
/// [`Error::Io`] naming the path, on every rank; a checkpoint that fails leaves the earlier ones
/// untouched.
pub fn save(root: &Path, engine: &mut Engine, manifest: Manifest, keep: usize) -> Result<PathBuf> {
    let comm = engine.comm().clone();
    let (weights, optimizer) = collect(engine)?;
    let path = comm.lead(|| {
        let path = write(root, manifest, &weights, &optimizer, keep)?;
        Ok(path.to_string_lossy().into_owned().into_bytes())
    })?;
    Ok(PathBuf::from(String::from_utf8_lossy(&path).into_owned()))
}

fn write(
    root: &Path,
    mut manifest: Manifest,
    weights: &Named,
    optimizer: &Named,
    keep: usize,
) -> Result<PathBuf> {
    let name = format!("step_{:08}", manifest.position.step);
    let temporary = root.join(format!(".{name}.tmp-{}", std::process::id()));
    fs::create_dir_all(root).map_err(Error::io(root))?;
    remove_abandoned(root)?;
    fs::create_dir(&temporary).map_err(Error::io(&temporary))?;
    let files = write_tensors(&temporary, weights, optimizer);
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

fn write_tensors(folder: &Path, weights: &Named, optimizer: &Named) -> Result<Vec<FileEntry>> {
    let files = [
        ("model.safetensors", weights),
        ("optimizer.safetensors", optimizer),
    ];
    let write = |(name, tensors)| {
        write_file(&folder.join(name), tensors)?;
        FileEntry::of(folder, name)
    };
    files.into_iter().map(write).collect()
}

/// Writes one safetensors file and syncs it.
fn write_file(path: &Path, tensors: &Named) -> Result<()> {
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let views = tensors.iter().map(|(name, tensor)| (name, tensor));
    safetensors::serialize_to_file(views, Some(metadata), path)
        .map_err(|e| Error::Checkpoint(format!("{}: {e}", path.display())))?;
    let file = fs::File::open(path).map_err(Error::io(path))?;
    file.sync_all().map_err(Error::io(path))
}
