//! Files, folders, globs and crates to documents, and the hash of their content.
//!
//! A document is a file. The whole corpus is held in memory.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::data::config::DataConfig;
use crate::durable::hex;
use crate::{Error, Result};

/// One file of text.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// Where it was read, for messages.
    pub path: PathBuf,
    /// Its content.
    pub text: String,
}

/// The text to tokenize, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Corpus {
    /// The files, in the order of the config's entries and sorted by path inside each.
    pub documents: Vec<Document>,
    /// SHA-256 over contents and order: 64 hex digits, the same on every machine that has the
    /// same bytes, wherever they lie.
    pub hash: String,
    /// Bytes of all documents.
    pub num_bytes: u64,
}

impl Corpus {
    /// Reads every file that `data.text` and `data.crates` name.
    ///
    /// # Errors
    /// [`Error::Config`] for an entry that names nothing, [`Error::Data`] for invalid UTF-8 (with
    /// file and byte offset) and for a corpus without text, [`Error::Io`] where reading fails.
    pub fn read(config: &DataConfig) -> Result<Self> {
        Self::read_with(config, &|name| std::env::var(name).ok())
    }

    /// [`Corpus::read`] with the environment given as a function from name to value.
    pub fn read_with(
        config: &DataConfig,
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let mut seen = HashSet::new();
        let mut documents = Vec::new();
        for path in resolve(config, environment)? {
            // Overlapping entries (a folder and a file in it) must not repeat text: a repeated
            // document on both sides of the split would flatter the validation loss.
            let canonical = path.canonicalize().map_err(Error::io(&path))?;
            if seen.insert(canonical) {
                documents.push(read_document(path)?);
            }
        }
        let num_bytes = documents.iter().map(|d| d.text.len() as u64).sum();
        if num_bytes == 0 {
            return Err(Error::Data(format!(
                "the corpus is empty: {} files, none with text; name others in data.text",
                documents.len()
            )));
        }
        let mut hasher = Sha256::new();
        for document in &documents {
            // Lengths first, so that text cannot move between documents unnoticed.
            hasher.update((document.text.len() as u64).to_le_bytes());
            hasher.update(&document.text);
        }
        let hash = hex(&hasher.finalize());
        Ok(Self {
            documents,
            hash,
            num_bytes,
        })
    }
}

fn read_document(path: PathBuf) -> Result<Document> {
    let bytes = std::fs::read(&path).map_err(Error::io(&path))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let offset = e.utf8_error().valid_up_to();
        Error::Data(format!(
            "{}: invalid UTF-8 at byte {offset} (0x{:02x}): convert the file to UTF-8 or leave it \
             out",
            path.display(),
            e.as_bytes()[offset]
        ))
    })?;
    Ok(Document { path, text })
}

/// The files of all entries, in order.
fn resolve(
    config: &DataConfig,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in &config.text {
        let path = expand(entry, environment)
            .map_err(|why| Error::Config(format!("data.text: {entry:?}: {why}")))?;
        files.extend(resolve_entry(&path, &config.extensions)?);
    }
    for name in &config.crates {
        files.extend(crate_sources(name, environment)?);
    }
    Ok(files)
}

/// Replaces each `${NAME}`; CARGO_HOME falls back to cargo's own default, ~/.cargo.
fn expand(
    text: &str,
    environment: &dyn Fn(&str) -> Option<String>,
) -> std::result::Result<String, String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        let (name, after) = rest[start + 2..]
            .split_once('}')
            .ok_or("\"${\" without \"}\"")?;
        out += &rest[..start];
        out += &match environment(name) {
            Some(value) => value,
            None if name == "CARGO_HOME" => match environment("HOME") {
                Some(home) => format!("{home}/.cargo"),
                None => return Err("neither CARGO_HOME nor HOME is set".into()),
            },
            None => return Err(format!("the environment variable {name} is not set")),
        };
        rest = after;
    }
    Ok(out + rest)
}

