//! Files of tokens: llm.c's format, written and read, and nanoGPT's, read.
//!
//! llm.c: a header of 256 little-endian i32 (1024 bytes: magic, version, number of tokens, zeros),
//! then the tokens. Magic 20240520 version 1 holds u16 tokens; magic 20240801 version 7 holds u32
//! tokens. nanoGPT: u16 tokens and nothing else. A file whose first i32 is one of llm.c's magics is
//! judged as llm.c's, so a damaged header is an error and never read as tokens.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use rayon::prelude::*;

use crate::durable;
use crate::{Error, Result};

const HEADER_BYTES: usize = 1024;

/// Bytes of a token in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    U16 = 2,
    U32 = 4,
}

impl Width {
    /// The narrower type that holds every token of the vocabulary.
    fn for_vocab(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 {
            Width::U16
        } else {
            Width::U32
        }
    }

    fn magic_and_version(self) -> (i32, i32) {
        match self {
            Width::U16 => (20240520, 1),
            Width::U32 => (20240801, 7),
        }
    }
}

/// Writes tokens in llm.c's format, u16 up to a vocabulary of 65,536 and u32 above: complete and
/// synced, or not at all.
///
/// # Errors
/// [`Error::Data`] for no tokens, for more than llm.c's i32 can count and for a token outside the
/// vocabulary; [`Error::Io`] where writing fails.
pub fn write(path: &Path, tokens: &[u32], vocab_size: usize) -> Result<()> {
    let bad = |what: String| Error::Data(format!("{}: {what}", path.display()));
    if tokens.is_empty() {
        return Err(bad("no tokens to write".into()));
    }
    let num_tokens = i32::try_from(tokens.len()).map_err(|_| {
        bad(format!(
            "{} tokens, but the header counts up to {}: use less text",
            tokens.len(),
            i32::MAX
        ))
    })?;
    if let Some(i) = tokens.iter().position(|&t| t as usize >= vocab_size) {
        return Err(bad(format!(
            "token {} at position {i} is outside the vocabulary of {vocab_size}",
            tokens[i]
        )));
    }
    let width = Width::for_vocab(vocab_size);
    durable::write_file(path, |out| {
        let (magic, version) = width.magic_and_version();
        let mut header = [0u8; HEADER_BYTES];
        for (slot, value) in header.chunks_exact_mut(4).zip([magic, version, num_tokens]) {
            slot.copy_from_slice(&value.to_le_bytes());
        }
        out.write_all(&header)?;
        for &token in tokens {
            match width {
                Width::U16 => out.write_all(&(token as u16).to_le_bytes())?,
                Width::U32 => out.write_all(&token.to_le_bytes())?,
            }
        }
        Ok(())
    })
}

/// A memory-mapped file of tokens, each known to be below `vocab_size`.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    map: Mmap,
    first_byte: usize, // where the tokens start: after the header, if any
    width: Width,
    num_tokens: usize,
    vocab_size: usize,
}

