//! Text to token ids and back: bytes, characters, byte-pair encoding, or a tokenizer.json.

use std::collections::HashSet;
use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::data::corpus::Document;
use crate::data::subword::Subwords;
use crate::durable;
use crate::{Error, Result};

/// Text is trained on and encoded in pieces of about this many bytes: enough work for a thread, and
/// a bound on what crate tokenizers allocates (some 100 bytes a byte of text).
const PIECE_BYTES: usize = 1 << 18;

/// What `data.tokenizer` asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSpec {
    /// The characters of the corpus, in code point order.
    Char,
    /// The 256 bytes.
    Byte,
    /// Byte-level byte-pair encoding of this many tokens, trained on the corpus.
    Bpe(usize),
    /// A file: crate tokenizers' tokenizer.json, or what [`Tokenizer::save`] wrote.
    File(PathBuf),
}

impl TokenizerSpec {
    /// Parses `data.tokenizer`.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key and the choices.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |why: &str| Error::Config(format!("data.tokenizer = {text:?}: {why}"));
        match text {
            "char" => Ok(Self::Char),
            "byte" => Ok(Self::Byte),
            "" => Err(wrong(
                "expected \"char\", \"byte\", \"bpe:4096\" or the path of a tokenizer.json",
            )),
            _ => match text.strip_prefix("bpe:") {
                None => Ok(Self::File(text.into())),
                Some(size) => match size.parse::<u32>() {
                    Ok(size) if size >= 256 => Ok(Self::Bpe(size as usize)),
                    Ok(_) => Err(wrong("a byte-level vocabulary has at least 256 tokens")),
                    Err(_) => Err(wrong("expected a number of tokens after \"bpe:\"")),
                },
            },
        }
    }
}

/// Maps text to token ids below [`Tokenizer::vocab_size`] and back.
#[derive(Clone, Debug)]
pub struct Tokenizer(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Bytes,
    Chars(Chars),
    Subwords(Box<Subwords>),
}

/// Characters in order, and the way back: id + 1 at the character's code point, 0 elsewhere.
#[derive(Clone, Debug)]
struct Chars {
    chars: Vec<char>,
    ids: Vec<u32>,
}

/// The file of a byte or character tokenizer.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "lowercase")]
enum Saved {
    Bytes(usize),
    Chars(String),
}

impl Tokenizer {
    /// The tokenizer of 256 bytes.
    pub fn bytes() -> Self {
        Self(Kind::Bytes)
    }

