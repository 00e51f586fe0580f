//! What sharding over ranks promises: the same training as one rank (ranks as threads).

use std::sync::Arc;

use proptest::prelude::*;
use train::comm::{Comm, LinkBytes, Purpose, Topology, Traffic, thread_groups};
use train::model::{Gpt, ModelConfig};
use train::optim::{OptimizerConfig, StateKind, StateSlice};
use train::rng::{self, Purpose as Draw};
use train::zero::{
    Engine, EngineOptions, Memory, MicroBatch, Precision, PrecisionConfig, StepOutcome, ZeroConfig,
};

const SEQ_LEN: usize = 16;
const VOCAB: usize = 101;

#[derive(Clone)]
struct Setup {
    model: ModelConfig,
    optimizer: OptimizerConfig,
    zero: ZeroConfig,
    precision: PrecisionConfig,
    /// Sequences of a step, over all ranks.
    global_batch: usize,
    micro_batch: usize,
    steps: u64,
    /// The last rank's part of the weights becomes NaN in the update before this step.
    poison_step: Option<u64>,
    recompute_blocks: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            model: ModelConfig {
                num_layers: 2,
                num_heads: 2,
                d_model: 40,
                seq_len: SEQ_LEN,
                stable_embedding: false,
                ..ModelConfig::default()
            },
            optimizer: OptimizerConfig::default(),
            zero: ZeroConfig::default(),
            precision: PrecisionConfig::default(),
            global_batch: 12,
            micro_batch: 1,
            steps: 20,
            poison_step: None,
            recompute_blocks: false,
        }
    }
}

/// What a rank saw.
#[derive(Debug)]
struct Seen {
    outcomes: Vec<StepOutcome>,
    val_loss: f64,
    traffic: Vec<Traffic>,
    memory: Memory,
    received: LinkBytes,
    booked: LinkBytes,
    /// Master weights of the rank's part of every unit, bit for bit.
    weights: Vec<Vec<u32>>,
    topology: Topology,
}