impl Shard {
    /// Maps a file of either format and checks all of it: header, exact size, every token.
    ///
    /// # Errors
    /// [`Error::Data`] with the file, the byte offset and what to do; [`Error::Io`].
    pub fn open(path: &Path, vocab_size: usize) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(path))?;
        let bad = |what: String| Error::Data(format!("{}: {what}", path.display()));
        if !file.metadata().map_err(Error::io(path))?.is_file() {
            return Err(bad("not a file: expected a .bin file of tokens".into()));
        }
        // SAFETY: the map is read-only and lives as long as the shard. Another process that
        // truncates the file in place while it is mapped would end this one with SIGBUS; the
        // program itself only ever replaces shards by renaming, which leaves the mapped file be.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        let (first_byte, width) = layout(&map, vocab_size).map_err(bad)?;
        let num_tokens = (map.len() - first_byte) / width as usize;
        if num_tokens == 0 {
            return Err(bad("holds no tokens".into()));
        }
        let shard = Self {
            path: path.to_path_buf(),
            map,
            first_byte,
            width,
            num_tokens,
            vocab_size,
        };
        shard.check_tokens()?;
        Ok(shard)
    }

    /// Number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// The vocabulary its tokens were checked against.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Copies tokens `start .. start + out.len()` into `out`.
    ///
    /// # Panics
    /// Where the range passes the end: callers check their window against [`Shard::num_tokens`].
    pub fn read(&self, start: usize, out: &mut [u32]) {
        let width = self.width as usize;
        let bytes = &self.tokens()[start * width..(start + out.len()) * width];
        match self.width {
            Width::U16 => {
                for (token, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *token = u16::from_le_bytes([b[0], b[1]]) as u32;
                }
            }
            Width::U32 => {
                for (token, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *token = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
        }
    }

    fn tokens(&self) -> &[u8] {
        &self.map[self.first_byte..]
    }

    /// Finds the first token outside the vocabulary. Chunks of a maximum each run at memory speed;
    /// only a chunk with a bad token is searched.
    fn check_tokens(&self) -> Result<()> {
        if self.width == Width::U16 && self.vocab_size > u16::MAX as usize {
            return Ok(());
        }
        const CHUNK_TOKENS: usize = 1 << 16;
        let width = self.width as usize;
        let bad = self
            .tokens()
            .par_chunks(CHUNK_TOKENS * width)
            .enumerate()
            .find_map_first(|(chunk, bytes)| {
                let mut tokens = vec![0; bytes.len() / width];
                self.read(chunk * CHUNK_TOKENS, &mut tokens);
                let max = tokens.iter().fold(0, |max, &t| t.max(max));
                if (max as usize) < self.vocab_size {
                    return None;
                }
                let at = tokens.iter().position(|&t| t as usize >= self.vocab_size)?;
                Some((chunk * CHUNK_TOKENS + at, tokens[at]))
            });
        match bad {
            None => Ok(()),
            Some((position, token)) => Err(Error::Data(format!(
                "{}: token {token} at byte {} (position {position}) is outside the vocabulary of \
                 {}: give the vocabulary size the file was made with, or make the file again",
                self.path.display(),
                self.first_byte + position * width,
                self.vocab_size
            ))),
        }
    }
}

/// Where the tokens start and how wide they are, or what is wrong with the file.
fn layout(bytes: &[u8], vocab_size: usize) -> std::result::Result<(usize, Width), String> {
    let field = |i: usize| -> Option<i32> {
        let b = bytes.get(4 * i..4 * i + 4)?;
        Some(i32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    };
    let width = [Width::U16, Width::U32]
        .into_iter()
        .find(|w| field(0) == Some(w.magic_and_version().0));
    let Some(width) = width else {
        if !bytes.len().is_multiple_of(2) {
            return Err(format!(
                "{} bytes and no llm.c header: headerless u16 tokens have an even size; the file \
                 is cut or something else",
                bytes.len()
            ));
        }
        if vocab_size > 1 << 16 {
            return Err(format!(
                "no llm.c header at byte 0: headerless tokens are u16, which cannot hold a \
                 vocabulary of {vocab_size}; write the file in llm.c's u32 format"
            ));
        }
        return Ok((0, Width::U16));
    };
    let (magic, version) = width.magic_and_version();
    if bytes.len() < HEADER_BYTES {
        return Err(format!(
            "cut inside the header: {} bytes of {HEADER_BYTES}; make the file again",
            bytes.len()
        ));
    }
    let found = field(1).unwrap_or(0);
    if found != version {
        return Err(format!(
            "version {found} at byte 4, expected {version} after magic {magic}: the header is \
             damaged or of an unknown format; make the file again"
        ));
    }
    let count = field(2).unwrap_or(0);
    let expected = HEADER_BYTES as i64 + width as i64 * count as i64;
    if count < 0 || bytes.len() as i64 != expected {
        return Err(format!(
            "the header counts {count} tokens at byte 8, so the file should have {expected} bytes \
             but has {}: it is cut or damaged; make it again",
            bytes.len()
        ));
    }
    Ok((HEADER_BYTES, width))
}
