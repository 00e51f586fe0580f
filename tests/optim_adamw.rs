//! AdamW, f32 and 8-bit: against PyTorch's numbers, against its own twin, and against what went
//! wrong in other 8-bit optimizers.

use std::sync::LazyLock;

use train::comm::Comm;
use train::optim::{
    AdamW, Optimizer, OptimizerConfig, Segment, StateKind, StateSlice, StepInputs, build,
};
use train::simd::Isa;

fn config(state: StateKind, block: usize) -> OptimizerConfig {
    OptimizerConfig {
        state,
        block,
        ..OptimizerConfig::default()
    }
}

fn segment(range: std::ops::Range<usize>, decay: bool, eight_bit: bool) -> Segment {
    Segment {
        name: format!("p{}", range.start),
        offset: 0,
        range,
        decay,
        eight_bit,
    }
}

static COMM: LazyLock<Comm> = LazyLock::new(Comm::solo);

fn inputs(update: u64, lr: f32) -> StepInputs<'static> {
    StepInputs {
        update,
        lr,
        grad_scale: 1.0,
        comm: &COMM,
    }
}

/// Values in -1..1, the same on every run.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    (0..len as u64)
        .map(|i| {
            let h = (i ^ seed << 40)
                .wrapping_add(1)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let h = (h ^ h >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            (h >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        })
        .collect()
}

/// All state as bits, names included.
fn state_bits(optimizer: &mut dyn Optimizer) -> Vec<(usize, &'static str, Vec<u32>)> {
    let bits = |values| match values {
        StateSlice::F32(x) => x.iter().map(|x| x.to_bits()).collect(),
        StateSlice::U8(x) => x.iter().map(|&x| x.into()).collect(),
    };
    let entries = optimizer.state();
    entries
        .into_iter()
        .map(|e| (e.segment, e.name, bits(e.values)))
        .collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn steps_agree_with_pytorch() {
    // The formula of parameters and gradients is in the file's own script, scripts/peers.
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("golden/adamw.json")).unwrap();
    for isa in Isa::supported() {
        let config = OptimizerConfig {
            weight_decay: 0.1,
            ..config(StateKind::F32, 256)
        };
        let mut adamw = AdamW::new(&config, vec![segment(0..64, true, false)], 64).on(isa);
        let mut params: Vec<f32> = (0..64).map(|i| ((i + 1) as f64).sin() as f32).collect();
        for t in 1..=20u64 {
            let grad = |i: usize| match i % 16 {
                5 => 0.0,
                _ => (0.1 * t as f64 * (i + 1) as f64).cos() as f32,
            };
            let grads: Vec<f32> = (0..64).map(grad).collect();
            adamw.step(&inputs(t, 1e-2), &mut params, &grads).unwrap();
            let Some(expected) = golden["params_after_step"][t.to_string()].as_array() else {
                continue;
            };
            assert_eq!(expected.len(), 64);
            for (p, e) in params.iter().zip(expected) {
                let e = e.as_f64().unwrap() as f32;
                assert!((p - e).abs() <= 1e-6, "{isa:?} step {t}: {p} {e}");
            }
        }
    }
}

/// One shard with quantized and plain segments of awkward sizes; every instruction set, thread
/// count and cut into tasks gives the same bits as the readable twin.
#[test]
fn fused_steps_equal_their_twin_bit_for_bit() {
    let (mut segments, mut at) = (Vec::new(), 0usize);
    for (i, len) in [1, 5, 63, 64, 65, 300, 2047, 2048, 2049, 8191, 140_003, 4096]
        .into_iter()
        .enumerate()
    {
        at = at.next_multiple_of(2048);
        segments.push(segment(at..at + len, i % 2 == 0, true));
        at += len;
    }
    for len in [1, 7, 8, 9, 100, 3000, 70_000] {
        segments.push(segment(at..at + len, len % 2 == 0, false));
        at += len;
    }
    let start = noise(at, 1);
    let grads: Vec<Vec<f32>> = (2..6)
        .map(|seed| {
            let (values, sizes) = (noise(at, seed), noise(at, seed + 100));
            let mixed = values.iter().zip(&sizes).enumerate();
            // Nine decades within a block, and exact zeros.
            mixed
                .map(|(i, (v, s))| {
                    if i % 13 == 4 {
                        0.0
                    } else {
                        v * 10f32.powf(4.5 * s - 4.5)
                    }
                })
                .collect()
        })
        .collect();
    for state in [StateKind::F32, StateKind::EightBit] {
        for block in [64, 128, 256, 512, 1024, 2048] {
            let run = |isa, threads| {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .unwrap();
                let mut adamw = AdamW::new(&config(state, block), segments.clone(), at).on(isa);
                let mut params = start.clone();
                for (t, grads) in grads.iter().enumerate() {
                    let inputs = StepInputs {
                        grad_scale: 0.7,
                        ..inputs(t as u64 + 1, 1e-2)
                    };
                    pool.install(|| adamw.step(&inputs, &mut params, grads))
                        .unwrap();
                }
                (bits(&params), state_bits(&mut adamw))
            };
            let twin = run(Isa::Portable, 1);
            for isa in Isa::supported() {
                for threads in [1, 3] {
                    assert!(
                        run(isa, threads) == twin,
                        "{state:?} {block} {isa:?} {threads}"
                    );
                }
            }
            if state == StateKind::F32 {
                break;
            }
        }
    }
}

/// As bitsandbytes tests it: both step from the same parameters, each with its own state.
#[test]
fn eight_bit_follows_f32() {
    let n = 1 << 16;
    for block in [256, 2048] {
        let new = |state| build(&config(state, block), vec![segment(0..n, true, true)], n);
        let (mut exact, mut quantized) = (new(StateKind::F32), new(StateKind::EightBit));
        let mut params = noise(n, 1);
        for t in 1..=50 {
            let grads: Vec<f32> = noise(n, 1 + t).iter().map(|g| g * 0.01).collect();
            let mut exact_params = params.clone();
            exact
                .step(&inputs(t, 1e-3), &mut exact_params, &grads)
                .unwrap();
            quantized
                .step(&inputs(t, 1e-3), &mut params, &grads)
                .unwrap();
            let pairs = exact_params.iter().zip(&params);
            let sum: f64 = pairs.map(|(a, b)| f64::from((a - b).abs())).sum();
            let mean = sum / n as f64;
            // The first update uses moments that were never quantized.
            assert!(
                mean < 6e-5 && (mean > 0.0) == (t > 1),
                "block {block} step {t}: {mean}"
            );
        }
    }
}

/// In others, 0 quantizes to a tiny non-zero and a coordinate without gradient drifts.
#[test]
fn zero_gradient_coordinate_never_moves() {
    for block in [64, 256, 2048] {
        let n = 4096;
        let mut adamw = build(
            &config(StateKind::EightBit, block),
            vec![segment(0..n, false, true)],
            n,
        );
        let start = noise(n, 1);
        let mut params = start.clone();
        for t in 1..=500 {
            let mut grads = noise(n, t);
            grads.iter_mut().step_by(3).for_each(|g| *g = 0.0);
            adamw.step(&inputs(t, 1e-2), &mut params, &grads).unwrap();
        }
        assert!(params.iter().step_by(3).eq(start.iter().step_by(3)));
        assert!(params[1] != start[1]);
    }
}

/// In others, v of a small coordinate underflows to 0 beside a large one while m survives, and the
/// next zero gradient steps by m / eps.
#[test]
fn mixed_scales_in_a_block_keep_updates_bounded() {
    for ratio in [1e-2, 1e-3, 1e-4, 1e-5, 1e-6] {
        for block in [64, 256, 2048] {
            let n = 2048;
            let mut adamw = build(
                &config(StateKind::EightBit, block),
                vec![segment(0..n, false, true)],
                n,
            );
            let mut params = vec![0.0f32; n];
            let lr = 1e-3;
            for t in 1..=40u64 {
                let mut grads = vec![0.0f32; n];
                for (i, g) in grads.iter_mut().enumerate() {
                    // One large coordinate in 64; the others are small, and stop at step 20.
                    *g = match i % 64 {
                        0 => 1.0,
                        _ if t <= 20 => ratio,
                        _ => 0.0,
                    };
                }
                let before = params.clone();
                adamw.step(&inputs(t, lr), &mut params, &grads).unwrap();
                for (i, (a, b)) in before.iter().zip(&params).enumerate() {
                    assert!(
                        (a - b).abs() <= 2.0 * lr,
                        "ratio {ratio} step {t} coordinate {i}: {a} {b}"
                    );
                }
            }
        }
    }
}

#[test]
fn decay_applies_before_the_update_and_only_where_asked() {
    for state in [StateKind::F32, StateKind::EightBit] {
        let segments = vec![
            segment(0..100, true, true),
            segment(2048..2148, false, true),
        ];
        let mut adamw = build(&config(state, 64), segments, 4096);
        let mut params = vec![2.0f32; 4096];
        adamw
            .step(&inputs(1, 0.5), &mut params, &vec![0.0; 4096])
            .unwrap();
        // 1 - 0.5 * 0.1 of 2, no gradient.
        assert!(
            params[..100]
                .iter()
                .all(|&p| p == 2.0 * (1.0 - 0.5 * 0.1f64 as f32))
        );
        assert!(params[100..].iter().all(|&p| p == 2.0));
        // First step from 2 with a gradient: 2 * 0.95 - lr * sign.
        let mut adamw = build(&config(state, 64), vec![segment(0..100, true, true)], 100);
        let mut params = vec![2.0f32; 100];
        adamw
            .step(&inputs(1, 0.5), &mut params, &vec![3.0; 100])
            .unwrap();
        assert!(
            params.iter().all(|&p| (p - 1.4).abs() < 1e-5),
            "{}",
            params[0]
        );
    }
}

#[test]
fn a_nan_gradient_shows_in_the_scale_of_its_block_alone() {
    let n = 2048;
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, 1e30] {
        for isa in Isa::supported() {
            let config = config(StateKind::EightBit, 256);
            let mut adamw = AdamW::new(&config, vec![segment(0..n, true, true)], n).on(isa);
            let mut params = noise(n, 1);
            let mut grads = noise(n, 2);
            grads[700] = bad;
            adamw.step(&inputs(1, 1e-3), &mut params, &grads).unwrap();
            for entry in adamw.state() {
                if let (StateSlice::F32(scales), true) =
                    (entry.values, entry.name == "exp_avg_sq.absmax")
                {
                    let nan: Vec<bool> = scales.iter().map(|s| s.is_nan()).collect();
                    assert_eq!(nan, [false, false, true, false, false, false, false, false]);
                }
            }
            adamw
                .step(&inputs(2, 1e-3), &mut params, &noise(n, 3))
                .unwrap();
            for (i, p) in params.iter().enumerate() {
                assert_eq!(p.is_nan(), (512..768).contains(&i), "{bad} {i}");
            }
        }
    }
}

