//! The first bytes on every connection: who calls whom, for which group, of which job.
//!
//! Caller to listener: magic, u32 version, u8 channel, u8 local transport, u16 zero, u32 from,
//! u32 to, 32 bytes token. Back: magic, u32 version, u32 status. Magic and version keep their places
//! in every version. All little-endian, as the data is: the magic of a big-endian machine reads
//! as a stranger's.

use super::LocalTransport;

/// Rises with every change of what crosses a connection.
pub(super) const VERSION: u32 = 2;

const MAGIC: [u8; 8] = *b"\x89trainC\n";

/// Bytes of [`Hello`] up to the version.
pub(super) const OPENING_BYTES: usize = 12;

/// Bytes of [`Hello`].
pub(super) const HELLO_BYTES: usize = 56;

/// Bytes of [`Reply`].
pub(super) const REPLY_BYTES: usize = 16;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    Control = 0,
    Local = 1,
    Cross = 2,
    Direct = 3,
}

impl Channel {
    pub(super) const ALL: [Self; 4] = [Self::Control, Self::Local, Self::Cross, Self::Direct];
}

/// What the caller says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) channel: Channel,
    pub(super) local: LocalTransport,
    /// World ranks.
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) token: [u8; 32],
}

/// What the listener answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Welcome,
    /// The listener's version is another; its number.
    Version(u32),
    /// The token is not this job's.
    Token,
    /// No such connection is expected.
    Place,
    /// `comm.local` differs.
    Options,
}

/// The version of the caller, or None for somebody who is no rank at all.
pub(super) fn opening(bytes: &[u8; OPENING_BYTES]) -> Option<u32> {
    let (magic, version) = bytes.split_first_chunk::<8>()?;
    (*magic == MAGIC).then(|| u32::from_le_bytes(version.try_into().expect("4 bytes")))
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12] = self.channel as u8;
        bytes[13] = self.local as u8;
        bytes[16..20].copy_from_slice(&self.from.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.to.to_le_bytes());
        bytes[24..].copy_from_slice(&self.token);
        bytes
    }

    /// None for bytes that no rank of this version sends.
    pub(super) fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        let (start, rest) = bytes.split_first_chunk::<OPENING_BYTES>()?;
        if opening(start)? != VERSION || rest[2..4] != [0, 0] {
            return None;
        }
        let number = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().expect("4 bytes"));
        Some(Self {
            channel: *Channel::ALL.get(usize::from(rest[0]))?,
            local: *LocalTransport::ALL.get(usize::from(rest[1]))?,
            from: number(4),
            to: number(8),
            token: rest[12..].try_into().expect("32 bytes"),
        })
    }
}

impl Reply {
    pub(super) fn encode(self) -> [u8; REPLY_BYTES] {
        let (version, status) = match self {
            Reply::Welcome => (VERSION, 0u32),
            Reply::Version(version) => (version, 1),
            Reply::Token => (VERSION, 2),
            Reply::Place => (VERSION, 3),
            Reply::Options => (VERSION, 4),
        };
        let mut bytes = [0; REPLY_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        bytes[12..].copy_from_slice(&status.to_le_bytes());
        bytes
    }

    /// None for bytes that no rank sends.
    pub(super) fn decode(bytes: &[u8; REPLY_BYTES]) -> Option<Self> {
        let (start, status) = bytes.split_first_chunk::<OPENING_BYTES>()?;
        let version = opening(start)?;
        match u32::from_le_bytes(status.try_into().expect("4 bytes")) {
            _ if version != VERSION => Some(Reply::Version(version)),
            0 => Some(Reply::Welcome),
            2 => Some(Reply::Token),
            3 => Some(Reply::Place),
            4 => Some(Reply::Options),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_hello_decodes_to_itself_or_is_refused(bytes: Vec<u8>, channel in 0u8..6, local in 0u8..5, version in 0u32..3) {
            let mut hello = [0; HELLO_BYTES];
            let len = bytes.len().min(HELLO_BYTES);
            hello[..len].copy_from_slice(&bytes[..len]);
            let mut likely = hello;
            likely[..8].copy_from_slice(&MAGIC);
            likely[8..12].copy_from_slice(&version.to_le_bytes());
            likely[12..16].copy_from_slice(&[channel, local, 0, 0]);
            for bytes in [hello, likely] {
                if let Some(hello) = Hello::decode(&bytes) {
                    prop_assert_eq!(hello.encode(), bytes);
                }
            }
        }

        #[test]
        fn any_reply_decodes_to_itself_or_is_refused(mut bytes: [u8; REPLY_BYTES], status in 0u32..6, version in 0u32..3) {
            let _ = Reply::decode(&bytes);
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..12].copy_from_slice(&version.to_le_bytes());
            bytes[12..].copy_from_slice(&status.to_le_bytes());
            match Reply::decode(&bytes) {
                Some(Reply::Version(other)) => prop_assert_eq!(other, version),
                Some(reply) => prop_assert_eq!(reply.encode(), bytes),
                None => prop_assert!(version == VERSION && (status == 1 || status > 4)),
            }
        }
    }
}