/// Trains on `nodes` x `local` ranks and returns what each saw.
fn run(setup: &Setup, nodes: usize, local: usize) -> Vec<Seen> {
    let ranks: Vec<_> = thread_groups(nodes, local)
        .into_iter()
        .map(|groups| {
            let setup = setup.clone();
            std::thread::spawn(move || {
                train::runtime::start_workers(1).unwrap();
                let comm = match groups.topology.world() {
                    1 => Comm::solo(),
                    _ => Comm::new(groups).unwrap(),
                };
                rank(&setup, Arc::new(comm))
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// Makes a moment of the last parameter that this rank owns a part of NaN: the next update passes it
/// on to the weight.
fn poison(engine: &mut Engine) {
    let mut states = engine.states().iter_mut().rev();
    let owned = states.find(|state| !state.optimizer.segments().is_empty());
    let mut entries = owned.unwrap().optimizer.state();
    match &mut entries.last_mut().unwrap().values {
        StateSlice::F32(values) => values[0] = f32::NAN,
        StateSlice::U8(_) => panic!("this test keeps f32 state"),
    }
}

fn token(step: u64, at: usize) -> u32 {
    let bits = rng::hash(5, Draw::Sample, step << 32 | at as u64);
    // Uneven, so that there is something to learn.
    (bits % VOCAB as u64).min(bits >> 32 & 63) as u32
}

fn sequences(step: u64, first: usize, count: usize) -> (Vec<u32>, Vec<u32>) {
    let rows = |shift: usize| {
        (first..first + count)
            .flat_map(|b| (0..SEQ_LEN).map(move |s| b * (SEQ_LEN + 1) + s + shift))
            .map(|at| token(step, at))
            .collect()
    };
    (rows(0), rows(1))
}

fn rank(setup: &Setup, comm: Arc<Comm>) -> Seen {
    let place = comm.topology();
    let options = EngineOptions {
        seed: 7,
        grad_clip: 1.0,
        min_8bit_size: 4096,
        zero: setup.zero.clone(),
        precision: setup.precision.clone(),
        recompute_blocks: setup.recompute_blocks,
    };
    let model = Gpt::new(&setup.model, VOCAB);
    let fill = |unit: &Arc<dyn train::model::Unit>| Ok(unit.buffer().initialize(7)?);
    let mut engine = Engine::new(model, &setup.optimizer, comm.clone(), options, fill).unwrap();
    engine.check_agreement().unwrap();
    let mut seen = Seen {
        outcomes: Vec::new(),
        val_loss: 0.0,
        traffic: Vec::new(),
        memory: Memory::default(),
        received: LinkBytes::default(),
        booked: LinkBytes::default(),
        weights: Vec::new(),
        topology: place,
    };
    comm.take_step();
    for step in 0..setup.steps {
        let at_once = setup.micro_batch * place.world();
        let batches = (0..setup.global_batch / at_once).map(|i| {
            let first = i * at_once + place.rank * setup.micro_batch;
            let (inputs, targets) = sequences(step, first, setup.micro_batch);
            MicroBatch {
                first_sequence: first as u64,
                inputs,
                targets,
            }
        });
        let num_tokens = setup.global_batch * SEQ_LEN;
        if setup.poison_step == Some(step + 1) && place.rank + 1 == place.world() {
            poison(&mut engine);
        }
        let outcome = engine.train_step(step, 3e-3, num_tokens, batches).unwrap();
        seen.outcomes.push(outcome);
        seen.traffic.push(comm.take_step());
    }
    // An uneven number of batches a rank.
    let batches = (0..7).map(|i| sequences(99, i * 2, 2));
    let own = batches.skip(place.rank).step_by(place.world());
    if setup.poison_step.is_none() {
        seen.val_loss = engine.evaluate(own, || false).unwrap().unwrap();
        engine.check_agreement().unwrap();
    }
    seen.memory = engine.memory();
    for state in engine.states() {
        let bits = state.with_master(|weights| weights.iter().map(|w| w.to_bits()).collect());
        seen.weights.push(bits.unwrap());
    }
    seen.received = comm.groups().received();
    seen.booked = comm.with_ledger(|ledger| {
        let moved = ledger.run().values().map(|totals| totals.moved);
        moved.fold(LinkBytes::default(), |a, b| a + b)
    });
    seen
}

fn losses(seen: &Seen) -> Vec<f32> {
    seen.outcomes.iter().map(|o| o.loss).collect()
}

/// Largest relative difference of losses and norms.
fn distance(a: &Seen, b: &Seen) -> f64 {
    let relative = |a: f32, b: f32| (a as f64 / b as f64 - 1.0).abs();
    assert_eq!(a.outcomes.len(), b.outcomes.len());
    let all = [a, b].into_iter().flat_map(|seen| &seen.outcomes);
    assert!(
        all.clone()
            .all(|o| o.loss.is_finite() && o.grad_norm.is_finite())
    );
    assert!(a.val_loss.is_finite() && b.val_loss.is_finite());
    let steps = a.outcomes.iter().zip(&b.outcomes);
    let steps =
        steps.map(|(a, b)| relative(a.loss, b.loss).max(relative(a.grad_norm, b.grad_norm) / 10.0));
    steps.fold((a.val_loss / b.val_loss - 1.0).abs(), f64::max)
}

/// I1: stages, layouts and accumulation give one loss curve.
#[test]
fn losses_do_not_depend_on_the_layout() {
    for (tied, stable) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut setup = Setup::default();
        setup.model.tie_embeddings = Some(tied);
        setup.model.stable_embedding = stable;
        let alone = &run(
            &Setup {
                micro_batch: 12,
                ..setup.clone()
            },
            1,
            1,
        )[0];
        let first = alone.outcomes[0].loss;
        assert!(alone.outcomes[19].loss < first - 0.1, "{:?}", losses(alone));
        for (nodes, local) in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (4, 1), (3, 2)] {
            for stage in [0, 3] {
                let mut setup = setup.clone();
                setup.zero.stage = stage;
                let ranks = run(&setup, nodes, local);
                for seen in &ranks {
                    assert_eq!(seen.outcomes, ranks[0].outcomes, "all ranks see one loss");
                    let distance = distance(alone, seen);
                    assert!(
                        distance < 1e-5,
                        "{nodes} x {local} stage {stage}: {distance:e}"
                    );
                }
            }
        }
    }
}

/// I3: how collectives are scheduled changes no bit.
#[test]
fn overlap_prefetch_and_resharding_change_nothing() {
    let mut base = Setup {
        steps: 6,
        ..Setup::default()
    };
    base.model.dropout = 0.1;
    base.model.tie_embeddings = Some(true);
    let expected = run(&base, 2, 2);
    for (overlap, prefetch, reshard, recompute) in [
        (false, 1, true, false),
        (true, 0, true, false),
        (true, 3, true, true),
        (true, 1, false, false),
        (false, 1, false, true),
    ] {
        let mut setup = base.clone();
        setup.zero.overlap = overlap;
        setup.zero.prefetch = prefetch;
        setup.zero.reshard_after_forward = reshard;
        setup.recompute_blocks = recompute;
        for (seen, expected) in run(&setup, 2, 2).iter().zip(&expected) {
            let how = format!("overlap {overlap} prefetch {prefetch} reshard {reshard}");
            assert_eq!(seen.outcomes, expected.outcomes, "{how}");
            assert!(seen.weights == expected.weights, "{how}");
        }
    }
}

/// I6: what is booked is what arrived.
#[test]
fn the_ledger_counts_what_the_transports_count() {
    for (nodes, local) in [(1, 2), (2, 2), (3, 1)] {
        for precision in [Precision::F32, Precision::Bf16] {
            let mut setup = Setup {
                steps: 2,
                ..Setup::default()
            };
            setup.precision.gather = precision;
            setup.precision.reduce = precision;
            for seen in run(&setup, nodes, local) {
                assert_eq!(seen.booked, seen.received, "{}", seen.topology);
                assert_eq!(seen.received.inter_bytes > 0, nodes > 1);
                assert_eq!(seen.received.intra_bytes > 0, local > 1);
            }
        }
    }
}

/// I6: what enters a node in a step, in units of M (N - 1) / N for the blocks, is 3: forward,
/// backward and gradients.
#[test]
fn a_node_receives_three_times_its_share_of_the_blocks() {
    let mut setup = Setup {
        steps: 1,
        global_batch: 4,
        ..Setup::default()
    };
    setup.model.num_layers = 1;
    setup.model.d_model = 128;
    let inter = |setup: &Setup| {
        let ranks = run(setup, 2, 2);
        let node = ranks.iter().filter(|seen| seen.topology.node() == 0);
        let purposes = ["forward_gather", "backward_gather", "gradient_reduce"];
        node.map(|seen| purposes.map(|p| seen.traffic[0].by_purpose[p].inter_bytes))
            .fold([0; 3], |a, b| [a[0] + b[0], a[1] + b[1], a[2] + b[2]])
    };
    let one = inter(&setup);
    setup.model.num_layers = 2;
    let two = inter(&setup);
    // 12 D^2 weights and 13 D biases and norms: whole blocks a rank.
    let bytes = (12 * 128 * 128 + 13 * 128usize).next_multiple_of(4 * 2048) as u64 * 4;
    for (a, b) in one.iter().zip(two) {
        let added = b - a;
        let framing = added - bytes / 2;
        assert!(framing < 1000, "{added} bytes for {bytes} / 2");
    }
}

#[test]
fn model_states_fall_as_one_over_the_ranks() {
    let setup = Setup {
        steps: 1,
        ..Setup::default()
    };
    let alone = run(&setup, 1, 1)[0].memory;
    assert_eq!(alone.peak_gathered_bytes, 0);
    for world in [2, 3, 4, 6] {
        for seen in run(&setup, 1, world) {
            let memory = seen.memory;
            // A block of padding a unit and rank at most.
            let padding = 4 * 2048 * 4;
            for (whole, part) in [
                (alone.master_bytes, memory.master_bytes),
                (alone.gradient_bytes, memory.gradient_bytes),
            ] {
                assert!(
                    part <= whole / world + padding,
                    "{part} of {whole} on {world}"
                );
            }
            let (whole, part) = (alone.optimizer_state_bytes, memory.optimizer_state_bytes);
            assert!(
                part <= whole / world + 2 * padding,
                "{part} of {whole} on {world}"
            );
        }
    }
}

#[test]
fn no_more_than_prefetch_and_two_units_are_gathered() {
    for prefetch in [0, 1, 2] {
        let mut setup = Setup {
            steps: 2,
            ..Setup::default()
        };
        setup.model.num_layers = 6;
        setup.model.tie_embeddings = Some(true);
        setup.zero.prefetch = prefetch;
        // Blocks are the largest units here: 12 x 40^2 weights.
        let block_bytes = 4 * (12 * 40 * 40 + 13 * 40usize + 4 * 2048).next_multiple_of(2 * 2048);
        for seen in run(&setup, 1, 2) {
            let limit = (prefetch + 2) * block_bytes;
            let peak = seen.memory.peak_gathered_bytes;
            assert!(peak > 0 && peak <= limit, "{peak} of {limit}");
        }
    }
}

/// 8-bit state is chosen on whole parameters, so shards train like the whole.
#[test]
fn eight_bit_state_does_not_see_the_shards() {
    let mut setup = Setup {
        micro_batch: 3,
        ..Setup::default()
    };
    setup.optimizer.state = StateKind::EightBit;
    let alone = &run(
        &Setup {
            micro_batch: 12,
            ..setup.clone()
        },
        1,
        1,
    )[0];
    for (nodes, local) in [(1, 2), (2, 2)] {
        let distance = distance(alone, &run(&setup, nodes, local)[0]);
        // One rounding may move a code to its neighbour.
        assert!(distance < 1e-3, "{nodes} x {local}: {distance:e}");
    }
}

#[test]
fn bf16_on_the_wire_stays_near_f32_and_owners_compute_with_it_too() {
    let base = Setup::default();
    let exact = &run(&base, 2, 2)[0];
    for (gather, reduce) in [
        (Precision::Bf16, Precision::F32),
        (Precision::F32, Precision::Bf16),
        (Precision::Bf16, Precision::Bf16),
    ] {
        let mut setup = base.clone();
        setup.precision = PrecisionConfig { gather, reduce };
        let ranks = run(&setup, 2, 2);
        let distance = distance(exact, &ranks[0]);
        assert!(
            distance > 0.0 && distance < 0.02,
            "{gather:?} {reduce:?}: {distance:e}"
        );
        assert!(ranks.iter().all(|seen| seen.outcomes == ranks[0].outcomes));
    }
    // One rank has nobody to send to: precision is inert.
    let mut setup = Setup {
        micro_batch: 12,
        ..base
    };
    let expected = losses(&run(&setup, 1, 1)[0]);
    setup.precision = PrecisionConfig {
        gather: Precision::Bf16,
        reduce: Precision::Bf16,
    };
    assert_eq!(losses(&run(&setup, 1, 1)[0]), expected);
}

/// qwZ: near f32, the same on every rank and for every number of ranks, for a quarter of the bytes.
#[test]
fn quantized_gathers_train_like_f32_for_a_quarter_of_the_bytes() {
    let mut base = Setup {
        global_batch: 12,
        ..Setup::default()
    };
    // Large enough for matrices to be what matters, and 2048-blocks to fit.
    base.model.d_model = 64;
    let exact = run(&base, 2, 2);
    let mut setup = base.clone();
    setup.zero.qwz.enabled = true;
    let ranks = run(&setup, 2, 2);
    let off = distance(&exact[0], &ranks[0]);
    assert!(off > 0.0 && off < 0.02, "{off:e}");
    assert!(ranks.iter().all(|seen| seen.outcomes == ranks[0].outcomes));
    for (nodes, local) in [(1, 2), (3, 1)] {
        let seen = &run(&setup, nodes, local)[0];
        let apart = distance(&ranks[0], seen);
        assert!(apart < 1e-4, "{nodes} x {local}: {apart:e}");
    }
    for purpose in ["forward_gather", "backward_gather"] {
        let bytes = |seen: &Seen| {
            let traffic = seen.traffic[5].by_purpose[purpose];
            (traffic.intra_bytes + traffic.inter_bytes) as f64
        };
        // A byte and a bit for four, less where padding is not sent.
        let share = bytes(&ranks[1]) / bytes(&exact[1]);
        assert!((0.23..0.26).contains(&share), "{purpose}: {share}");
    }
    assert_eq!(ranks[1].booked, ranks[1].received);
}

/// I10: what one rank finds in its part, all ranks name and skip.
#[test]
fn what_is_not_finite_is_named_alike_on_every_rank() {
    let setup = Setup {
        steps: 4,
        poison_step: Some(2),
        ..Setup::default()
    };
    let ranks = run(&setup, 1, 3);
    let last = ranks[2].outcomes[3].non_finite.clone().unwrap();
    assert!(!last.contains(' '), "a weight: {last}");
    for seen in &ranks {
        assert_eq!(seen.outcomes[1].non_finite, None);
        assert_eq!(seen.outcomes[2].non_finite.as_ref(), Some(&last));
        assert_eq!(seen.outcomes[3].non_finite.as_ref(), Some(&last));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// Sizes that nothing divides, on layouts that nothing suggests.
    #[test]
    fn odd_sizes_train_like_one_rank(
        d_half in 3usize..40,
        nodes in 1usize..4,
        local in 1usize..4,
        reshard: bool,
        tied: bool,
    ) {
        let mut setup = Setup { steps: 3, global_batch: nodes * local * 2, ..Setup::default() };
        setup.model.d_model = 2 * d_half;
        setup.model.tie_embeddings = Some(tied);
        setup.zero.reshard_after_forward = reshard;
        let whole = Setup { micro_batch: setup.global_batch, ..setup.clone() };
        let alone = &run(&whole, 1, 1)[0];
        for seen in run(&setup, nodes, local) {
            let distance = distance(alone, &seen);
            prop_assert!(distance < 1e-5, "{} x {}: {:e}", nodes, local, distance);
        }
    }
}

#[test]
fn ranks_with_other_weights_are_named() {
    for stage in [0, 3] {
        let errors = errors_of_another_seed(stage);
        assert_eq!(errors.len(), 3);
        for error in errors {
            assert!(
                error.contains("the first weights of ranks [1] differ"),
                "{error}"
            );
        }
    }
    // The names of purposes are part of the log's format.
    assert_eq!(Purpose::ForwardGather.name(), "forward_gather");
}

/// Rank 1 of 3 starts from another seed.
fn errors_of_another_seed(stage: u8) -> Vec<String> {
    let ranks: Vec<_> = thread_groups(1, 3)
        .into_iter()
        .map(|groups| {
            std::thread::spawn(move || {
                let comm = Arc::new(Comm::new(groups).unwrap());
                let rank = comm.topology().rank as u64;
                let options = EngineOptions {
                    zero: ZeroConfig {
                        stage,
                        ..ZeroConfig::default()
                    },
                    ..EngineOptions::default()
                };
                let model = Gpt::new(&Setup::default().model, VOCAB);
                let optimizer = OptimizerConfig::default();
                let engine = Engine::new(model, &optimizer, comm, options, |unit| {
                    Ok(unit.buffer().initialize(rank % 2)?)
                });
                engine.err().unwrap().to_string()
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}