    /// The tokenizer of the different characters of a text, in code point order.
    pub fn chars<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let mut seen = vec![false; char::MAX as usize + 1];
        for text in texts {
            text.chars().for_each(|c| seen[c as usize] = true);
        }
        let chars = (0..seen.len() as u32).filter(|&c| seen[c as usize]);
        Self::of_chars(chars.filter_map(char::from_u32).collect())
    }

    fn of_chars(chars: Vec<char>) -> Self {
        let mut ids = vec![0; chars.iter().max().map_or(0, |&c| c as usize + 1)];
        for (id, &c) in chars.iter().enumerate() {
            ids[c as usize] = id as u32 + 1;
        }
        Self(Kind::Chars(Chars { chars, ids }))
    }

    /// Trains byte-level byte-pair encoding on documents: the same documents give the same
    /// tokenizer, whatever the number of threads. A corpus with few different words ends with fewer than
    /// `vocab_size` tokens, and says so in the log.
    ///
    /// # Errors
    /// [`Error::Data`] where crate tokenizers refuses.
    pub fn train_bpe(documents: &[Document], vocab_size: usize) -> Result<Self> {
        let subwords = Subwords::train(documents, vocab_size)
            .map_err(|e| Error::Data(format!("training {vocab_size} byte pairs: {e}")))?;
        if subwords.vocab_size() < vocab_size {
            tracing::warn!(
                "the corpus gives {} tokens, fewer than the {vocab_size} that data.tokenizer asks \
                 for",
                subwords.vocab_size()
            );
        }
        Ok(Self(Kind::Subwords(Box::new(subwords))))
    }

    /// Number of token ids: every id that [`Tokenizer::encode`] returns is below it.
    pub fn vocab_size(&self) -> usize {
        match &self.0 {
            Kind::Bytes => 256,
            Kind::Chars(t) => t.chars.len(),
            Kind::Subwords(t) => t.vocab_size(),
        }
    }

    /// Token ids of a text. No token is added at either end.
    ///
    /// # Errors
    /// [`Error::Data`] naming the first character that the vocabulary lacks and its byte offset.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_piece(text, 0).map_err(Error::Data)
    }

    /// Token ids of each document's text, in order and joined without separator; pieces are
    /// encoded in parallel. `done` is told the bytes of each finished piece.
    ///
    /// # Errors
    /// [`Error::Data`] as [`Tokenizer::encode`], with the file.
    pub fn encode_documents(
        &self,
        documents: &[Document],
        done: impl Fn(u64) + Sync,
    ) -> Result<Vec<u32>> {
        let cut = match &self.0 {
            Kind::Bytes | Kind::Chars(_) => Cut::Anywhere,
            Kind::Subwords(t) => t.cut(),
        };
        let work: Vec<(&Document, Range<usize>)> = documents
            .iter()
            .flat_map(|d| pieces(&d.text, cut).into_iter().map(move |p| (d, p)))
            .collect();
        let encoded: Vec<Vec<u32>> = work
            .into_par_iter()
            .map(|(document, piece)| {
                let start = piece.start;
                let ids = self
                    .encode_piece(&document.text[piece.clone()], start)
                    .map_err(|e| Error::Data(format!("{}: {e}", document.path.display())))?;
                done(piece.len() as u64);
                Ok(ids)
            })
            .collect::<Result<_>>()?;
        Ok(encoded.concat())
    }

    /// Encodes a text that starts at byte `offset` of its file.
    fn encode_piece(&self, text: &str, offset: usize) -> std::result::Result<Vec<u32>, String> {
        let unknown = |c: char, at: usize| {
            format!(
                "character {c:?} (U+{:04X}) at byte {} is not in the tokenizer's vocabulary: \
                 remove it, or make the tokenizer from text that has it",
                c as u32,
                offset + at
            )
        };
        match &self.0 {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Chars(t) => text
                .char_indices()
                .map(|(at, c)| match t.ids.get(c as usize) {
                    Some(&id) if id > 0 => Ok(id - 1),
                    _ => Err(unknown(c, at)),
                })
                .collect(),
            Kind::Subwords(t) => {
                if let Some((at, c)) = t.first_unknown(text) {
                    return Err(unknown(c, at));
                }
                t.encode(text)
                    .map_err(|e| format!("text at byte {offset}: {e}"))
            }
        }
    }

    /// The text of token ids. Bytes, characters and trained BPE give back exactly what was
    /// encoded; ids that do not form UTF-8 (a model can produce them) become U+FFFD.
    ///
    /// # Errors
    /// [`Error::Data`] for an id outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        if let Some(i) = ids.iter().position(|&t| t as usize >= self.vocab_size()) {
            return Err(Error::Data(format!(
                "token {} at position {i} is outside the vocabulary of {}",
                ids[i],
                self.vocab_size()
            )));
        }
        match &self.0 {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::Chars(t) => Ok(ids.iter().map(|&id| t.chars[id as usize]).collect()),
            Kind::Subwords(t) => t
                .decode(ids)
                .map_err(|e| Error::Data(format!("decoding {} tokens: {e}", ids.len()))),
        }
    }

    /// The name of the file that [`Tokenizer::save`] writes: tokenizer.json (crate tokenizers'
    /// format) for subwords, chars.json for characters, bytes.json for bytes.
    pub fn file_name(&self) -> &'static str {
        match &self.0 {
            Kind::Bytes => "bytes.json",
            Kind::Chars(_) => "chars.json",
            Kind::Subwords(_) => "tokenizer.json",
        }
    }

    /// Writes the tokenizer into a folder, complete or not at all, and returns the file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, folder: &Path) -> Result<PathBuf> {
        let path = folder.join(self.file_name());
        self.save_as(&path)?;
        Ok(path)
    }

    /// Writes the tokenizer as the file `path`, complete or not at all.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save_as(&self, path: &Path) -> Result<()> {
        let json = match &self.0 {
            Kind::Bytes => serde_json::to_string(&Saved::Bytes(256)),
            Kind::Chars(t) => serde_json::to_string(&Saved::Chars(t.chars.iter().collect())),
            Kind::Subwords(t) => t.to_json(),
        }
        .map_err(|e| Error::Data(format!("{}: {e}", path.display())))?;
        durable::write_file(path, |out| out.write_all(json.as_bytes()))
    }

    /// Reads a tokenizer: a tokenizer.json, or a file that [`Tokenizer::save`] wrote.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Data`] with the file and what is wrong with it.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).map_err(Error::io(path))?;
        Self::from_json(&bytes).map_err(|why| {
            Error::Data(format!(
                "{}: {why}: expected a tokenizer.json of crate tokenizers, or a chars.json or \
                 bytes.json of this program",
                path.display()
            ))
        })
    }

    fn from_json(bytes: &[u8]) -> std::result::Result<Self, String> {
        let object: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(bytes).map_err(|e| format!("not a tokenizer: {e}"))?;
        if !object.contains_key("chars") && !object.contains_key("bytes") {
            return Ok(Self(Kind::Subwords(Box::new(Subwords::from_json(bytes)?))));
        }
        match serde_json::from_value(object.into()).map_err(|e| e.to_string())? {
            Saved::Bytes(256) => Ok(Self::bytes()),
            Saved::Bytes(n) => Err(format!("a byte tokenizer of {n} tokens")),
            Saved::Chars(text) => {
                let chars: Vec<char> = text.chars().collect();
                if chars.is_empty() || chars.iter().collect::<HashSet<_>>().len() < chars.len() {
                    return Err("\"chars\" is empty or repeats a character".into());
                }
                Ok(Self::of_chars(chars))
            }
        }
    }
}

