//! Messages between ranks that do not know each other yet: length-checked JSON.
//!
//! A frame is the magic, the length as u32 LE, and that many bytes. Whoever connects may be a port
//! scanner, so a reader bounds length and time.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

const MAGIC: [u8; 4] = *b"TRN1";

/// Largest frame: a table of many thousand ranks.
pub const MAX_BYTES: usize = 4 << 20;

/// How long a write may take: messages fit into the socket's buffer, or the other side reads.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Writes one message.
///
/// # Errors
/// The system's.
pub fn write(stream: &mut TcpStream, message: &impl Serialize) -> Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    stream.write_all(&encode(message)?)
}

fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let body = serde_json::to_vec(message)?;
    if body.len() > MAX_BYTES {
        return Err(invalid(format!("a message of {} bytes", body.len())));
    }
    let mut frame = MAGIC.to_vec();
    frame.extend((body.len() as u32).to_le_bytes());
    frame.extend(body);
    Ok(frame)
}

/// Reads one message of at most `max_bytes` before `deadline`.
///
/// # Errors
/// [`ErrorKind::InvalidData`] when it is not one, [`ErrorKind::TimedOut`], and the system's.
pub fn read<T: DeserializeOwned>(
    stream: &mut TcpStream,
    max_bytes: usize,
    deadline: Instant,
) -> Result<T> {
    decode(&mut Timed { stream, deadline }, max_bytes)
}

fn decode<T: DeserializeOwned>(from: &mut impl Read, max_bytes: usize) -> Result<T> {
    let mut head = [0u8; 8];
    from.read_exact(&mut head)?;
    let (magic, len) = head.split_at(4);
    if magic != MAGIC {
        return Err(invalid(format!(
            "bytes {magic:02x?} instead of {MAGIC:02x?}: not a rank of this program"
        )));
    }
    let len = u32::from_le_bytes([len[0], len[1], len[2], len[3]]) as usize;
    if len > max_bytes {
        return Err(invalid(format!(
            "a message of {len} bytes, expected at most {max_bytes}"
        )));
    }
    let mut body = vec![0; len];
    from.read_exact(&mut body)?;
    serde_json::from_slice(&body)
        .map_err(|e| invalid(format!("a message that does not parse: {e}")))
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

/// Reads with one deadline over all reads, however slowly bytes trickle in.
pub struct Timed<'a> {
    /// What is read.
    pub stream: &'a mut TcpStream,
    /// When reading ends.
    pub deadline: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(ErrorKind::TimedOut, "no answer in time"));
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer).map_err(|e| match e.kind() {
            ErrorKind::WouldBlock => Error::new(ErrorKind::TimedOut, "no answer in time"),
            _ => e,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_message_survives() {
        let frame = encode(&("text", 7u32)).unwrap();
        let (text, number): (String, u32) = decode(&mut &frame[..], 100).unwrap();
        assert_eq!((text.as_str(), number), ("text", 7));
    }

    #[test]
    fn wrong_frames_say_what_they_are() {
        let error = |bytes: &[u8]| decode::<u32>(&mut &*bytes, 100).unwrap_err();
        assert!(error(b"GET / HTTP/1.1").to_string().contains("not a rank"));
        assert!(
            error(b"TRN1\xff\xff\xff\xff")
                .to_string()
                .contains("4294967295 bytes")
        );
        assert!(
            error(b"TRN1\x02\0\0\0{x")
                .to_string()
                .contains("does not parse")
        );
        assert_eq!(error(b"TRN1\x09\0\0\0{").kind(), ErrorKind::UnexpectedEof);
    }

    proptest! {
        #[test]
        fn no_bytes_panic_or_take_memory(bytes in prop::collection::vec(any::<u8>(), 0..64), framed in any::<bool>()) {
            let mut input = Vec::new();
            if framed {
                input.extend(MAGIC);
            }
            input.extend(bytes);
            let _ = decode::<Vec<Option<String>>>(&mut &input[..], 1 << 10);
        }
    }
}
