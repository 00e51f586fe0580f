//! What the training step promises about numbers, through the whole model.

use std::iter::once;

use train::comm::Comm;
use train::model::{Gpt, ModelConfig};
use train::ops::Param;
use train::optim::{OptimizerConfig, StateKind, StateSlice};
use train::rng::{self, Purpose};
use train::zero::{Engine, EngineOptions, MicroBatch, StepOutcome};

const SEQ_LEN: usize = 16;
const BATCH: usize = 4;
const VOCAB: usize = 53;
const NUM_TOKENS: usize = BATCH * SEQ_LEN;

fn model_config() -> ModelConfig {
    ModelConfig {
        num_layers: 2,
        num_heads: 2,
        d_model: 32,
        seq_len: SEQ_LEN,
        stable_embedding: false,
        ..ModelConfig::default()
    }
}

/// Every combination of stable and tied embeddings and biases.
fn variants() -> Vec<ModelConfig> {
    let variant = |bits: usize| ModelConfig {
        stable_embedding: bits & 1 != 0,
        tie_embeddings: Some(bits & 2 != 0),
        bias: bits & 4 != 0,
        ..model_config()
    };
    (0..8).map(variant).collect()
}

#[derive(Clone, Copy)]
struct Options {
    grad_clip: f32,
    recompute_blocks: bool,
    state: StateKind,
}

const PLAIN: Options = Options {
    grad_clip: 0.0,
    recompute_blocks: false,
    state: StateKind::F32,
};

fn engine(config: &ModelConfig, options: Options) -> Engine {
    let model = Gpt::new(config, VOCAB);
    let optimizer = OptimizerConfig {
        state: options.state,
        ..OptimizerConfig::default()
    };
    let engine_options = EngineOptions {
        seed: 7,
        grad_clip: options.grad_clip,
        recompute_blocks: options.recompute_blocks,
        min_8bit_size: 4096,
        ..EngineOptions::default()
    };
    Engine::new(
        model,
        &optimizer,
        Comm::solo().into(),
        engine_options,
        |unit| Ok(unit.buffer().initialize(7)?),
    )
    .unwrap()
}

/// The global batch of `step` in microbatches of `sequences_each`.
fn micro_batches(step: u64, sequences_each: usize) -> impl Iterator<Item = MicroBatch> {
    let token = move |at: usize| {
        let bits = rng::hash(5, Purpose::Sample, step << 32 | at as u64);
        (bits % VOCAB as u64) as u32
    };
    let rows = move |first: usize, shift: usize| {
        let sequences = first..first + sequences_each;
        sequences
            .flat_map(|b| (0..SEQ_LEN).map(move |s| b * (SEQ_LEN + 1) + s))
            .map(|at| token(at + shift))
            .collect()
    };
    let firsts = (0..BATCH).step_by(sequences_each);
    firsts.map(move |first| MicroBatch {
        first_sequence: first as u64,
        inputs: rows(first, 0),
        targets: rows(first, 1),
    })
}

fn train_step(engine: &mut Engine, step: u64, lr: f32, sequences_each: usize) -> StepOutcome {
    let batches = micro_batches(step, sequences_each);
    engine.train_step(step, lr, NUM_TOKENS, batches).unwrap()
}

/// Mean loss of the batch of step 0 without dropout.
fn loss(engine: &Engine) -> f64 {
    let batches = micro_batches(0, BATCH).map(|b| (b.inputs, b.targets));
    engine.evaluate(batches, || false).unwrap().unwrap()
}

fn values(param: &Param) -> Vec<f32> {
    param.read(|v| Ok(v.to_vec())).unwrap()
}

fn named(engine: &Engine, name: &str) -> Param {
    let params = engine.model().params();
    let found = params.into_iter().find(|p| p.spec().name == name);
    found.unwrap_or_else(|| panic!("no {name}"))
}

fn norm(values: &[f32]) -> f64 {
    values
        .iter()
        .map(|v| (*v as f64).powi(2))
        .sum::<f64>()
        .sqrt()
}

/// Weights, padding included, and optimizer state, bit for bit.
fn everything(engine: &mut Engine) -> (u64, Vec<Vec<u32>>) {
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
    let mut all = Vec::new();
    for unit in engine.model().units() {
        all.push(unit.buffer().with_weights(|w| Ok(bits(w))).unwrap());
    }
    for state in engine.states() {
        for entry in state.optimizer.state() {
            all.push(match entry.values {
                StateSlice::F32(values) => bits(values),
                StateSlice::U8(codes) => codes.iter().map(|c| *c as u32).collect(),
            });
        }
    }
    (engine.num_updates(), all)
}

