//! Whether all ranks hold the same model: they compare hashes of what they would compute with.

use std::sync::Arc;

use super::gather::{Gather, Request};
use super::states::UnitStates;
use crate::comm::{Comm, Purpose};
use crate::quant::F32;
use crate::{Error, Result};

/// Compares every rank's weights: gathered from their owners, or with whole states its own.
///
/// # Errors
/// [`Error::Peer`] naming the ranks that differ from rank 0.
pub fn check_weights(states: &[UnitStates], comm: &Comm) -> Result<()> {
    if comm.topology().world() == 1 {
        return Ok(());
    }
    let mut gather = Gather::new(Arc::new(F32), 1);
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
        state.unit.buffer().with_weights(|weights| {
            weights.iter().for_each(|w| hash.add(w.to_bits().into()));
            Ok(())
        })?;
        gather.release(state)?;
    }
    same_everywhere(comm, "the weights", &hash.0.to_le_bytes())
}

/// Compares a few bytes that must be the same on every rank.
///
/// # Errors
/// [`Error::Peer`] naming `what` and the ranks that differ from rank 0.
pub fn same_everywhere(comm: &Comm, what: &str, bytes: &[u8]) -> Result<()> {
    let all = comm.gather_bytes(Purpose::Agreement, bytes.to_vec())?;
    let differing: Vec<usize> = all
        .chunks(bytes.len().max(1))
        .enumerate()
        .filter(|(_, other)| *other != &all[..bytes.len()])
        .map(|(rank, _)| rank)
        .collect();
    match differing[..] {
        [] => Ok(()),
        _ => Err(Error::Peer(format!(
            "{what} of ranks {differing:?} differ from rank 0's: every rank needs the same config, \
             data and program"
        ))),
    }
}

/// FNV-1a over words.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn add(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x0100_0000_01b3);
    }
}
