//! TensorBoard event files.
//!
//! A file is a row of records: u64 LE length, masked CRC32C of the length, data, masked CRC32C of
//! the data. Data is an `Event` of tensorflow's event.proto, of which these fields are written:
//! wall_time = 1 (double), step = 2 (int64), file_version = 3 (string), summary = 5
//! {value = 1 {tag = 1, simple_value = 2 (float)}}, session_log = 7 {status = 1 (enum)}.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::record::{EvalRecord, TrainRecord};
use crate::{Error, Result};

/// Name of the folder in the run folder.
pub const DIR_NAME: &str = "tensorboard";

/// Writes scalars to an event file of its own.
pub struct TensorBoard {
    path: PathBuf,
    file: BufWriter<File>,
}

impl TensorBoard {
    /// Starts an event file in `run_dir/tensorboard`. A run that continues from `resume_step` makes
    /// TensorBoard drop what older files have from that step on.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(run_dir: &Path, resume_step: Option<u64>) -> Result<Self> {
        /// Two writers of a process in the same second have files of different names.
        static NUM_FILES: AtomicU32 = AtomicU32::new(0);
        let dir = run_dir.join(DIR_NAME);
        std::fs::create_dir_all(&dir).map_err(Error::io(&dir))?;
        let path = dir.join(format!(
            "events.out.tfevents.{:010}.{}.{}.{}",
            since_epoch().as_secs(),
            host(),
            std::process::id(),
            NUM_FILES.fetch_add(1, Ordering::Relaxed)
        ));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(Error::io(&path))?;
        let mut board = Self {
            path,
            file: BufWriter::new(file),
        };
        let mut version = event(0);
        put_bytes(&mut version, 3, b"brain.Event:2");
        board.record(&version)?;
        if let Some(step) = resume_step {
            // SessionLog.START is 1: readers purge what older files have from this step on.
            let mut start = event(step);
            put_bytes(&mut start, 7, &[0x08, 1]);
            board.record(&start)?;
        }
        board.flush()?;
        Ok(board)
    }

    /// Writes values of `step` under their tags.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn scalars(&mut self, step: u64, values: &[(&str, f32)]) -> Result<()> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut entry = Vec::new();
            put_bytes(&mut entry, 1, tag.as_bytes());
            entry.push(2 << 3 | 5); // simple_value, 32 bits
            entry.extend(value.to_le_bytes());
            put_bytes(&mut summary, 1, &entry);
        }
        let mut data = event(step);
        put_bytes(&mut data, 5, &summary);
        self.record(&data)
    }

    /// Writes the scalars of a training step.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn train(&mut self, r: &TrainRecord) -> Result<()> {
        let mut values = vec![
            ("train/loss", r.loss),
            ("train/lr", r.lr),
            ("train/grad_norm", r.grad_norm),
            ("speed/step_ms", r.step_ms as f32),
            ("speed/tokens_per_s", r.tokens_per_s as f32),
            ("speed/tflops", r.tflops as f32),
        ];
        values.extend(r.mfu.map(|mfu| ("speed/mfu", mfu as f32)));
        let peak = r.memory.peak_rss_bytes;
        values.extend(peak.map(|bytes| ("memory/peak_rss_bytes", bytes as f32)));
        self.scalars(r.step, &values)
    }

    /// Writes the scalar of an evaluation, and everything so far to disk.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn eval(&mut self, record: &EvalRecord) -> Result<()> {
        self.scalars(record.step, &[("val/loss", record.val_loss)])?;
        self.flush()
    }

    /// Hands everything so far to the operating system; dropping the writer does so as well.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn flush(&mut self) -> Result<()> {
        self.file.flush().map_err(Error::io(&self.path))
    }

    fn record(&mut self, data: &[u8]) -> Result<()> {
        self.file
            .write_all(&frame(data))
            .map_err(Error::io(&self.path))
    }
}

fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(data.len() + 16);
    out.extend(length);
    out.extend(masked_crc(&length).to_le_bytes());
    out.extend(data);
    out.extend(masked_crc(data).to_le_bytes());
    out
}

