//! Statistics over all gradients: their norm, and which of them is not finite.

use rayon::prelude::*;

use super::states::UnitStates;
use crate::Result;
use crate::comm::{Comm, Purpose};
use crate::ops::ALIGN;

/// The sum of squares of this rank's gradients: per-block partial sums, added in block order in f64.
pub fn sum_of_squares(states: &[UnitStates]) -> Result<f64> {
    let mut sum = 0.0f64;
    for state in states {
        sum += state.with_grads(|grads| {
            let partial = |block: &[f32]| squares_of_block(block) as f64;
            let partials: Vec<f64> = grads
                .par_chunks(ALIGN)
                .with_min_len(16)
                .map(partial)
                .collect();
            partials.iter().sum::<f64>()
        })?;
    }
    Ok(sum)
}

/// Sum of squares over 16 lanes, which the compiler vectorises.
fn squares_of_block(values: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for chunk in values.chunks(16) {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += v * v;
        }
    }
    crate::simd::body::sum_lanes(lanes)
}

/// The first parameter with a value that is not finite, or else with such a gradient, or else what
/// the step made of them. Every rank gives the same answer.
pub fn first_non_finite(states: &[UnitStates], comm: &Comm, loss: f32) -> Result<String> {
    let odd = |values: &[f32]| values.iter().any(|v| !v.is_finite());
    let names: Vec<(usize, &str)> = states
        .iter()
        .enumerate()
        .flat_map(|(unit, state)| {
            let params = &state.unit.buffer().layout().params;
            params.iter().map(move |param| (unit, param.name.as_str()))
        })
        .collect();
    // Counts through all weights, then all gradients.
    let mut found = u64::MAX;
    for (index, (unit, name)) in names.iter().enumerate() {
        let state = &states[*unit];
        for segment in state
            .optimizer
            .segments()
            .iter()
            .filter(|s| s.name == *name)
        {
            let range = segment.range.clone();
            if state.with_master(|weights| odd(&weights[range.clone()]))? {
                found = found.min(index as u64);
            }
            if state.with_grads(|grads| odd(&grads[range.clone()]))? {
                found = found.min((names.len() + index) as u64);
            }
        }
    }
    let all = comm.gather_bytes(Purpose::Scalars, found.to_le_bytes().to_vec())?;
    let first = all
        .as_chunks()
        .0
        .iter()
        .map(|b| u64::from_le_bytes(*b))
        .min();
    let first = first.unwrap_or(u64::MAX) as usize;
    Ok(match first.checked_sub(names.len()) {
        None => names[first].1.into(),
        Some(index) if index < names.len() => format!("gradient of {}", names[index].1),
        Some(_) if loss.is_finite() => "gradient norm".into(),
        Some(_) => "loss".into(),
    })
}
