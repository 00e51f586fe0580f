//! Where the lines of a rank go: to this terminal with its number in front, or to a file.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Lines kept of every rank, to repeat when it fails.
const NUM_KEPT: usize = 8;

/// Longest line; a longer one is cut into several.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// Which of the launcher's own streams a rank's stream becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error, whose last lines are kept.
    Err,
}

/// Where a rank's lines go.
#[derive(Clone, Debug)]
pub struct Sink {
    /// Put before every line on the terminal.
    pub rank: usize,
    /// A file for the lines as they are.
    pub file: Option<Arc<File>>,
    /// Whether lines go to the terminal.
    pub to_terminal: bool,
    /// The newest lines of standard error.
    kept: Arc<Mutex<VecDeque<String>>>,
}

impl Sink {
    /// To the terminal when there is no file; rank 0's lines go there in any case.
    pub fn new(rank: usize, file: Option<File>) -> Self {
        Self {
            rank,
            to_terminal: rank == 0 || file.is_none(),
            file: file.map(Arc::new),
            kept: Arc::default(),
        }
    }

    /// Copies `from` line by line until it ends, on a thread of its own.
    ///
    /// # Errors
    /// The system's, when it has no thread.
    pub fn copy(
        &self,
        from: impl Read + Send + 'static,
        stream: Stream,
    ) -> std::io::Result<JoinHandle<()>> {
        let sink = self.clone();
        thread::Builder::new()
            .name(format!("rank-{}", self.rank))
            .spawn(move || sink.copy_all(from, stream))
    }

    fn copy_all(&self, from: impl Read, stream: Stream) {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            // A rank must never block on a launcher that stopped reading: errors end the stream only.
            match (&mut from)
                .take(MAX_LINE_BYTES)
                .read_until(b'\n', &mut line)
            {
                Ok(1..) => self.write(&line, stream),
                _ => return,
            }
        }
    }

    fn write(&self, line: &[u8], stream: Stream) {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        // In one write each, so that ranks do not cut each other's lines; nobody may be reading.
        if let Some(file) = &self.file {
            let _ = (&**file).write_all(&[line, b"\n"].concat());
        }
        if self.to_terminal {
            let text = [format!("[{}] ", self.rank).as_bytes(), line, b"\n"].concat();
            let _ = match stream {
                Stream::Out => std::io::stdout().write_all(&text),
                Stream::Err => std::io::stderr().write_all(&text),
            };
        }
        if stream == Stream::Err {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() == NUM_KEPT {
                kept.pop_front();
            }
            kept.push_back(String::from_utf8_lossy(line).into_owned());
        }
    }

    /// The newest lines of standard error, oldest first.
    pub fn last_lines(&self) -> Vec<String> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_filed_and_the_newest_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank");
        let sink = Sink::new(3, Some(File::create(&path).unwrap()));
        assert!(!sink.to_terminal);
        let mut text = (0..20)
            .map(|i| format!("line {i}\n"))
            .collect::<String>()
            .into_bytes();
        text.extend(b"not \xff text, and no end");
        sink.copy_all(&text[..], Stream::Err);
        let last = sink.last_lines();
        assert_eq!(last.len(), NUM_KEPT);
        assert_eq!(last[0], "line 13");
        assert_eq!(last[NUM_KEPT - 1], "not \u{fffd} text, and no end");
        let filed = std::fs::read(&path).unwrap();
        assert_eq!(filed, [&text[..], b"\n"].concat());
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank");
        let sink = Sink::new(1, Some(File::create(&path).unwrap()));
        sink.copy_all(&vec![b'x'; (2 * MAX_LINE_BYTES) as usize][..], Stream::Out);
        assert_eq!(
            std::fs::metadata(&path).unwrap().len(),
            2 * MAX_LINE_BYTES + 2
        );
        assert!(sink.last_lines().is_empty());
    }
}