#[test]
fn every_parameter_has_a_gradient_at_the_first_step() {
    for config in variants() {
        for recompute_blocks in [false, true] {
            let options = Options {
                recompute_blocks,
                ..PLAIN
            };
            let mut engine = engine(&config, options);
            assert_eq!(train_step(&mut engine, 0, 1e-3, BATCH).non_finite, None);
            for param in engine.model().params() {
                let (spec, grad) = (param.spec(), param.grad().unwrap());
                // Of an untied table only the rows of tokens at hand.
                let is_table = spec.name == "wte.weight" && !config.is_tied();
                for (i, row) in grad.chunks(param.width()).enumerate() {
                    let is_used = !is_table
                        || micro_batches(0, BATCH).any(|b| b.inputs.contains(&(i as u32)));
                    assert_eq!(
                        norm(row) > 0.0,
                        is_used,
                        "{} row {i}: {config:?}",
                        spec.name
                    );
                }
            }
        }
    }
}

#[test]
fn gradients_match_finite_differences_through_the_whole_model() {
    for config in variants() {
        let mut engine = engine(&config, PLAIN);
        // Far from the start, where attention is even and half of the gradients nearly vanish.
        for (number, param) in engine.model().params().iter().enumerate() {
            let scale = if param.spec().shape.len() == 1 {
                1.0
            } else {
                8.0
            };
            let noise = |i: usize| 0.1 * rng::normal(number as u64, Purpose::Init, i as u64);
            let moved = values(param)
                .into_iter()
                .enumerate()
                .map(|(i, w)| scale * w + noise(i));
            param.write(&moved.collect::<Vec<f32>>()).unwrap();
        }
        let before = loss(&engine);
        // Microbatches of one, so that their sum is checked too; lr = 0 moves nothing.
        train_step(&mut engine, 0, 0.0, 1);
        assert_eq!(loss(&engine), before);
        for (number, param) in engine.model().params().iter().enumerate() {
            let (weights, grad) = (values(param), param.grad().unwrap());
            let along = |direction: &[f32]| {
                let length = norm(direction);
                let at = |eps: f64| {
                    let moved: Vec<f32> = (weights.iter().zip(direction))
                        .map(|(w, d)| w + (eps * *d as f64 / length) as f32)
                        .collect();
                    param.write(&moved).unwrap();
                    loss(&engine)
                };
                let eps = 1e-2;
                let measured = (at(eps) - at(-eps)) / (2.0 * eps);
                param.write(&weights).unwrap();
                let dot = |a: &[f32], b: &[f32]| {
                    a.iter()
                        .zip(b)
                        .map(|(a, b)| *a as f64 * *b as f64)
                        .sum::<f64>()
                };
                (measured, dot(&grad, direction) / length)
            };
            let random: Vec<f32> = (0..grad.len() as u64)
                .map(|i| rng::normal(number as u64, Purpose::Init, i))
                .collect();
            // The slack below would pass over a gradient that vanishes.
            assert!(norm(&grad) > 0.01, "{}: {config:?}", param.spec().name);
            for direction in [&grad, &random] {
                let (measured, computed) = along(direction);
                let slack = 0.01 * computed.abs() + 3e-4;
                let name = &param.spec().name;
                assert!(
                    (measured - computed).abs() < slack,
                    "{name}: {measured} against {computed}: {config:?}"
                );
            }
        }
    }
}

#[test]
fn a_tied_table_gets_the_gradients_of_both_its_uses() {
    for stable_embedding in [false, true] {
        let config = |tied: bool| ModelConfig {
            stable_embedding,
            tie_embeddings: Some(tied),
            ..model_config()
        };
        let (mut tied, mut untied) = (engine(&config(true), PLAIN), engine(&config(false), PLAIN));
        for param in untied.model().params() {
            let name = match param.spec().name.as_str() {
                "lm_head.weight" => "wte.weight",
                name => name,
            };
            param.write(&values(&named(&tied, name))).unwrap();
        }
        let losses = [&mut tied, &mut untied].map(|e| train_step(e, 0, 0.0, 2).loss);
        assert_eq!(losses[0], losses[1]);
        let sum = named(&tied, "wte.weight").grad().unwrap();
        let embedding = named(&untied, "wte.weight").grad().unwrap();
        let head = named(&untied, "lm_head.weight").grad().unwrap();
        assert!(norm(&embedding) > 0.01 && norm(&head) > 0.01);
        for ((sum, a), b) in sum.iter().zip(&embedding).zip(&head) {
            assert!((sum - (a + b)).abs() < 1e-6, "{sum} against {a} + {b}");
        }
    }
}

