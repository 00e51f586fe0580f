//! Files and folders that are complete or absent, also after a crash or a power cut, and the hashes
//! that tell whether they still are what was written.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// Writes a file through a temporary one beside it: synced to the disk, then renamed.
pub(crate) fn write_file(
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
pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(Error::io(to))?;
    sync_folder(parent(to))
}

/// Makes the names inside a folder durable.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)
        .and_then(|f| f.sync_all())
        .map_err(Error::io(folder))
}

/// Size of a file and the SHA-256 of its content, in hex.
pub(crate) fn sha256_file(path: &Path) -> Result<(u64, String)> {
    let mut hasher = Sha256::new();
    let mut file = File::open(path).map_err(Error::io(path))?;
    let num_bytes = io::copy(&mut file, &mut hasher).map_err(Error::io(path))?;
    Ok((num_bytes, hex(&hasher.finalize())))
}

/// Lower-case hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
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
