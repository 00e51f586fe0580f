//! Byte-pair encoding and tokenizer.json, through crate tokenizers.

use std::collections::HashSet;

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use crate::data::corpus::Document;
use crate::data::tokenizer::{Cut, pieces};

/// Pair counts in crate tokenizers are i32, so at most this much text trains the merges.
const MAX_TRAINING_BYTES: usize = 1 << 30;

/// A tokenizer of crate tokenizers and what has to be known to use it without surprises.
#[derive(Clone, Debug)]
pub(super) struct Subwords {
    inner: tokenizers::Tokenizer,
    vocab_size: usize,
    cut: Cut,
    /// Bytes that the model would drop without a word; empty for a complete byte alphabet.
    missing_bytes: Vec<u8>,
}

impl Subwords {
    /// Trains byte-level byte-pair encoding with GPT-2's word split and byte alphabet.
    ///
    /// The same documents give the same merges, whatever the number of threads: counts are sums,
    /// the alphabet is sorted, and pairs of equal count merge in id order.
    pub fn train(documents: &[Document], vocab_size: usize) -> Result<Self, String> {
        let byte_level = ByteLevel::new(false, false, true);
        let mut inner = tokenizers::Tokenizer::new(BPE::default());
        inner.with_pre_tokenizer(Some(byte_level));
        inner.with_decoder(Some(byte_level));
        let mut trainer = TrainerWrapper::BpeTrainer(
            BpeTrainer::builder()
                .vocab_size(vocab_size)
                .show_progress(false)
                // All 256 bytes, seen or not, so that any text can be encoded.
                .initial_alphabet(ByteLevel::alphabet().into_iter().collect::<HashSet<_>>())
                .build(),
        );
        let texts = documents.iter().flat_map(|d| {
            let pieces = pieces(&d.text, Cut::Newline);
            pieces.into_iter().map(|piece| &d.text[piece])
        });
        let mut num_bytes = 0;
        let mut sample: Vec<&str> = Vec::new();
        for text in texts {
            num_bytes += text.len();
            if num_bytes > MAX_TRAINING_BYTES {
                tracing::warn!("byte pairs are trained on the first {MAX_TRAINING_BYTES} bytes");
                break;
            }
            sample.push(text);
        }
        inner
            .train(&mut trainer, sample.into_iter())
            .map_err(|e| e.to_string())?;
        Self::new(inner)
    }

    /// Reads a tokenizer.json.
    pub fn from_json(bytes: &[u8]) -> Result<Self, String> {
        Self::new(tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| e.to_string())?)
    }

    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(&self.inner)
    }

    fn new(mut inner: tokenizers::Tokenizer) -> Result<Self, String> {
        // Files made for inference may cut or pad each text, which would lose most of a corpus.
        inner.with_truncation(None).map_err(|e| e.to_string())?;
        inner.with_padding(None);
        let vocab = inner.get_vocab(true);
        // Ids can have gaps: the vocabulary is what the largest one needs.
        let vocab_size = vocab.values().max().map_or(0, |&id| id as usize + 1);
        if vocab_size == 0 {
            return Err("the vocabulary is empty".into());
        }
        let mut missing_bytes = Vec::new();
        if let ModelWrapper::BPE(bpe) = inner.get_model() {
            if bpe.dropout.is_some_and(|p| p > 0.0) {
                return Err(
                    "model.dropout makes the tokens of a text random: set it to null".into(),
                );
            }
            if bpe.unk_token.is_none() && !bpe.byte_fallback {
                // Such a model skips what it has no token for. Byte-level ones can be checked.
                if !serde_json::to_string(&inner.get_pre_tokenizer())
                    .is_ok_and(|json| json.contains("\"ByteLevel\""))
                {
                    return Err(
                        "the BPE model has no unk_token, no byte_fallback and no ByteLevel \
                         pre-tokenizer, so it would drop characters it lacks: add one of them"
                            .into(),
                    );
                }
                missing_bytes = byte_alphabet()
                    .into_iter()
                    .filter(|(_, c)| !vocab.contains_key(&c.to_string()))
                    .map(|(byte, _)| byte)
                    .collect();
            }
        }
        Ok(Self {
            cut: cut(&inner),
            inner,
            vocab_size,
            missing_bytes,
        })
    }

    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Where a text can be cut without changing its tokens.
    pub fn cut(&self) -> Cut {
        self.cut
    }

    /// The first character that encoding would drop, and its byte offset.
    pub fn first_unknown(&self, text: &str) -> Option<(usize, char)> {
        if self.missing_bytes.is_empty() {
            return None;
        }
        text.char_indices().find(|(at, c)| {
            let bytes = &text.as_bytes()[*at..at + c.len_utf8()];
            bytes.iter().any(|b| self.missing_bytes.contains(b))
        })
    }

    pub fn encode(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        Ok(self.inner.encode_fast(text, false)?.get_ids().to_vec())
    }

    pub fn decode(&self, ids: &[u32]) -> tokenizers::Result<String> {
        self.inner.decode(ids, false)
    }
}

fn cut(inner: &tokenizers::Tokenizer) -> Cut {
    let gpt2_words = matches!(
        inner.get_pre_tokenizer(),
        Some(PreTokenizerWrapper::ByteLevel(b)) if b.use_regex && !b.add_prefix_space
    );
    let plain = |t: &tokenizers::AddedToken| {
        !t.lstrip && !t.rstrip && !t.single_word && !t.content.contains('\n')
    };
    let added = inner.get_added_tokens_decoder();
    if gpt2_words && inner.get_normalizer().is_none() && added.values().all(plain) {
        Cut::Newline
    } else {
        Cut::Nowhere
    }
}

/// GPT-2's byte alphabet: printable bytes stand for themselves, the others for the characters from
/// U+0100 on.
fn byte_alphabet() -> Vec<(u8, char)> {
    let mut next = 0x100;
    (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => (byte, byte as char),
            _ => {
                next += 1;
                (byte, char::from_u32(next - 1).unwrap_or_default())
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_that_of_crate_tokenizers() {
        let ours: HashSet<char> = byte_alphabet().into_iter().map(|(_, c)| c).collect();
        let theirs: HashSet<char> = ByteLevel::alphabet().into_iter().collect();
        assert_eq!(ours, theirs);
        assert_eq!(byte_alphabet()[b' ' as usize].1, 'Ġ');
        assert_eq!(byte_alphabet()[b'\n' as usize].1, 'Ċ');
    }
}