#[test]
fn dropout_does_not_depend_on_the_microbatch() {
    let config = ModelConfig {
        dropout: 0.2,
        ..model_config()
    };
    let run = |sequences_each: usize, recompute_blocks: bool| {
        let options = Options {
            recompute_blocks,
            ..PLAIN
        };
        let mut engine = engine(&config, options);
        let outcomes: Vec<StepOutcome> = (0..6)
            .map(|step| train_step(&mut engine, step, 1e-3, sequences_each))
            .collect();
        let grads = named(&engine, "h.0.mlp.c_fc.weight").grad().unwrap();
        (outcomes, grads)
    };
    let (whole, grads) = run(4, false);
    for sequences_each in [1, 2] {
        let (parts, part_grads) = run(sequences_each, false);
        for (step, (a, b)) in whole.iter().zip(&parts).enumerate() {
            let close = |a: f32, b: f32| (a / b - 1.0).abs() < 1e-5;
            assert!(close(a.loss, b.loss), "step {step}: {a:?} against {b:?}");
            assert!(
                (a.grad_norm / b.grad_norm - 1.0).abs() < 1e-4,
                "step {step}: {a:?}, {b:?}"
            );
        }
        // An element dropped in one and not in the other would differ by its whole size.
        let difference: Vec<f32> = grads.iter().zip(&part_grads).map(|(a, b)| a - b).collect();
        assert!(norm(&difference) < 1e-3 * norm(&grads));
    }
    assert_eq!(run(4, true), (whole.clone(), grads));
    let mut without = engine(&model_config(), PLAIN);
    let first = train_step(&mut without, 0, 1e-3, 4);
    assert!(
        (first.loss - whole[0].loss).abs() > 1e-4,
        "nothing was dropped"
    );
}

#[test]
fn every_step_and_sequence_has_its_own_dropout() {
    let config = ModelConfig {
        dropout: 0.2,
        ..model_config()
    };
    let mut engine = engine(&config, PLAIN);
    let batch = micro_batches(0, 1).next().unwrap();
    let mut loss = |step: u64, first_sequence: u64| {
        let batch = MicroBatch {
            first_sequence,
            ..batch.clone()
        };
        engine
            .train_step(step, 0.0, SEQ_LEN, once(batch))
            .unwrap()
            .loss
            .to_bits()
    };
    let mut losses: Vec<u32> = (0..16).map(|i| loss(i / 4, i % 4)).collect();
    assert_eq!(loss(2, 1), losses[9], "the same place has the same mask");
    losses.sort();
    losses.dedup();
    assert_eq!(losses.len(), 16);
}

#[test]
fn evaluation_changes_nothing() {
    let config = ModelConfig {
        dropout: 0.1,
        ..model_config()
    };
    let (mut one, mut other) = (engine(&config, PLAIN), engine(&config, PLAIN));
    for step in 0..4 {
        let evaluated = loss(&one);
        let before = everything(&mut one);
        assert_eq!(loss(&one), evaluated, "no dropout, no state");
        assert_eq!(everything(&mut one), before);
        assert_eq!(
            train_step(&mut one, step, 1e-2, 2),
            train_step(&mut other, step, 1e-2, 2)
        );
    }
    assert!(everything(&mut one) == everything(&mut other));
    let without = engine(&model_config(), PLAIN);
    for (a, b) in without.model().params().iter().zip(one.model().params()) {
        a.write(&values(&b)).unwrap();
    }
    assert_eq!(loss(&one), loss(&without));
}

