//! Whether all ranks train the same model: they compare hashes.

use super::gather::{Gather, Request};
use super::states::UnitStates;
use crate::comm::{Comm, Purpose};
use crate::{Error, Result};

/// Compares the weights that every rank computes with: gathered from their owners, or with whole
/// states its own.
///
/// # Errors
/// [`Error::Peer`] naming the ranks that differ from rank 0.
pub fn check_weights(states: &[UnitStates], gather: &mut Gather, comm: &Comm) -> Result<()> {
    let is_sharded = states.iter().any(|state| state.master().is_some());
    if is_sharded {
        let purpose = Purpose::Agreement;
        gather.plan((0..states.len()).map(|unit| Request { unit, purpose }));
    }
    let mut hash = Fnv::default();
    for (unit, state) in states.iter().enumerate() {
        if is_sharded {
            gather.acquire(states, comm, unit)?;
        }
        let buffer = state.unit.buffer();
        buffer.with_weights(|weights| {
            hash.add_all(weights);
            Ok(())
        })?;
        gather.release(state)?;
    }
    same_everywhere(comm, "the weights", &hash.value().to_le_bytes())
}

/// Compares a few bytes that must be the same on every rank.
///
/// # Errors
/// [`Error::Peer`] naming `what` and the ranks that differ from rank 0.
pub fn same_everywhere(comm: &Comm, what: &str, bytes: &[u8]) -> Result<()> {
    same_or(comm, what, bytes, Error::Peer)
}

/// As for bytes that must be the same on every rank, but those that differ by a person's mistake,
/// which is an error of another kind.
///
/// # Errors
/// `wrong` naming `what` and the ranks that differ from rank 0; as every collective.
pub fn same_or(comm: &Comm, what: &str, bytes: &[u8], wrong: fn(String) -> Error) -> Result<()> {
    let all = comm.gather_bytes(Purpose::Agreement, bytes.to_vec())?;
    let differing: Vec<usize> = all
        .chunks(bytes.len().max(1))
        .enumerate()
        .filter(|(_, other)| *other != &all[..bytes.len()])
        .map(|(rank, _)| rank)
        .collect();
    match differing[..] {
        [] => Ok(()),
        _ => Err(comm.shared(wrong(format!(
            "{what} of ranks {differing:?} differ from rank 0's: every rank needs the same config, \
             data and program"
        )))),
    }
}

/// FNV-1a over words.
pub struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    /// Adds values, bit for bit.
    pub fn add_all(&mut self, values: &[f32]) {
        for value in values {
            self.0 = (self.0 ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// The hash.
    pub fn value(&self) -> u64 {
        self.0
    }
}
