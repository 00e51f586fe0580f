//! Corpus to tokenizer to split to cached shards.
//!
//! A prepared corpus is a folder `<data.dir>/<16 hex digits>` named after the corpus's content, the
//! tokenizer and the split. It is built in a hidden folder beside it and renamed when complete, and
//! its files are checked against the hashes in meta.json each time it is used.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::data::config::{DataConfig, ShardsConfig};
use crate::data::corpus::Corpus;
use crate::data::ngram;
use crate::data::shard::{self, Shard};
use crate::data::tokenizer::{Tokenizer, TokenizerSpec};
use crate::durable::{self, hex, sha256_file};
use crate::metrics::progress::bars;
use crate::{Error, Result};

/// Part of the cache's name: raised when the same input would give other files.
const FORMAT: u32 = 1;

/// What a run trains and evaluates on.
#[derive(Debug)]
pub struct Dataset {
    /// Tokens to train on.
    pub train: Shard,
    /// Tokens to evaluate on.
    pub val: Shard,
    /// Text to these tokens and back; unknown for token files without a tokenizer.json.
    pub tokenizer: Option<Tokenizer>,
    /// Number of different tokens.
    pub vocab_size: usize,
    /// Sizes, hash and baselines.
    pub meta: Meta,
}

/// Facts about a dataset; meta.json of a prepared corpus.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// SHA-256 (64 hex digits) of corpus, tokenizer and split. For token files, of their sizes and
    /// of the first and last MiB of each: enough to tell data sets apart, not to find a flipped bit.
    pub hash: String,
    /// `data.tokenizer`, or "" for token files without one.
    pub tokenizer: String,
    /// Number of different tokens.
    pub vocab_size: usize,
    /// Files of text (0 for token files).
    pub num_files: usize,
    /// Bytes of text (0 for token files).
    pub num_bytes: u64,
    /// Tokens of the training split.
    pub train_tokens: usize,
    /// Tokens of the validation split.
    pub val_tokens: usize,
    /// Cross-entropy of the validation split under unigram counts of the training split, nats a
    /// token (see [`ngram`]); not computed for token files.
    pub unigram_nats: Option<f64>,
    /// The same for interpolated bigrams.
    pub bigram_nats: Option<f64>,
    /// SHA-256 of each file in the folder; empty for token files.
    pub files: BTreeMap<String, String>,
}

impl Dataset {
    /// One line: sizes, and what a model has to beat.
    pub fn describe(&self) -> String {
        let Meta {
            train_tokens,
            val_tokens,
            num_files,
            num_bytes,
            ..
        } = &self.meta;
        let source = match num_files {
            0 => "token files".to_owned(),
            n => format!("{n} files, {:.1} MB of text", *num_bytes as f64 / 1e6),
        };
        let baselines = match (self.meta.unigram_nats, self.meta.bigram_nats) {
            (Some(unigram), Some(bigram)) => format!(
                "; validation cross-entropy: unigram {unigram:.4}, bigram {bigram:.4} nats a token"
            ),
            _ => String::new(),
        };
        format!(
            "{source}: {train_tokens} training and {val_tokens} validation tokens, vocabulary {}{baselines}",
            self.vocab_size
        )
    }

    /// How `val_loss` stands against the bigram model, for a closing line; empty when unknown.
    pub fn compare_with_bigram(&self, val_loss: f64) -> String {
        match self.meta.bigram_nats {
            Some(bigram) if val_loss < bigram => format!(" (below the bigram model's {bigram:.4})"),
            Some(bigram) => format!(" (the bigram model has {bigram:.4})"),
            None => String::new(),
        }
    }
}

/// Makes the dataset that `[data]` describes, or reuses the prepared one; `progress` shows a bar
/// on a terminal. Safe to call from several processes at once: one prepares, the others wait.
///
/// # Errors
/// [`Error::Config`] naming the key, [`Error::Data`] naming file and offset, [`Error::Io`].
pub fn prepare(config: &DataConfig, progress: bool) -> Result<Dataset> {
    config.validate()?;
    let spec = TokenizerSpec::parse(&config.tokenizer)?;
    if let TokenizerSpec::File(path) = &spec
        && !path.is_file()
    {
        return Err(Error::Config(format!(
            "data.tokenizer = {:?}: no such file; expected \"char\", \"byte\", \"bpe:4096\" or the \
             path of a tokenizer.json",
            config.tokenizer
        )));
    }
    match &config.shards {
        Some(shards) => open_shards(shards, &spec, &config.tokenizer),
        None => prepare_text(config, &spec, progress),
    }
}

