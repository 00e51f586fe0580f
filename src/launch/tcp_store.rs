//! A client of torch's TCPStore, which torchrun's agent serves at MASTER_ADDR:MASTER_PORT.
//!
//! Tried against torch 2.15. Every request starts with a byte that names it; strings and bytes are a
//! u64 length and the data; numbers are native endian, so both ends have the same byte order.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::frame::Timed;

const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const CHECK: u8 = 5;
const PING: u8 = 13;

/// What a server expects after [`VALIDATE`].
const MAGIC: u32 = 0x3C85_F7CE;

/// Longest value that is ours.
const MAX_VALUE_BYTES: u64 = 4096;

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A connection to a store that has shown that it speaks the protocol.
pub struct TcpStore {
    stream: TcpStream,
}

impl TcpStore {
    /// Connects and pings.
    ///
    /// # Errors
    /// The system's, and [`ErrorKind::InvalidData`] when the server answers as no store does.
    pub fn connect(addr: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let mut store = Self { stream };
        let nonce = std::process::id();
        let mut hello = vec![VALIDATE];
        hello.extend(MAGIC.to_ne_bytes());
        hello.push(PING);
        hello.extend(nonce.to_ne_bytes());
        store.stream.write_all(&hello)?;
        let echo = u32::from_ne_bytes(store.reply()?);
        if echo != nonce {
            return Err(invalid(format!("ping {nonce:#x} answered with {echo:#x}")));
        }
        Ok(store)
    }

    /// This machine's address on the way to the store.
    ///
    /// # Errors
    /// The system's.
    pub fn local_ip(&self) -> Result<IpAddr> {
        Ok(self.stream.local_addr()?.ip())
    }

    /// Sets `key`, and makes sure that it arrived: SET has no answer.
    ///
    /// # Errors
    /// The system's, and [`ErrorKind::InvalidData`] when the store does not have the key then.
    pub fn set(&mut self, key: &str, value: &[u8]) -> Result<()> {
        let mut request = vec![SET];
        push(&mut request, key.as_bytes());
        push(&mut request, value);
        self.stream.write_all(&request)?;
        match self.get(key)? {
            Some(stored) if stored == value => Ok(()),
            _ => Err(invalid(format!("{key:?} was set but is not there"))),
        }
    }

    /// The value of `key` if it is there; does not wait.
    ///
    /// # Errors
    /// The system's, and [`ErrorKind::InvalidData`] when the answer is none.
    pub fn get(&mut self, key: &str) -> Result<Option<Vec<u8>>> {
        let mut request = vec![CHECK];
        request.extend(1u64.to_ne_bytes());
        push(&mut request, key.as_bytes());
        self.stream.write_all(&request)?;
        match self.reply::<1>()? {
            [0] => {}
            [1] => return Ok(None),
            [other] => {
                return Err(invalid(format!(
                    "check answered with {other}, expected 0 or 1"
                )));
            }
        }
        let mut request = vec![GET];
        push(&mut request, key.as_bytes());
        self.stream.write_all(&request)?;
        let mut timed = self.timed();
        read_bytes(&mut timed).map(Some)
    }

    fn timed(&mut self) -> Timed<'_> {
        Timed {
            stream: &mut self.stream,
            deadline: Instant::now() + TIMEOUT,
        }
    }

    fn reply<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.timed().read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// Reads a length and that many bytes.
fn read_bytes(from: &mut impl Read) -> Result<Vec<u8>> {
    let mut len = [0; 8];
    from.read_exact(&mut len)?;
    let len = u64::from_ne_bytes(len);
    if len > MAX_VALUE_BYTES {
        return Err(invalid(format!(
            "a value of {len} bytes, expected at most {MAX_VALUE_BYTES}"
        )));
    }
    let mut bytes = vec![0; len as usize];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn push(request: &mut Vec<u8>, bytes: &[u8]) {
    request.extend((bytes.len() as u64).to_ne_bytes());
    request.extend(bytes);
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    /// A server that sends `answer` whatever it reads, and closes.
    fn server(answer: Vec<u8>, echo_ping: bool) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut hello = [0; 10];
            stream.read_exact(&mut hello).unwrap();
            assert_eq!((hello[0], hello[5]), (VALIDATE, PING));
            if echo_ping {
                stream.write_all(&hello[6..]).unwrap();
            }
            // The client may be gone after a wrong answer.
            let _ = stream.write_all(&answer);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        addr
    }

    fn value(bytes: &[u8]) -> Vec<u8> {
        let mut answer = vec![0];
        push(&mut answer, bytes);
        answer
    }

    #[test]
    fn answers_are_read() {
        let mut store = TcpStore::connect(server(value(b"10.0.0.1:7"), true)).unwrap();
        assert_eq!(store.get("k").unwrap().unwrap(), b"10.0.0.1:7");
        let mut store = TcpStore::connect(server(vec![1], true)).unwrap();
        assert_eq!(store.get("k").unwrap(), None);
        let mut store = TcpStore::connect(server(value(b"v"), true)).unwrap();
        store.set("k", b"v").unwrap();
    }

    #[test]
    fn wrong_answers_say_what_they_are() {
        let connect = |answer: &[u8]| TcpStore::connect(server(answer.into(), false)).map(drop);
        assert_eq!(connect(b"").unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let error = connect(b"HTTP/1.1 400").unwrap_err().to_string();
        assert!(error.contains("answered with"), "{error}");
        let get = |answer: &[u8]| {
            let mut store = TcpStore::connect(server(answer.into(), true)).unwrap();
            store.get("k").unwrap_err().to_string()
        };
        assert!(get(&[7]).contains("check answered with 7"));
        assert!(get(&[0, 255, 255, 255, 255, 255, 255, 255, 255]).contains("a value of"));
        let mut store = TcpStore::connect(server(value(b"other"), true)).unwrap();
        assert!(
            store
                .set("k", b"v")
                .unwrap_err()
                .to_string()
                .contains("is not there")
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn no_answer_panics(answer in prop::collection::vec(any::<u8>(), 0..40), small in any::<bool>()) {
            let mut answer = answer;
            if small && answer.len() > 9 {
                answer[0] = 0;
                let len = (answer[1] % 32) as u64;
                answer[1..9].copy_from_slice(&len.to_ne_bytes());
            }
            let mut store = TcpStore::connect(server(answer, true)).unwrap();
            let _ = store.get("key");
        }
    }
}