/// The last batch of a validation split is smaller: its tokens count as much as the others'.
#[test]
fn evaluation_is_the_mean_over_tokens_and_not_over_batches() {
    let engine = engine(&model_config(), PLAIN);
    let single: Vec<_> = micro_batches(0, 1).map(|b| (b.inputs, b.targets)).collect();
    let each: Vec<f64> = single
        .iter()
        .map(|b| engine.evaluate(once(b.clone()), || false).unwrap().unwrap())
        .collect();
    let mean = each.iter().sum::<f64>() / each.len() as f64;
    assert!((each[3] - mean).abs() > 1e-4, "all batches are alike");
    let join = |batches: &[(Vec<u32>, Vec<u32>)]| {
        let (inputs, targets): (Vec<_>, Vec<_>) = batches.iter().cloned().unzip();
        (inputs.concat(), targets.concat())
    };
    let uneven = [join(&single[..3]), join(&single[3..])];
    assert!(
        (engine
            .evaluate(uneven.into_iter(), || false)
            .unwrap()
            .unwrap()
            - mean)
            .abs()
            < 1e-6
    );
    assert!(engine.evaluate(std::iter::empty(), || false).is_err());
}

#[test]
fn clipping_uses_one_norm_over_all_parameters() {
    let clip = 0.1;
    let options = Options {
        grad_clip: clip,
        ..PLAIN
    };
    for config in [model_config(), variants()[1].clone()] {
        let mut engine = engine(&config, options);
        let outcome = train_step(&mut engine, 0, 1e-3, 2);
        let params = engine.model().params();
        let grads: Vec<f32> = params.iter().flat_map(|p| p.grad().unwrap()).collect();
        let total = norm(&grads);
        assert!((outcome.grad_norm as f64 / total - 1.0).abs() < 1e-5);
        assert!(total > 2.0 * clip as f64);
        // After the first update the first moment is (1 - beta1) times the clipped gradient.
        let scale = 0.1 * clip as f64 / total;
        let grad_of = |name: &str| {
            let param = params.iter().find(|p| p.spec().name == name).unwrap();
            norm(&param.grad().unwrap())
        };
        let mut num_checked = 0;
        for state in engine.states() {
            let names: Vec<String> = state
                .optimizer
                .segments()
                .iter()
                .map(|s| s.name.clone())
                .collect();
            for entry in state.optimizer.state() {
                if let (StateSlice::F32(moment), "exp_avg") = (&entry.values, entry.name) {
                    let expected = scale * grad_of(&names[entry.segment]);
                    assert!((norm(moment) / expected - 1.0).abs() < 1e-3);
                    num_checked += 1;
                }
            }
        }
        assert_eq!(num_checked, params.len());
    }
}

#[test]
fn small_gradients_are_not_scaled_up_to_the_clip() {
    let run = |grad_clip: f32| {
        let mut engine = engine(&model_config(), Options { grad_clip, ..PLAIN });
        let norm = train_step(&mut engine, 0, 1e-3, BATCH).grad_norm;
        (norm, everything(&mut engine))
    };
    let (norm, free) = run(0.0);
    assert!(run(norm * 1.01).1 == free);
    assert!(run(norm * 0.5).1 != free);
}

/// Fast maxima and exponentials like to lose a NaN on the way.
#[test]
fn no_poisoned_weight_passes_unnoticed_or_is_applied() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for config in [variants()[7].clone(), variants()[4].clone()] {
            let names: Vec<String> = {
                let model = Gpt::new(&config, VOCAB);
                model
                    .params()
                    .iter()
                    .map(|p| p.spec().name.clone())
                    .collect()
            };
            for name in names {
                let mut engine = engine(&config, PLAIN);
                train_step(&mut engine, 0, 1e-3, BATCH);
                let param = named(&engine, &name);
                let mut weights = values(&param);
                // In the row of a token at hand; elsewhere anywhere.
                let token = micro_batches(1, BATCH).next().unwrap().inputs[3] as usize;
                let at = if name == "wte.weight" {
                    token * 32
                } else {
                    weights.len() / 3
                };
                weights[at] = value;
                param.write(&weights).unwrap();
                let before = everything(&mut engine);
                let outcome = train_step(&mut engine, 1, 1e-3, BATCH);
                assert_eq!(
                    outcome.non_finite.as_deref(),
                    Some(name.as_str()),
                    "{value}"
                );
                assert!(
                    everything(&mut engine) == before,
                    "{name} = {value}: the step was applied"
                );
                // Mended, it trains on.
                weights[at] = 0.0;
                param.write(&weights).unwrap();
                assert_eq!(train_step(&mut engine, 2, 1e-3, BATCH).non_finite, None);
                assert_eq!(engine.num_updates(), 2);
            }
        }
    }
}