/// Where a text can be cut without changing its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// Between any two characters.
    Anywhere,
    /// Before a newline that follows a non-space: no match of GPT-2's word pattern spans such a
    /// place, and none looks back across it.
    Newline,
    /// The tokenizer is somebody else's, and may look at all of the text.
    Nowhere,
}

/// Consecutive byte ranges that cover the text, of [`PIECE_BYTES`] or a little more each.
pub(super) fn pieces(text: &str, cut: Cut) -> Vec<Range<usize>> {
    let bytes = text.as_bytes();
    let can_cut = |at: usize| match cut {
        Cut::Anywhere => text.is_char_boundary(at),
        Cut::Newline => {
            // Any character that ends in a byte above 127 may be a Unicode space: not here.
            bytes[at] == b'\n' && bytes[at - 1].is_ascii_graphic()
        }
        Cut::Nowhere => false,
    };
    let mut out = Vec::new();
    let mut start = 0;
    while start < text.len() {
        let end = (start + PIECE_BYTES..text.len())
            .find(|&at| can_cut(at))
            .unwrap_or(text.len());
        out.push(start..end);
        start = end;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_text_and_end_where_they_may() {
        let text = "ab\n\nc d\u{a0}\n é\n".repeat(PIECE_BYTES / 4);
        for cut in [Cut::Anywhere, Cut::Newline] {
            let pieces = pieces(&text, cut);
            assert!(pieces.len() > 2);
            let joined: String = pieces.iter().map(|p| &text[p.clone()]).collect();
            assert_eq!(joined, text);
        }
        for piece in &pieces(&text, Cut::Newline)[1..] {
            assert_eq!(&text[piece.start - 1..=piece.start + 1], "b\n\n");
        }
        assert_eq!(pieces(&text, Cut::Nowhere), vec![0..text.len(); 1]);
    }
}
