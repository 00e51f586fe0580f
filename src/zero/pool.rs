//! Buffers that a step takes and gives back, so that none is allocated twice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Free buffers by length. Clones share them.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<HashMap<usize, Vec<Vec<f32>>>>>);

impl Pool {
    /// A buffer of `len` values, whatever they are.
    pub fn take(&self, len: usize) -> Vec<f32> {
        let mut free = self.0.lock().expect("no holder panicked");
        let found = free.get_mut(&len).and_then(Vec::pop);
        found.unwrap_or_else(|| vec![0.0; len])
    }

    /// Takes a buffer back.
    pub fn give(&self, buffer: Vec<f32>) {
        let mut free = self.0.lock().expect("no holder panicked");
        free.entry(buffer.len()).or_default().push(buffer);
    }
}