#[test]
fn an_overflowing_gradient_is_named() {
    let mut engine = engine(&model_config(), PLAIN);
    let before = everything(&mut engine);
    // The gradients are finite, their squares are not.
    let batches = micro_batches(0, BATCH);
    let outcome = engine.train_step(0, 1e-3, 1, batches).unwrap();
    assert_eq!(outcome.non_finite, None, "a factor of 64 is fine");
    let param = named(&engine, "ln_f.weight");
    let large: Vec<f32> = values(&param).iter().map(|w| w * 1e25).collect();
    param.write(&large).unwrap();
    let after_one = everything(&mut engine);
    assert!(before != after_one);
    let outcome = train_step(&mut engine, 1, 1e-3, BATCH);
    assert!(
        outcome.loss.is_finite() && outcome.grad_norm.is_infinite(),
        "{outcome:?}"
    );
    assert_eq!(outcome.non_finite.as_deref(), Some("gradient norm"));
    assert!(everything(&mut engine) == after_one);
}

#[test]
fn a_parameter_that_nobody_wrote_is_an_error() {
    let mut engine = engine(&model_config(), PLAIN);
    let before = everything(&mut engine);
    let error = engine
        .train_step(0, 1e-3, NUM_TOKENS, std::iter::empty())
        .unwrap_err();
    assert!(error.to_string().contains("has no gradient"), "{error}");
    assert!(everything(&mut engine) == before);
}

#[test]
fn a_token_past_the_vocabulary_is_an_error() {
    for is_target in [false, true] {
        let mut engine = engine(&model_config(), PLAIN);
        let mut batch = micro_batches(0, BATCH).next().unwrap();
        let tokens = if is_target {
            &mut batch.targets
        } else {
            &mut batch.inputs
        };
        tokens[7] = VOCAB as u32;
        let error = engine
            .train_step(0, 1e-3, NUM_TOKENS, once(batch))
            .unwrap_err();
        assert!(error.to_string().contains("53"), "{error}");
    }
}

#[test]
fn norms_and_biases_do_not_decay_and_only_the_stable_table_keeps_f32_state() {
    for config in variants() {
        for param in Gpt::new(&config, VOCAB).params() {
            let spec = param.spec();
            let is_vector = spec.shape.len() == 1;
            assert_eq!(spec.decay, !is_vector, "{}", spec.name);
            let is_stable_table = config.stable_embedding && spec.name == "wte.weight";
            assert_eq!(spec.keep_f32_state, is_stable_table, "{}", spec.name);
        }
    }
}

#[test]
fn padding_stays_zero() {
    for state in [StateKind::F32, StateKind::EightBit] {
        let mut engine = engine(&variants()[5], Options { state, ..PLAIN });
        (0..5).for_each(|step| {
            train_step(&mut engine, step, 1e-2, 2);
        });
        let mut num_padding = 0;
        for unit in engine.model().units() {
            let layout = unit.buffer().layout();
            let mut is_padding = vec![true; layout.num_elements];
            for (param, offset) in layout.params.iter().zip(&layout.offsets) {
                is_padding[*offset..offset + param.len()].fill(false);
            }
            let check = |values: &[f32]| {
                let padding = values.iter().zip(&is_padding).filter(|(_, p)| **p);
                assert!(padding.clone().all(|(v, _)| *v == 0.0), "{}", unit.name());
                Ok(padding.count())
            };
            num_padding += unit.buffer().with_weights(check).unwrap();
            unit.buffer().with_grads(check).unwrap();
        }
        assert!(num_padding > 0);
    }
}

#[test]
fn a_model_learns_one_batch_by_heart_with_either_state() {
    for (state, stable_embedding) in [(StateKind::F32, false), (StateKind::EightBit, true)] {
        let config = ModelConfig {
            stable_embedding,
            ..model_config()
        };
        let options = Options {
            grad_clip: 1.0,
            state,
            ..PLAIN
        };
        let mut engine = engine(&config, options);
        let first = train_step(&mut engine, 0, 5e-3, BATCH).loss;
        assert!((first as f64 - (VOCAB as f64).ln()).abs() < 0.3, "{first}");
        (1..150).for_each(|_| {
            train_step(&mut engine, 0, 5e-3, BATCH);
        });
        assert!(loss(&engine) < 0.1, "{state:?}: {}", loss(&engine));
    }
}
