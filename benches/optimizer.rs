//! Criterion benches of the optimizer step and the block-wise codec on all cores.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use train::comm::Comm;
use train::optim::{OptimizerConfig, Segment, StateKind, StepInputs, build};
use train::quant::Blockwise;

fn adamw(c: &mut Criterion) {
    let mut group = c.benchmark_group("adamw");
    group.sample_size(10);
    for num_params in [1 << 16, 1 << 24] {
        group.throughput(Throughput::Elements(num_params as u64));
        for (state, block) in [
            (StateKind::F32, 256),
            (StateKind::EightBit, 256),
            (StateKind::EightBit, 2048),
        ] {
            let config = OptimizerConfig {
                state,
                block,
                ..OptimizerConfig::default()
            };
            let segment = Segment {
                range: 0..num_params,
                name: "weight".into(),
                offset: 0,
                decay: true,
                eight_bit: true,
            };
            let mut optimizer = build(&config, vec![segment], num_params);
            let mut params = vec![0.5f32; num_params];
            let grads: Vec<f32> = (0..num_params).map(|i| (i as f32).sin() * 1e-3).collect();
            let comm = Comm::solo();
            let mut update = 0;
            let id = BenchmarkId::new(format!("{state:?}/{block}"), num_params);
            group.bench_function(id, |b| {
                b.iter(|| {
                    update += 1;
                    let inputs = StepInputs {
                        update,
                        lr: 1e-3,
                        grad_scale: 1.0,
                        comm: &comm,
                    };
                    optimizer.step(&inputs, &mut params, &grads).unwrap();
                });
            });
        }
    }
    group.finish();
}

fn codec(c: &mut Criterion) {
    let mut group = c.benchmark_group("dynamic8");
    let num_values = 1 << 20;
    group.throughput(Throughput::Bytes(4 * num_values as u64));
    let values: Vec<f32> = (0..num_values).map(|i| (i as f32).sin()).collect();
    let (mut codes, mut out) = (vec![0u8; num_values], vec![0.0f32; num_values]);
    for block in [256, 2048] {
        let codec = Blockwise::signed(block);
        let mut scales = vec![0.0f32; codec.num_scales(num_values)];
        group.bench_function(BenchmarkId::new("quantize", block), |b| {
            b.iter(|| codec.quantize(&values, &mut codes, &mut scales));
        });
        group.bench_function(BenchmarkId::new("dequantize", block), |b| {
            b.iter(|| codec.dequantize(&codes, &scales, &mut out));
        });
    }
    group.finish();
}

criterion_group!(benches, adamw, codec);
criterion_main!(benches);