/// The start of an `Event`: wall_time and step.
fn event(step: u64) -> Vec<u8> {
    let mut out = vec![1 << 3 | 1]; // wall_time, 64 bits
    out.extend(since_epoch().as_secs_f64().to_le_bytes());
    out.push(2 << 3); // step, varint
    put_varint(&mut out, step);
    out
}

/// A length-delimited field of protobuf.
fn put_bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    out.push(field << 3 | 2);
    put_varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "localhost".into(),
        name => name.replace('/', "_"),
    }
}

/// CRC32C of `data`, masked as TFRecord files want it, so that a CRC of data that holds CRCs works.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32 with Castagnoli's polynomial, reflected, a byte at a time: records are short and few.
fn crc32c(data: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut i = 0;
        while i < 256 {
            let mut crc = i as u32;
            let mut bit = 0;
            while bit < 8 {
                crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
                bit += 1;
            }
            table[i] = crc;
            i += 1;
        }
        table
    };
    let step = |crc: u32, byte: &u8| TABLE[(crc as u8 ^ byte) as usize] ^ (crc >> 8);
    !data.iter().fold(!0, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits a file into the data of its records, checking both checksums.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        while !bytes.is_empty() {
            let (length, rest) = bytes.split_at(8);
            let (length_crc, rest) = rest.split_at(4);
            let num_bytes = u64::from_le_bytes(length.try_into().unwrap()) as usize;
            let (data, rest) = rest.split_at(num_bytes);
            let (data_crc, rest) = rest.split_at(4);
            assert_eq!(length_crc, masked_crc(length).to_le_bytes());
            assert_eq!(data_crc, masked_crc(data).to_le_bytes());
            out.push(data.to_vec());
            bytes = rest;
        }
        out
    }

    fn read(dir: &Path) -> Vec<Vec<u8>> {
        let mut files = std::fs::read_dir(dir.join(DIR_NAME)).unwrap();
        let bytes = std::fs::read(files.next().unwrap().unwrap().path()).unwrap();
        records(&bytes)
    }

    #[test]
    fn checksum_has_the_values_of_rfc_3720() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&rising), 0x46dd_794e);
    }

    #[test]
    fn scalars_are_the_bytes_of_the_protocol() {
        let dir = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(dir.path(), None).unwrap();
        board
            .scalars(300, &[("a/b", 1.5), ("c", f32::NAN)])
            .unwrap();
        board.flush().unwrap();
        let records = read(dir.path());
        assert_eq!(records.len(), 2);
        // wall_time (1 + 8 bytes), step 0, then the version.
        assert_eq!(
            records[0][9..],
            [&[0x10, 0, 0x1a, 13][..], b"brain.Event:2"].concat()
        );
        let wall = f64::from_le_bytes(records[1][1..9].try_into().unwrap());
        assert!(wall > 1.7e9 && records[1][0] == 0x09);
        let nan = f32::NAN.to_le_bytes();
        let expected = [
            &[0x10, 0xac, 0x02][..], // step 300
            &[0x2a, 22],             // summary
            &[0x0a, 10, 0x0a, 3],    // value, tag
            b"a/b",
            &[0x15, 0, 0, 0xc0, 0x3f], // 1.5
            &[0x0a, 8, 0x0a, 1, b'c', 0x15],
            &nan,
        ]
        .concat();
        assert_eq!(records[1][9..], expected);
    }

    #[test]
    fn a_resumed_run_starts_a_session_at_its_step() {
        let dir = tempfile::tempdir().unwrap();
        TensorBoard::create(dir.path(), Some(5)).unwrap();
        let records = read(dir.path());
        assert_eq!(records.len(), 2);
        assert_eq!(records[1][9..], [0x10, 5, 0x3a, 2, 0x08, 1]);
        // A second writer does not write into the first one's file.
        TensorBoard::create(dir.path(), Some(6)).unwrap();
        assert_eq!(
            std::fs::read_dir(dir.path().join(DIR_NAME))
                .unwrap()
                .count(),
            2
        );
    }
}
