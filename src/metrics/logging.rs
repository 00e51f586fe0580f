//! tracing's log lines: to stderr above the progress bar, and to `train.log` once a run folder
//! exists.

use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::layer;
use tracing_subscriber::fmt::writer::{MakeWriter, OptionalWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, registry};

use super::progress::write_above_bars;
use crate::{Error, Result};

/// Variable with the filter, "debug" or "train=debug,info".
pub const FILTER_VARIABLE: &str = "TRAIN_LOG";

/// Name of the file in the run folder.
pub const FILE_NAME: &str = "train.log";

fn log_file() -> &'static Mutex<Option<Arc<File>>> {
    static FILE: OnceLock<Mutex<Option<Arc<File>>>> = OnceLock::new();
    FILE.get_or_init(Mutex::default)
}

/// Starts logging to stderr, once a process, as early as possible. `filter` is the value of
/// [`FILTER_VARIABLE`]; without one, "info".
///
/// # Errors
/// [`Error::Config`] when the filter does not parse or logging runs already.
pub fn init(filter: Option<&str>) -> Result<()> {
    let filter = filter.filter(|f| !f.trim().is_empty()).unwrap_or("info");
    let filter = EnvFilter::try_new(filter).map_err(|e| {
        Error::Config(format!(
            "{FILTER_VARIABLE} = {filter:?}: {e}; write a level (error, warn, info, debug, trace) \
             or target=level pairs"
        ))
    })?;
    let stderr = layer()
        .with_writer(Terminal)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    let file = layer().with_writer(|| LogFile).with_ansi(false);
    registry()
        .with(filter)
        .with(stderr)
        .with(file)
        .try_init()
        .map_err(|e| Error::Config(format!("logging: {e}")))
}

/// From now on, log lines go to `run_dir/train.log` as well, after what is there.
///
/// # Errors
/// [`Error::Io`].
pub fn to_file(run_dir: &Path) -> Result<()> {
    let path = run_dir.join(FILE_NAME);
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(&path)
        .map_err(Error::io(&path))?;
    *log_file().lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(file));
    Ok(())
}

static ONLY_WARNINGS: AtomicBool = AtomicBool::new(false);

/// From now on only warnings and errors reach stderr: rank 0 speaks for the others.
pub fn only_warnings() {
    ONLY_WARNINGS.store(true, Ordering::Relaxed);
}

/// Makes writers to stderr.
struct Terminal;

impl<'a> MakeWriter<'a> for Terminal {
    type Writer = OptionalWriter<AboveBars>;

    fn make_writer(&'a self) -> Self::Writer {
        OptionalWriter::some(AboveBars)
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Self::Writer {
        let passes = *meta.level() <= Level::WARN || !ONLY_WARNINGS.load(Ordering::Relaxed);
        match passes {
            true => OptionalWriter::some(AboveBars),
            false => OptionalWriter::none(),
        }
    }
}

/// tracing hands over a line in one write.
struct AboveBars;

impl Write for AboveBars {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        write_above_bars(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct LogFile;

impl Write for LogFile {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        let file = log_file()
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(file) = file {
            // A full disk must not stop training for a log line: stderr has it too.
            let _ = (&*file).write_all(text);
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
