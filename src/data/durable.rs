//! Files and folders that are complete or absent, also after a crash or a power cut.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Writes a file through a temporary one beside it: synced to the disk, then renamed.
pub(super) fn write_file(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<()> {
    let temporary = temporary_beside(path);
    let written = File::create(&temporary)
        .and_then(|file| {
            let mut out = BufWriter::with_capacity(1 << 20, file);
            write(&mut out)?;
            out.flush()?;
            out.get_ref().sync_all()
        })
        .map_err(Error::io(&temporary))
        .and_then(|()| rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary); // the error that matters is already at hand
    }
    written
}

/// Renames a file or folder whose content is synced, and syncs the folder that names it.
pub(super) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(Error::io(to))?;
    sync_folder(parent(to))
}

/// Makes the names inside a folder durable.
pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)
        .and_then(|f| f.sync_all())
        .map_err(Error::io(folder))
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn temporary_beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    parent(path).join(format!(".{name}.tmp-{}", std::process::id()))
}
