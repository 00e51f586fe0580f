//! Every error of the program, and the exit status it ends the process with.

use std::path::{Path, PathBuf};

/// Result of anything that can end a run.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, in words for the person who started the run: what was found, what was
/// expected, what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The config or the command line is wrong. Exit status 2.
    #[error("config: {0}")]
    Config(String),
    /// Text, token shards or a tokenizer are unusable. Exit status 3.
    #[error("data: {0}")]
    Data(String),
    /// A checkpoint is missing, incomplete or of another run. Exit status 3.
    #[error("checkpoint: {0}")]
    Checkpoint(String),
    /// A peer rank or the network failed. Exit status 4.
    #[error("peer: {0}")]
    Peer(String),
    /// Training stopped by policy: a non-finite loss or gradient. Exit status 5.
    #[error("stopped: {0}")]
    Policy(String),
    /// A rank that this launcher started failed. Exit status: the rank's own.
    #[error("{message}")]
    Rank {
        /// Which rank, how, and its last lines.
        message: String,
        /// Its exit status, or 128 and the signal that ended it.
        status: u8,
    },
    /// The operating system refused a file operation. Exit status 3.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder it happened on.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A tensor operation failed, which is a bug of this program. Exit status 1.
    #[error("tensor: {0}")]
    Tensor(#[from] candle_core::Error),
}

impl Error {
    /// Wraps an I/O error with the path it happened on.
    pub fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.as_ref().to_path_buf();
        move |source| Error::Io { path, source }
    }

    /// The error that ended `rank` with `status`, on another rank.
    pub fn of_rank(rank: usize, status: u8, message: &str) -> Error {
        let message = format!("rank {rank}: {message}");
        match status {
            2 => Error::Config(message),
            3 => Error::Data(message),
            5 => Error::Policy(message),
            _ => Error::Peer(message),
        }
    }

    /// What went wrong, without the word for its kind.
    pub fn message(&self) -> String {
        match self {
            Error::Config(what)
            | Error::Data(what)
            | Error::Checkpoint(what)
            | Error::Peer(what)
            | Error::Policy(what) => what.clone(),
            other => other.to_string(),
        }
    }

    /// The process's exit status for this error.
    pub fn exit_status(&self) -> u8 {
        match self {
            Error::Config(_) => 2,
            Error::Data(_) | Error::Checkpoint(_) | Error::Io { .. } => 3,
            Error::Peer(_) => 4,
            Error::Policy(_) => 5,
            Error::Rank { status, .. } => *status,
            Error::Tensor(_) => 1,
        }
    }
}