fn prepare_text(config: &DataConfig, spec: &TokenizerSpec, progress: bool) -> Result<Dataset> {
    let corpus = Corpus::read(config)?;
    let hash = dataset_hash(&corpus, config, spec)?;
    let key = &hash[..16];
    let folder = config.dir.join(key);
    fs::create_dir_all(&config.dir).map_err(Error::io(&config.dir))?;

    // Held to the end of the function. The lock file stays: removing it would let two processes
    // hold locks on two files of the same name.
    let lock_path = config.dir.join(format!(".{key}.lock"));
    let lock = File::create(&lock_path).map_err(Error::io(&lock_path))?;
    // Some network file systems have no locks. The rename below still keeps files whole there.
    let locked = lock.lock().is_ok();

    if folder.exists() {
        match open_prepared(&folder, &hash) {
            Ok(dataset) => return Ok(dataset),
            Err(why) => tracing::warn!("prepared data is unusable and made again: {why}"),
        }
        remove(&folder)?;
    }
    if locked {
        remove_left_overs(&config.dir, key)?;
    }
    let temporary = config
        .dir
        .join(format!(".{key}.tmp-{}", std::process::id()));
    fs::create_dir(&temporary).map_err(Error::io(&temporary))?;
    let built = build(&corpus, config, spec, &hash, &temporary, progress).and_then(|()| {
        durable::sync_folder(&temporary)?;
        durable::rename(&temporary, &folder).or_else(|why| {
            // Without locks another process may have been first; its folder is then as good.
            if folder.exists() { Ok(()) } else { Err(why) }
        })
    });
    if temporary.exists() {
        let _ = fs::remove_dir_all(&temporary); // swept again by the next call if this fails
    }
    built?;
    open_prepared(&folder, &hash)
}

/// SHA-256 of everything that decides the content of the prepared folder.
fn dataset_hash(corpus: &Corpus, config: &DataConfig, spec: &TokenizerSpec) -> Result<String> {
    let tokenizer = match spec {
        // Not the path: the same file elsewhere is the same tokenizer.
        TokenizerSpec::File(path) => format!("file {}", sha256_file(path)?.1),
        _ => config.tokenizer.clone(),
    };
    let text = format!(
        "{FORMAT}\n{}\n{tokenizer}\n{:016x}\n",
        corpus.hash,
        config.val_fraction.to_bits()
    );
    Ok(hex(&Sha256::digest(text)))
}

/// Fills `folder` with train.bin, val.bin, the tokenizer and meta.json.
fn build(
    corpus: &Corpus,
    config: &DataConfig,
    spec: &TokenizerSpec,
    hash: &str,
    folder: &Path,
    progress: bool,
) -> Result<()> {
    tracing::info!(
        "preparing {:.1} MB of text with tokenizer {:?}",
        corpus.num_bytes as f64 / 1e6,
        config.tokenizer
    );
    let bar = progress_bar(corpus.num_bytes, progress);
    bar.set_message("tokenizer");
    let texts = || corpus.documents.iter().map(|d| d.text.as_str());
    let tokenizer = match spec {
        TokenizerSpec::Char => Tokenizer::chars(texts()),
        TokenizerSpec::Byte => Tokenizer::bytes(),
        TokenizerSpec::Bpe(size) => Tokenizer::train_bpe(&corpus.documents, *size)?,
        TokenizerSpec::File(path) => Tokenizer::load(path)?,
    };
    bar.set_message("encoding");
    let tokens = tokenizer.encode_documents(&corpus.documents, |bytes| bar.inc(bytes))?;
    let (train, val) = split(&tokens, config.val_fraction)?;

    bar.set_message("writing");
    let vocab_size = tokenizer.vocab_size();
    shard::write(&folder.join("train.bin"), train, vocab_size)?;
    shard::write(&folder.join("val.bin"), val, vocab_size)?;
    tokenizer.save(folder)?;
    let mut files = BTreeMap::new();
    for name in ["train.bin", "val.bin", tokenizer.file_name()] {
        files.insert(name.to_string(), sha256_file(&folder.join(name))?.1);
    }
    bar.set_message("baselines");
    let baselines = ngram::cross_entropy(train, val, vocab_size);
    let meta = Meta {
        hash: hash.to_string(),
        tokenizer: config.tokenizer.clone(),
        vocab_size,
        num_files: corpus.documents.len(),
        num_bytes: corpus.num_bytes,
        train_tokens: train.len(),
        val_tokens: val.len(),
        unigram_nats: baselines.map(|b| b.0),
        bigram_nats: baselines.map(|b| b.1),
        files,
    };
    let path = folder.join("meta.json");
    durable::write_file(&path, |out| {
        serde_json::to_writer_pretty(&mut *out, &meta)?;
        out.write_all(b"\n")
    })?;
    bar.finish_and_clear();
    Ok(())
}

