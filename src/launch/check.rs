//! Every rank calls every other, before a trainer depends on it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use super::Meeting;
use super::frame::Timed;
use crate::{Error, Result};

/// Connects to every other rank and takes a connection from each; both ends show token and rank.
///
/// # Errors
/// [`Error::Peer`] naming the ranks that cannot be reached, or do not reach this one, within
/// `timeout`.
pub fn reach_all(meeting: &Meeting, timeout: Duration) -> Result<()> {
    let rank = meeting.topology.rank;
    let others: Vec<usize> = (0..meeting.addrs.len()).filter(|r| *r != rank).collect();
    let deadline = Instant::now() + timeout;
    thread::scope(|scope| {
        let calls: Vec<_> = others
            .iter()
            .map(|&to| scope.spawn(move || call(meeting, to, deadline)))
            .collect();
        let heard = answer(meeting, deadline);
        for (to, call) in others.iter().zip(calls) {
            let called = call
                .join()
                .unwrap_or_else(|_| Err(std::io::Error::other("a panic")));
            called.map_err(|e| {
                Error::Peer(format!(
                    "rank {rank} does not reach rank {to} at {}: {e}",
                    meeting.addrs[*to]
                ))
            })?;
        }
        let silent: Vec<_> = others.iter().filter(|r| !heard[**r]).collect();
        if silent.is_empty() {
            return Ok(());
        }
        Err(Error::Peer(format!(
            "ranks {silent:?} do not reach rank {rank} at {} within {} s: does a firewall stand between?",
            meeting.addrs[rank],
            timeout.as_secs()
        )))
    })
}

/// What a rank shows: the token and its number.
fn card(meeting: &Meeting, rank: usize) -> [u8; 40] {
    let mut card = [0; 40];
    card[..32].copy_from_slice(&meeting.token.0);
    card[32..].copy_from_slice(&(rank as u64).to_le_bytes());
    card
}

fn call(meeting: &Meeting, to: usize, deadline: Instant) -> std::io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let addr = &meeting.addrs[to];
    let mut stream = TcpStream::connect_timeout(addr, left.max(Duration::from_millis(1)))?;
    stream.write_all(&card(meeting, meeting.topology.rank))?;
    let mut shown = [0; 40];
    let stream = &mut stream;
    Timed { stream, deadline }.read_exact(&mut shown)?;
    if shown != card(meeting, to) {
        return Err(std::io::Error::other("somebody else answers there"));
    }
    Ok(())
}

/// Answers every other rank; who has called.
fn answer(meeting: &Meeting, deadline: Instant) -> Vec<bool> {
    let mut heard = vec![false; meeting.addrs.len()];
    heard[meeting.topology.rank] = true;
    let listener = &meeting.listener;
    if listener.set_nonblocking(true).is_err() {
        return heard;
    }
    while heard.contains(&false) && Instant::now() < deadline {
        let Ok((mut stream, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(5));
            continue;
        };
        let mut shown = [0; 40];
        // Strangers get a second, so that one does not hold up the ranks behind it for long.
        let patience = deadline.min(Instant::now() + Duration::from_secs(1));
        let read = stream.set_nonblocking(false).and_then(|()| {
            let stream = &mut stream;
            Timed {
                stream,
                deadline: patience,
            }
            .read_exact(&mut shown)
        });
        let from = (0..heard.len()).find(|rank| card(meeting, *rank) == shown);
        if let (Ok(()), Some(from)) = (read, from) {
            heard[from] |= stream
                .write_all(&card(meeting, meeting.topology.rank))
                .is_ok();
        }
    }
    heard
}
