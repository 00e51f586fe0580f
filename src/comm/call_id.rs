//! What a rank called, as the others see it: the header in front of each collective's data.

use std::fmt;

use super::ReduceOp;
use super::health::Outcome;

/// Bytes of an encoded [`Header`].
pub(super) const HEADER_BYTES: usize = 32;

/// Whose collective it is, as the caller knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Scope {
    World = 1,
    Local = 2,
    Cross = 3,
}

/// The collective that the caller called; the steps it is made of carry the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Op {
    AllGather = 1,
    ReduceScatter = 2,
    AllReduce = 3,
    AllToAll = 4,
    Broadcast = 5,
    Barrier = 6,
}

/// Everything about a call that must be the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallId {
    pub(super) scope: Scope,
    pub(super) op: Op,
    /// Root of a broadcast, operation of an all-reduce; else 0.
    pub(super) param: u32,
    /// Bytes of a piece, or in all for an all-reduce and a broadcast; 0 for an all-to-all.
    pub(super) bytes: u64,
}

impl CallId {
    pub(super) fn new(scope: Scope, op: Op, bytes: usize) -> Self {
        Self {
            scope,
            op,
            param: 0,
            bytes: bytes as u64,
        }
    }

    pub(super) fn all_reduce(scope: Scope, bytes: usize, op: ReduceOp) -> Self {
        Self {
            param: op as u32,
            ..Self::new(scope, Op::AllReduce, bytes)
        }
    }

    pub(super) fn broadcast(scope: Scope, bytes: usize, root: usize) -> Self {
        Self {
            param: root as u32,
            ..Self::new(scope, Op::Broadcast, bytes)
        }
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let bytes = self.bytes;
        match self.op {
            Op::AllGather => write!(f, "all_gather of {bytes} bytes a rank")?,
            Op::ReduceScatter => write!(f, "reduce_scatter of {bytes} bytes a rank")?,
            Op::AllReduce if self.param == ReduceOp::Max as u32 => {
                write!(f, "all_reduce (max) of {bytes} bytes")?
            }
            Op::AllReduce => write!(f, "all_reduce (sum) of {bytes} bytes")?,
            Op::AllToAll => write!(f, "all_to_all")?,
            Op::Broadcast => write!(f, "broadcast of {bytes} bytes from {}", self.param)?,
            Op::Barrier => write!(f, "barrier")?,
        }
        f.write_str(match self.scope {
            Scope::World => "",
            Scope::Local => " in the node",
            Scope::Cross => " across nodes",
        })
    }
}

/// A call's place in the group's sequence, its id, and how much follows for the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Number of the step in the group, from 1.
    pub(super) sequence: u64,
    pub(super) id: CallId,
    /// Bytes that follow.
    pub(super) payload: u64,
}

impl Header {
    /// As four words.
    pub(super) fn to_words(self) -> [u64; 4] {
        let CallId {
            scope,
            op,
            param,
            bytes,
        } = self.id;
        let kind = scope as u64 | (op as u64) << 8 | (param as u64) << 32;
        [self.sequence, kind, bytes, self.payload]
    }

    /// None for words that no rank of this version writes.
    pub(super) fn from_words([sequence, kind, bytes, payload]: [u64; 4]) -> Option<Self> {
        let scope = match kind as u8 {
            1 => Scope::World,
            2 => Scope::Local,
            3 => Scope::Cross,
            _ => return None,
        };
        let op = match (kind >> 8) as u8 {
            1 => Op::AllGather,
            2 => Op::ReduceScatter,
            3 => Op::AllReduce,
            4 => Op::AllToAll,
            5 => Op::Broadcast,
            6 => Op::Barrier,
            _ => return None,
        };
        if (kind >> 16) as u16 != 0 {
            return None;
        }
        let id = CallId {
            scope,
            op,
            param: (kind >> 32) as u32,
            bytes,
        };
        Some(Self {
            sequence,
            id,
            payload,
        })
    }

    /// Little-endian words.
    pub(super) fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(self.to_words()) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// None for bytes that no rank of this version writes.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let mut words = [0; 4];
        for (word, place) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*place);
        }
        Self::from_words(words)
    }

    /// Whether `theirs`, from world rank `peer`, is what `self` on world rank `me` goes with.
    pub(super) fn check(&self, me: usize, theirs: Option<Header>, peer: usize) -> Outcome {
        let Some(theirs) = theirs else {
            return Err(format!("rank {peer} sent bytes that are no header"));
        };
        if theirs.id != self.id {
            return Err(format!(
                "ranks called different collectives: rank {me} {} (step {}), rank {peer} {} (step {})",
                self.id, self.sequence, theirs.id, theirs.sequence
            ));
        }
        if theirs.sequence != self.sequence {
            return Err(format!(
                "rank {me} is at step {} of its group and rank {peer} at step {}, both in {}",
                self.sequence, theirs.sequence, self.id
            ));
        }
        if theirs.payload != self.payload {
            return Err(format!(
                "in {}, rank {me} expects {} bytes from rank {peer}, which sends {}",
                self.id, self.payload, theirs.payload
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn whatever_decodes_encodes_to_the_same_bytes(bytes: [u8; HEADER_BYTES], op in 0u8..9, scope in 0u8..5) {
            let mut likely = bytes;
            likely[8..12].copy_from_slice(&[scope, op, 0, 0]);
            for bytes in [bytes, likely] {
                if let Some(header) = Header::decode(&bytes) {
                    prop_assert_eq!(header.encode(), bytes);
                    prop_assert!(!header.id.to_string().is_empty());
                }
            }
        }
    }

    #[test]
    fn a_mismatch_names_both_calls_and_both_ranks() {
        let call = |op, bytes| Header {
            sequence: 3,
            id: CallId::new(Scope::World, op, bytes),
            payload: 8,
        };
        let mine = call(Op::AllGather, 8);
        assert!(mine.check(0, Some(mine), 5).is_ok());
        let text = mine.check(0, Some(call(Op::Barrier, 0)), 5).unwrap_err();
        for part in ["rank 0 all_gather of 8 bytes", "rank 5 barrier"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(mine.check(0, None, 5).unwrap_err().contains("rank 5"));
    }
}