#[test]
fn padding_is_neither_read_nor_written() {
    let segments = vec![
        segment(0..100, true, true),
        segment(2048..5000, true, true),
        segment(6144..6200, false, false),
    ];
    let mut adamw = build(&config(StateKind::EightBit, 256), segments.clone(), 8192);
    let inside = |i: usize| segments.iter().any(|s| s.range.contains(&i));
    let poison = |i: usize| if inside(i) { 0.5 } else { f32::NAN };
    let mut params: Vec<f32> = (0..8192).map(poison).collect();
    let grads = params.clone();
    for t in 1..4 {
        adamw.step(&inputs(t, 1e-3), &mut params, &grads).unwrap();
    }
    for (i, p) in params.iter().enumerate() {
        assert_eq!(p.is_nan(), !inside(i), "{i}");
        assert!(!inside(i) || *p != 0.5);
    }
}

#[test]
fn state_takes_two_bytes_and_scales_and_is_named() {
    let segments = vec![
        segment(0..10_000, true, true),
        segment(10_240..10_340, false, false),
    ];
    let mut adamw = build(&config(StateKind::EightBit, 256), segments.clone(), 10_340);
    assert_eq!(adamw.state_bytes(), 2 * (10_000 + 4 * 40) + 8 * 100);
    let names: Vec<(usize, &str, usize)> = state_bits(&mut *adamw)
        .iter()
        .map(|(s, name, x)| (*s, *name, x.len()))
        .collect();
    let expected = [
        (0, "exp_avg", 10_000),
        (0, "exp_avg.absmax", 40),
        (0, "exp_avg_sq", 10_000),
        (0, "exp_avg_sq.absmax", 40),
        (1, "exp_avg", 100),
        (1, "exp_avg_sq", 100),
    ];
    assert_eq!(names, expected);
    // With f32 state asked for, a segment that may be quantized is not.
    let adamw = build(&config(StateKind::F32, 256), segments, 10_340);
    assert_eq!(adamw.state_bytes(), 8 * 10_100);
}

#[test]
fn copied_state_continues_bit_for_bit() {
    let n = 5000;
    let new = || {
        build(
            &config(StateKind::EightBit, 128),
            vec![segment(0..n, true, true)],
            n,
        )
    };
    let (mut first, mut params) = (new(), noise(n, 1));
    for t in 1..=3 {
        first
            .step(&inputs(t, 1e-3), &mut params, &noise(n, 1 + t))
            .unwrap();
    }
    let (mut second, mut second_params) = (new(), params.clone());
    for (from, to) in first.state().into_iter().zip(second.state()) {
        assert_eq!((from.segment, from.name), (to.segment, to.name));
        match (from.values, to.values) {
            (StateSlice::F32(from), StateSlice::F32(to)) => to.copy_from_slice(from),
            (StateSlice::U8(from), StateSlice::U8(to)) => to.copy_from_slice(from),
            _ => panic!("kinds differ"),
        }
    }
    let grads = noise(n, 9);
    first.step(&inputs(4, 1e-3), &mut params, &grads).unwrap();
    second
        .step(&inputs(4, 1e-3), &mut second_params, &grads)
        .unwrap();
    assert_eq!(bits(&params), bits(&second_params));
    assert_eq!(state_bits(&mut *first), state_bits(&mut *second));
}
