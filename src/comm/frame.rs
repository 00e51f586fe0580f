//! Messages on the control connections: u8 kind, u32 length (little-endian), that many bytes.

/// The longest content: reasons are cut to it, and longer frames are refused unread.
pub(super) const MAX_CONTENT: usize = 16 << 10;

const PREFIX: usize = 5;

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// The sender ends in an orderly way and takes part in nothing more.
    Goodbye,
    /// The job has failed; why.
    Abort(String),
    /// The sender waits for these ranks, or no longer for any.
    Waits(Vec<u32>),
    /// Local rank 0 made shared memory: the file to open, or why it could not.
    ShmOffer(Result<String, String>),
    /// The answer: mapped, or why not.
    ShmAnswer(Result<(), String>),
    /// What the node does: shared memory, or why not.
    ShmDecision(Result<(), String>),
}

impl Frame {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, text) = match self {
            Frame::Waits(waits_for) => {
                let ranks: Vec<u8> = waits_for.iter().flat_map(|r| r.to_le_bytes()).collect();
                return frame(9, &ranks[..ranks.len().min(MAX_CONTENT)]);
            }
            Frame::Goodbye => (1, ""),
            Frame::Abort(cause) => (2, cause.as_str()),
            Frame::ShmOffer(Ok(name)) => (3, name.as_str()),
            Frame::ShmOffer(Err(why)) => (4, why.as_str()),
            Frame::ShmAnswer(Ok(())) => (5, ""),
            Frame::ShmAnswer(Err(why)) => (6, why.as_str()),
            Frame::ShmDecision(Ok(())) => (7, ""),
            Frame::ShmDecision(Err(why)) => (8, why.as_str()),
        };
        frame(
            kind,
            &text.as_bytes()[..text.floor_char_boundary(MAX_CONTENT)],
        )
    }

    /// The frame at the start of `bytes` and its length; `Ok(None)` when more bytes are needed.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<(Frame, usize)>, String> {
        let Some((&[kind, l0, l1, l2, l3], rest)) = bytes.split_first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if !(1..=9).contains(&kind) {
            return Err(format!("a control frame of unknown kind {kind}"));
        }
        if len > MAX_CONTENT {
            return Err(format!("a control frame of {len} bytes"));
        }
        let Some(content) = rest.get(..len) else {
            return Ok(None);
        };
        if kind == 9 {
            let (ranks, []) = content.as_chunks() else {
                return Err(format!("a control frame of {len} bytes of ranks"));
            };
            let ranks = ranks.iter().map(|r| u32::from_le_bytes(*r)).collect();
            return Ok(Some((Frame::Waits(ranks), PREFIX + len)));
        }
        let text = std::str::from_utf8(content)
            .map_err(|_| "a control frame that is not UTF-8".to_owned())?
            .to_owned();
        if matches!(kind, 1 | 5 | 7) && len > 0 {
            return Err(format!("a control frame of kind {kind} with content"));
        }
        let frame = match kind {
            1 => Frame::Goodbye,
            2 => Frame::Abort(text),
            3 => Frame::ShmOffer(Ok(text)),
            4 => Frame::ShmOffer(Err(text)),
            5 => Frame::ShmAnswer(Ok(())),
            6 => Frame::ShmAnswer(Err(text)),
            7 => Frame::ShmDecision(Ok(())),
            _ => Frame::ShmDecision(Err(text)),
        };
        Ok(Some((frame, PREFIX + len)))
    }
}

fn frame(kind: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind];
    bytes.extend((content.len() as u32).to_le_bytes());
    bytes.extend(content);
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_survive_and_wait_for_their_last_byte() {
        for frame in [
            Frame::Goodbye,
            Frame::Abort("rank 3 stopped: ünrühig".into()),
            Frame::Waits(vec![3, 70_000]),
            Frame::ShmOffer(Ok("name".into())),
            Frame::ShmAnswer(Err("no".into())),
            Frame::ShmDecision(Ok(())),
        ] {
            let bytes = frame.encode();
            for end in 0..bytes.len() {
                assert_eq!(Frame::decode(&bytes[..end]), Ok(None));
            }
            let len = bytes.len();
            assert_eq!(Frame::decode(&bytes), Ok(Some((frame, len))));
        }
        let long = Frame::Abort("ü".repeat(MAX_CONTENT)).encode();
        assert!(Frame::decode(&long).unwrap().is_some());
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(mut bytes: Vec<u8>, kind in 0u8..12, len in 0u32..40) {
            let check = |bytes: &[u8]| {
                if let Ok(Some((frame, len))) = Frame::decode(bytes) {
                    assert_eq!(frame.encode(), bytes[..len]);
                }
            };
            check(&bytes);
            bytes.splice(..0, [kind].into_iter().chain(len.to_le_bytes()));
            check(&bytes);
        }
    }
}
