//! The trainer against PyTorch: same weights, same batches, 50 AdamW steps.
//!
//! The numbers come from `python scripts/peers/parity.py --out tests/golden`.

use std::path::Path;

use train::checkpoint::Weights;
use train::comm::Comm;
use train::model::{Gpt, ModelConfig};
use train::optim::{OptimizerConfig, StateKind};
use train::zero::{Engine, EngineOptions, MicroBatch};

const SEQ_LEN: usize = 32;
const BATCH: usize = 4;
const VOCAB: usize = 97;

/// The batch of step `t`, as the script makes it.
fn micro_batches(t: u64, sequences_each: usize) -> Vec<MicroBatch> {
    let token = |b: usize, s: usize| {
        let (t, b, s) = (t, b as u64, s as u64);
        ((t * 31 + b * 17 + s * 7 + (s * s) % 11 + t * s) % VOCAB as u64) as u32
    };
    let rows = |from: usize, shift: usize| {
        let sequences = from..from + sequences_each;
        sequences
            .flat_map(move |b| (shift..SEQ_LEN + shift).map(move |s| token(b, s)))
            .collect()
    };
    (0..BATCH)
        .step_by(sequences_each)
        .map(|from| MicroBatch {
            first_sequence: from as u64,
            inputs: rows(from, 0),
            targets: rows(from, 1),
        })
        .collect()
}

fn engine(state: StateKind, recompute_blocks: bool) -> Engine {
    let config = ModelConfig {
        num_layers: 4,
        num_heads: 4,
        d_model: 64,
        seq_len: SEQ_LEN,
        stable_embedding: false,
        ..ModelConfig::default()
    };
    let model = Gpt::new(&config, VOCAB);
    let weights = Weights::open(Path::new("tests/golden/parity_init.safetensors")).unwrap();
    let optimizer = OptimizerConfig {
        state,
        ..OptimizerConfig::default()
    };
    let options = EngineOptions {
        seed: 0,
        grad_clip: 1.0,
        recompute_blocks,
        min_8bit_size: 4096,
        ..EngineOptions::default()
    };
    let fill = |unit: &_| weights.fill(unit);
    Engine::new(model, &optimizer, Comm::solo().into(), options, fill).unwrap()
}

/// Losses and gradient norms of 50 steps.
fn run(mut engine: Engine, sequences_each: usize) -> Vec<(f64, f64)> {
    let step = |t: u64| {
        let batches = micro_batches(t, sequences_each).into_iter();
        let outcome = engine
            .train_step(t, 1e-3, BATCH * SEQ_LEN, batches)
            .unwrap();
        (outcome.loss as f64, outcome.grad_norm as f64)
    };
    (0..50).map(step).collect()
}

fn golden(key: &str) -> Vec<f64> {
    let text = std::fs::read_to_string("tests/golden/parity.json").unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json[key]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_f64().unwrap())
        .collect()
}

#[test]
fn losses_agree_with_pytorch_over_50_steps() {
    let ours = run(engine(StateKind::F32, false), BATCH);
    for (step, (ours, (loss, norm))) in ours
        .iter()
        .zip(golden("losses").iter().zip(golden("grad_norms")))
        .enumerate()
    {
        assert!(
            (ours.0 / loss - 1.0).abs() < 1e-5,
            "step {step}: loss {} against {loss}",
            ours.0
        );
        assert!(
            (ours.1 / norm - 1.0).abs() < 1e-4,
            "step {step}: norm {} against {norm}",
            ours.1
        );
    }
}

#[test]
fn one_by_four_equals_four_by_one() {
    let whole = run(engine(StateKind::F32, false), 4);
    for sequences_each in [1, 2] {
        let parts = run(engine(StateKind::F32, false), sequences_each);
        for (step, (a, b)) in parts.iter().zip(&whole).take(20).enumerate() {
            assert!(
                (a.0 / b.0 - 1.0).abs() < 1e-5,
                "step {step}: {} against {}",
                a.0,
                b.0
            );
        }
    }
}

#[test]
fn recomputing_blocks_changes_no_bit() {
    let kept = run(engine(StateKind::F32, false), BATCH);
    assert_eq!(kept, run(engine(StateKind::F32, true), BATCH));
}

#[test]
fn eight_bit_state_follows_f32() {
    let f32 = run(engine(StateKind::F32, false), BATCH);
    let eight_bit = run(engine(StateKind::EightBit, false), BATCH);
    assert_ne!(f32, eight_bit);
    let last = |losses: &[(f64, f64)]| losses[40..].iter().map(|l| l.0).sum::<f64>() / 10.0;
    let (a, b) = (last(&f32), last(&eight_bit));
    assert!((a - b).abs() < 0.02, "{a} against {b}");
}
