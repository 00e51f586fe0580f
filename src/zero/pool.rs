//! Buffers that a step takes and gives back, so that none is allocated twice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Free buffers by length. Clones share them, also with the communication thread.
pub struct Pool<T>(Arc<Mutex<HashMap<usize, Vec<Vec<T>>>>>);

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> Clone for Pool<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// A value that shows up in results when nobody wrote over it.
pub trait Poison: Copy {
    /// The value, under the feature `poison`.
    const POISON: Self;
    /// What a fresh buffer holds otherwise.
    const ZERO: Self;
}

impl Poison for f32 {
    const POISON: Self = f32::NAN;
    const ZERO: Self = 0.0;
}

impl Poison for u8 {
    const POISON: Self = 0xff;
    const ZERO: Self = 0;
}

impl<T: Poison> Pool<T> {
    /// A buffer of `len` values, whatever they are: NaN under the feature `poison`.
    pub fn take(&self, len: usize) -> Vec<T> {
        let mut free = self.0.lock().expect("no holder panicked");
        let found = free.get_mut(&len).and_then(Vec::pop);
        let mut buffer = found.unwrap_or_else(|| vec![T::ZERO; len]);
        if cfg!(any(feature = "poison", test)) {
            buffer.fill(T::POISON);
        }
        buffer
    }

    /// Takes a buffer back.
    pub fn give(&self, buffer: Vec<T>) {
        let mut free = self.0.lock().expect("no holder panicked");
        free.entry(buffer.len()).or_default().push(buffer);
    }
}

/// The free buffers of an engine.
#[derive(Clone, Default)]
pub struct Pools {
    /// Weights and gradients, of units and shards.
    pub values: Pool<f32>,
    /// What codecs make of them.
    pub bytes: Pool<u8>,
}
