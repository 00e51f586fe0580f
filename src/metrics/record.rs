//! What is logged.
//!
//! A record's `step` is the index of the step it belongs to, from 0: an evaluation after the first
//! hundred steps carries step 99. So a checkpoint of k steps and the records of steps below k tell
//! the same story.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::comm::Traffic;
use crate::zero::Memory;

/// One training step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainRecord {
    /// Index of the step, from 0.
    pub step: u64,
    /// Tokens trained on so far, this step included.
    pub tokens: u64,
    /// Mean loss over the tokens of the global batch.
    pub loss: f32,
    /// Learning rate of the step.
    pub lr: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// Wall time of the step.
    pub step_ms: f64,
    /// Tokens of the global batch a second.
    pub tokens_per_s: f64,
    /// Model FLOPs a second and rank, in 10^12.
    pub tflops: f64,
    /// Share of the device's peak; null when the peak is unknown.
    pub mfu: Option<f64>,
    /// Name of the formula behind `tflops`.
    pub flops_formula: &'static str,
    /// What crossed between ranks, as rank 0 received it.
    pub comm: Traffic,
    /// Memory of rank 0.
    pub memory: MemoryRecord,
}

/// Memory of a rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MemoryRecord {
    /// Resident memory; null where the system does not tell.
    pub rss_bytes: Option<u64>,
    /// Highest resident memory so far.
    pub peak_rss_bytes: Option<u64>,
    /// What it holds, by kind.
    #[serde(flatten)]
    pub held: Memory,
}

/// One evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalRecord {
    /// Index of the step before the evaluation.
    pub step: u64,
    /// Mean loss over the validation tokens.
    pub val_loss: f32,
}

/// Something that happened: a restart, a fallback, a skipped step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EventRecord {
    /// Index of the step at which it happened.
    pub step: u64,
    /// What happened, one word.
    pub event: String,
    /// Details, beside the others in the object.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

impl EventRecord {
    /// An event with `fields`, an object (anything else becomes the field "detail").
    pub fn new(step: u64, event: impl Into<String>, fields: Value) -> Self {
        let fields = match fields {
            Value::Object(fields) => fields,
            Value::Null => Map::new(),
            other => Map::from_iter([("detail".to_owned(), other)]),
        };
        Self {
            step,
            event: event.into(),
            fields,
        }
    }

    /// The event of values that JSON has no number for, by name; none when all are finite.
    pub fn non_finite(step: u64, values: &[(&str, f32)]) -> Option<Self> {
        let odd = values.iter().filter(|(_, v)| !v.is_finite());
        let fields: Map<String, Value> = odd
            .map(|(name, v)| ((*name).to_owned(), Value::from(v.to_string())))
            .collect();
        (!fields.is_empty()).then(|| Self::new(step, "non_finite", Value::Object(fields)))
    }
}