/// The files of one expanded `data.text` entry: itself, what a folder holds, or what a glob matches.
fn resolve_entry(entry: &str, extensions: &[String]) -> Result<Vec<PathBuf>> {
    let wrong = |why: String| Error::Config(format!("data.text: {entry:?}: {why}"));
    let path = Path::new(entry);
    // A name that exists is taken literally, whatever characters it has.
    if path.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    let mut files = Vec::new();
    if path.is_dir() {
        walk(path, extensions, &mut files)?;
        if files.is_empty() {
            return Err(wrong(format!(
                "the folder has no file with an extension of data.extensions ({})",
                extensions.join(", ")
            )));
        }
    } else if entry.contains(['*', '?', '[']) {
        let matches = glob::glob(entry).map_err(|e| wrong(format!("not a glob: {e}")))?;
        let mut matches = matches
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(|e| Error::Io {
                path: e.path().to_path_buf(),
                source: e.into(),
            })?;
        matches.sort();
        for found in matches {
            if found.is_dir() {
                walk(&found, extensions, &mut files)?;
            } else {
                files.push(found);
            }
        }
        if files.is_empty() {
            return Err(wrong("the glob matches no file".into()));
        }
    } else {
        return Err(wrong("no such file or folder".into()));
    }
    Ok(files)
}

/// Files below a folder with one of the extensions, sorted by path. Hidden entries are skipped, and
/// links to folders are not followed, since they can form a loop.
fn walk(folder: &Path, extensions: &[String], files: &mut Vec<PathBuf>) -> Result<()> {
    let mut entries = std::fs::read_dir(folder)
        .and_then(|entries| entries.collect::<std::io::Result<Vec<_>>>())
        .map_err(Error::io(folder))?;
    entries.sort_by_key(|e| e.file_name());
    for entry in entries {
        let path = entry.path();
        let kind = entry.file_type().map_err(Error::io(&path))?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let wanted = || {
            let extension = path.extension().and_then(|e| e.to_str());
            extension.is_some_and(|e| extensions.iter().any(|x| x == e))
        };
        if kind.is_dir() {
            walk(&path, extensions, files)?;
        } else if path.is_file() && wanted() {
            files.push(path);
        }
    }
    Ok(())
}

/// The Rust sources of one package, from whichever registry cargo unpacked it.
fn crate_sources(name: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<Vec<PathBuf>> {
    let wrong = |why: String| Error::Config(format!("data.crates: {name:?}: {why}"));
    if name.is_empty() || name.contains(['/', '\\']) || name.starts_with('.') {
        return Err(wrong("expected \"name-version\"".into()));
    }
    let registry =
        PathBuf::from(expand("${CARGO_HOME}/registry/src", environment).map_err(&wrong)?);
    let mut candidates: Vec<PathBuf> = std::fs::read_dir(&registry)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path().join(name)))
        .filter(|folder| folder.is_dir())
        .collect();
    candidates.sort();
    let folder = candidates.first().ok_or_else(|| {
        wrong(format!(
            "not in {}: run `cargo fetch` in this project's folder, or name other text with \
             data.text (and set data.crates = [])",
            registry.display()
        ))
    })?;
    let mut files = Vec::new();
    walk(folder, &["rs".into()], &mut files)?;
    if files.is_empty() {
        return Err(wrong(format!("{} has no Rust source", folder.display())));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_expanded_and_a_missing_one_is_named() {
        let environment = |name: &str| match name {
            "HOME" => Some("/home/x".to_string()),
            "A" => Some("a".to_string()),
            _ => None,
        };
        let ok = |text| expand(text, &environment).unwrap();
        assert_eq!(ok("${CARGO_HOME}/b/${A}${A}"), "/home/x/.cargo/b/aa");
        assert_eq!(ok("$A {A} }"), "$A {A} }");
        assert!(
            expand("x/${MISSING}", &environment)
                .unwrap_err()
                .contains("MISSING")
        );
        assert!(expand("x/${A", &environment).is_err());
        assert!(
            expand("${CARGO_HOME}", &|_| None)
                .unwrap_err()
                .contains("CARGO_HOME")
        );
    }
}