/// The first int(n (1 - fraction)) tokens, as nanoGPT cuts, and the rest.
fn split(tokens: &[u32], val_fraction: f64) -> Result<(&[u32], &[u32])> {
    let num_train = (tokens.len() as f64 * (1.0 - val_fraction)) as usize;
    if num_train == 0 || num_train >= tokens.len() {
        return Err(Error::Data(format!(
            "data.val_fraction = {val_fraction} of {} tokens leaves one side of the split empty: \
             use more text",
            tokens.len()
        )));
    }
    Ok(tokens.split_at(num_train))
}

/// Opens a prepared folder after checking each file against its hash.
fn open_prepared(folder: &Path, hash: &str) -> Result<Dataset> {
    let path = folder.join("meta.json");
    let bad = |path: &Path, what: &str| Error::Data(format!("{}: {what}", path.display()));
    let json = fs::read(&path).map_err(Error::io(&path))?;
    let meta: Meta =
        serde_json::from_slice(&json).map_err(|e| bad(&path, &format!("not a meta.json: {e}")))?;
    if meta.hash != hash {
        return Err(bad(&path, "describes other data"));
    }
    let mut tokenizer = None;
    for (name, expected) in &meta.files {
        let file = folder.join(name);
        if sha256_file(&file)?.1 != *expected {
            return Err(bad(&file, "differs from what was written"));
        }
        if name.ends_with(".json") {
            tokenizer = Some(Tokenizer::load(&file)?);
        }
    }
    let train = Shard::open(&folder.join("train.bin"), meta.vocab_size)?;
    let val = Shard::open(&folder.join("val.bin"), meta.vocab_size)?;
    Ok(Dataset {
        train,
        val,
        tokenizer,
        vocab_size: meta.vocab_size,
        meta,
    })
}

/// Opens token files as they are.
fn open_shards(shards: &ShardsConfig, spec: &TokenizerSpec, name: &str) -> Result<Dataset> {
    for (key, path) in [("train", &shards.train), ("val", &shards.val)] {
        if !path.is_file() {
            return Err(Error::Config(format!(
                "data.shards.{key} = {path:?}: no such file; expected a .bin file of tokens"
            )));
        }
    }
    let vocab_size = shards.vocab_size;
    // Tokens come with no text to train a tokenizer on, so only a given file can explain them.
    let tokenizer = match spec {
        TokenizerSpec::File(path) => Some(Tokenizer::load(path)?),
        _ => None,
    };
    if let Some(t) = &tokenizer
        && t.vocab_size() > vocab_size
    {
        return Err(Error::Config(format!(
            "data.shards.vocab_size = {vocab_size}: below the {} tokens of data.tokenizer = {name:?}",
            t.vocab_size()
        )));
    }
    let train = Shard::open(&shards.train, vocab_size)?;
    let val = Shard::open(&shards.val, vocab_size)?;
    let mut hasher = Sha256::new();
    for shard in [&train, &val] {
        hasher.update((shard.num_tokens() as u64).to_le_bytes());
        let ends = shard.num_tokens().min(1 << 19);
        let mut tokens = vec![0; ends];
        for start in [0, shard.num_tokens() - ends] {
            shard.read(start, &mut tokens);
            tokens.iter().for_each(|t| hasher.update(t.to_le_bytes()));
        }
    }
    let meta = Meta {
        hash: hex(&hasher.finalize()),
        tokenizer: tokenizer.as_ref().map_or(String::new(), |_| name.into()),
        vocab_size,
        num_files: 0,
        num_bytes: 0,
        train_tokens: train.num_tokens(),
        val_tokens: val.num_tokens(),
        unigram_nats: None,
        bigram_nats: None,
        files: BTreeMap::new(),
    };
    Ok(Dataset {
        train,
        val,
        tokenizer,
        vocab_size,
        meta,
    })
}

/// Removes a folder, or whatever lies where a folder should.
fn remove(path: &PathBuf) -> Result<()> {
    if path.is_dir() {
        fs::remove_dir_all(path).map_err(Error::io(path))
    } else {
        fs::remove_file(path).map_err(Error::io(path))
    }
}

/// Removes folders that a process left half built. The caller holds the lock, so nobody uses them.
fn remove_left_overs(dir: &Path, key: &str) -> Result<()> {
    let prefix = format!(".{key}.tmp-");
    for entry in fs::read_dir(dir).map_err(Error::io(dir))? {
        let path = entry.map_err(Error::io(dir))?.path();
        let name = path.file_name().unwrap_or_default();
        if name.as_encoded_bytes().starts_with(prefix.as_bytes()) {
            remove(&path)?;
        }
    }
    Ok(())
}

/// A bar over the corpus's bytes; it draws on a terminal only.
fn progress_bar(num_bytes: u64, progress: bool) -> ProgressBar {
    if !progress {
        return ProgressBar::hidden();
    }
    let bar = bars().add(ProgressBar::new(num_bytes));
    let style = ProgressStyle::with_template(
        "prepare {msg:<9} [{bar:30}] {bytes}/{total_bytes} {elapsed_precise}",
    );
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
