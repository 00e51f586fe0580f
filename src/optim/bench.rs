//! `train bench optimizer` and the codec rows of `train bench quantize`: nanoseconds a parameter
//! and gigabytes a second on the current rayon pool, best of 7.

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;

use super::{AdamW, Optimizer, OptimizerConfig, Segment, StateKind, StepInputs};
use crate::comm::Comm;
use crate::quant::{Blockwise, Codec, Symmetric};

/// Time of one optimizer step.
#[derive(Clone, Debug, Serialize)]
pub struct OptimizerRow {
    /// Optimizer.
    pub name: String,
    /// `f32` or `8bit`.
    pub state: StateKind,
    /// Values a scale, with quantized state.
    pub block: Option<usize>,
    /// Parameters stepped.
    pub num_params: usize,
    /// Nanoseconds a parameter.
    pub ns_per_param: f64,
}

/// Speed of one codec.
#[derive(Clone, Debug, Serialize)]
pub struct CodecRow {
    /// Codec, such as `dynamic8/256`.
    pub name: String,
    /// f32 gigabytes a second that quantizing reads.
    pub gb_s_in: f64,
    /// f32 gigabytes a second that dequantizing writes.
    pub gb_s_out: f64,
    /// Gigabytes a second that a copy of the f32 values reads and writes, both counted.
    pub memcpy_gb_s: f64,
}

/// Times AdamW with f32 state and with 8-bit state of blocks 256 and 2048.
pub fn optimizers(num_params: usize) -> Vec<OptimizerRow> {
    let kinds = [
        (StateKind::F32, None),
        (StateKind::EightBit, Some(256)),
        (StateKind::EightBit, Some(2048)),
    ];
    let mut params = normal(num_params, 1.0);
    let grads = normal(num_params, 1e-3);
    let row = |(state, block): (StateKind, Option<usize>)| {
        let config = OptimizerConfig {
            state,
            block: block.unwrap_or(256),
            ..OptimizerConfig::default()
        };
        let segment = Segment {
            range: 0..num_params,
            name: "weight".into(),
            offset: 0,
            decay: true,
            eight_bit: true,
        };
        let mut adamw = AdamW::new(&config, vec![segment], num_params);
        let comm = Comm::solo();
        let mut update = 0;
        let seconds = best_seconds(|| {
            update += 1;
            let inputs = StepInputs {
                update,
                lr: 1e-3,
                grad_scale: 1.0,
                comm: &comm,
            };
            adamw
                .step(&inputs, &mut params, &grads)
                .expect("one rank has no peer to lose");
        });
        OptimizerRow {
            name: "adamw".into(),
            state,
            block,
            num_params,
            ns_per_param: seconds * 1e9 / num_params as f64,
        }
    };
    kinds.into_iter().map(row).collect()
}

/// Times the block-wise dynamic quantizers on all threads beside a copy, and the symmetric ones that
/// the communication thread runs alone.
pub fn codecs(num_values: usize) -> Vec<CodecRow> {
    const TASK_VALUES: usize = 32 * 1024;
    let values = normal(num_values, 1.0);
    let mut out = vec![0.0f32; num_values];
    let gigabytes = 4.0 * num_values as f64 / 1e9;
    let copy_seconds = best_seconds(|| {
        out.par_chunks_mut(TASK_VALUES)
            .zip(values.par_chunks(TASK_VALUES))
            .for_each(|(to, from)| to.copy_from_slice(from));
        black_box(&out);
    });
    let mut codes = vec![0u8; num_values];
    let mut row = |codec: Blockwise| {
        let mut scales = vec![0.0f32; codec.num_scales(num_values)];
        let in_seconds = best_seconds(|| codec.quantize(&values, &mut codes, &mut scales));
        let out_seconds = best_seconds(|| codec.dequantize(&codes, &scales, &mut out));
        CodecRow {
            name: codec.name(),
            gb_s_in: gigabytes / in_seconds,
            gb_s_out: gigabytes / out_seconds,
            memcpy_gb_s: 2.0 * gigabytes / copy_seconds,
        }
    };
    let mut rows: Vec<CodecRow> = [
        Blockwise::signed(256),
        Blockwise::signed(2048),
        Blockwise::unsigned(256),
        Blockwise::unsigned(2048),
    ]
    .into_iter()
    .map(&mut row)
    .collect();
    for (bits, block) in [(8, 2048), (4, 256)] {
        let codec = Symmetric::new(bits, block);
        let mut bytes = vec![0; codec.encoded_bytes(num_values)];
        let in_seconds = best_seconds(|| codec.encode(&values, &mut bytes));
        let out_seconds = best_seconds(|| {
            codec
                .decode(&bytes, &mut out)
                .expect("the codec reads what it wrote");
        });
        rows.push(CodecRow {
            name: format!("{}, one thread", codec.name()),
            gb_s_in: gigabytes / in_seconds,
            gb_s_out: gigabytes / out_seconds,
            memcpy_gb_s: 2.0 * gigabytes / copy_seconds,
        });
    }
    rows
}

/// The shortest of 7 runs, after one to warm up.
fn best_seconds(mut run: impl FnMut()) -> f64 {
    run();
    (0..7)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

/// About N(0, `deviation`^2): sums of four uniforms, the same on every run.
fn normal(len: usize, deviation: f32) -> Vec<f32> {
    let mut values = vec![0.0; len];
    values
        .par_chunks_mut(1 << 16)
        .enumerate()
        .for_each(|(chunk, values)| {
            let mut state = chunk as u64 + 1;
            for value in values {
                state = state
                    .wrapping_mul(0x5851_f42d_4c95_7f2d)
                    .wrapping_add(0x1405_7b7e_f767_814f);
                let bits = state ^ (state >> 29);
                let sum = (0..4)
                    .map(|k| (bits >> (16 * k)) as u16 as f32 / 65536.0)
                    .sum::<f32>();
                *value = (sum - 2.0) * 3f32.sqrt() * deviation;
            }
        });
    values
}
