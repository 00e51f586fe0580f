//! `train bench`.

use std::time::Instant;

use clap::Subcommand;
use serde::Serialize;

use super::{bench_collectives, num_threads, print};
use crate::comm::Comm;
use crate::metrics::{flops, memory};
use crate::model::{Gpt, ModelConfig};
use crate::ops::{Mat, MatMut, gemm};
use crate::optim::{self, OptimizerConfig};
use crate::rng::{self, Purpose};
use crate::zero::{Engine, EngineOptions, MicroBatch};
use crate::{Error, Result, runtime};

/// Arguments of `train bench`.
#[derive(clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// The training step that `run` runs, optimizer included, beside the machine's GEMM limit.
    Step {
        /// L,D,H,S,B,V: layers, width, heads, sequence, batch, vocabulary. May be repeated.
        #[arg(long, value_name = "L,D,H,S,B,V")]
        shape: Vec<String>,
        /// Embeddings from N(0, 1), as torch and candle start them by default: a saturated softmax
        /// and a backward pass full of denormals.
        #[arg(long)]
        unit_normal_embedding: bool,
        /// Steps to time, of which the median counts; two more warm up.
        #[arg(long, default_value_t = 8)]
        steps: usize,
        #[command(flatten)]
        common: Common,
    },
    /// Nanoseconds a parameter of every optimizer, by state precision and block.
    Optimizer {
        /// Parameters, as a power of two.
        #[arg(long, default_value_t = 26, value_parser = clap::value_parser!(u32).range(0..=34))]
        log2_n: u32,
        #[command(flatten)]
        common: Common,
    },
    /// Speed of the codecs beside memcpy.
    Quantize {
        /// Values, as a power of two.
        #[arg(long, default_value_t = 26, value_parser = clap::value_parser!(u32).range(0..=34))]
        log2_n: u32,
        #[command(flatten)]
        common: Common,
    },
    /// Collectives between ranks on this machine.
    Collectives(bench_collectives::CollectivesArgs),
}

#[derive(clap::Args)]
struct Common {
    /// Compute threads; all cores when absent.
    #[arg(long, value_parser = num_threads())]
    threads: Option<usize>,
    /// One JSON array instead of lines.
    #[arg(long)]
    json: bool,
}

/// Runs a benchmark and prints its rows.
pub fn bench(args: &BenchArgs) -> Result<()> {
    let common = match &args.what {
        What::Collectives(args) => return bench_collectives::bench(args),
        What::Step { common, .. }
        | What::Optimizer { common, .. }
        | What::Quantize { common, .. } => common,
    };
    let threads = common.threads.unwrap_or_else(runtime::num_cores);
    runtime::start_workers(threads)?;
    match &args.what {
        What::Collectives(_) => Ok(()), // above
        What::Step {
            shape,
            unit_normal_embedding,
            steps,
            ..
        } => {
            let mut shapes = match shape.as_slice() {
                [] => DEFAULT_SHAPES.to_vec(),
                given => given
                    .iter()
                    .map(|s| Shape::parse(s))
                    .collect::<Result<_>>()?,
            };
            for shape in &mut shapes {
                shape.unit_normal_embedding |= unit_normal_embedding;
            }
            print_rows(
                common.json,
                shapes
                    .iter()
                    .map(|shape| bench_step(shape, *steps, threads)),
            )
        }
        What::Optimizer { log2_n, .. } => print_rows(
            common.json,
            optim::bench::optimizers(1 << log2_n).into_iter().map(Ok),
        ),
        What::Quantize { log2_n, .. } => print_rows(
            common.json,
            optim::bench::codecs(1 << log2_n).into_iter().map(Ok),
        ),
    }
}

/// Prints rows as they come, or with `json` one array at the end.
pub(super) fn print_rows<R: Serialize>(
    json: bool,
    rows: impl Iterator<Item = Result<R>>,
) -> Result<()> {
    let mut all = Vec::new();
    for row in rows {
        let row = serde_json::to_value(row?).unwrap_or_default();
        if !json {
            print(&format!("{row}\n"))?;
        }
        all.push(row);
    }
    if json {
        print(&format!("{}\n", serde_json::Value::Array(all)))?;
    }
    Ok(())
}

/// Sizes of a benched step.
#[derive(Clone, Copy, Debug)]
struct Shape {
    num_layers: usize,
    d_model: usize,
    num_heads: usize,
    seq_len: usize,
    micro_batch: usize,
    vocab_size: usize,
    unit_normal_embedding: bool,
}

const fn shape(l: usize, d: usize, h: usize, s: usize, b: usize, v: usize, unit: bool) -> Shape {
    Shape {
        num_layers: l,
        d_model: d,
        num_heads: h,
        seq_len: s,
        micro_batch: b,
        vocab_size: v,
        unit_normal_embedding: unit,
    }
}

const DEFAULT_SHAPES: [Shape; 4] = [
    shape(4, 256, 4, 256, 8, 4096, false),
    shape(4, 256, 4, 256, 8, 4096, true),
    shape(6, 384, 6, 256, 8, 8192, false),
    shape(12, 768, 12, 256, 4, 50257, false),
];

impl Shape {
    fn parse(text: &str) -> Result<Self> {
        let wrong = || {
            Error::Config(format!(
                "--shape {text}: give six positive numbers L,D,H,S,B,V with H a divisor of D"
            ))
        };
        let numbers: Vec<usize> = text
            .split(',')
            .map(|n| n.trim().parse().map_err(|_| wrong()))
            .collect::<Result<_>>()?;
        match numbers[..] {
            [l, d, h, s, b, v] if !numbers.contains(&0) && d.is_multiple_of(h) => {
                Ok(shape(l, d, h, s, b, v, false))
            }
            _ => Err(wrong()),
        }
    }
}

/// A row of `bench step`.
#[derive(Serialize)]
struct StepRow {
    num_layers: usize,
    d_model: usize,
    num_heads: usize,
    seq_len: usize,
    micro_batch: usize,
    vocab_size: usize,
    unit_normal_embedding: bool,
    threads: usize,
    step_ms: f64,
    tokens_per_s: f64,
    gflops: f64,
    /// Of the fastest step: what the machine gives when its neighbours are quiet.
    best_gflops: f64,
    gemm_limit_gflops: f64,
    flops_formula: &'static str,
    peak_rss_mib: Option<f64>,
}

fn bench_step(shape: &Shape, num_steps: usize, threads: usize) -> Result<StepRow> {
    let Shape {
        num_layers,
        d_model,
        num_heads,
        seq_len,
        micro_batch,
        vocab_size,
        unit_normal_embedding,
    } = *shape;
    let config = ModelConfig {
        num_layers,
        num_heads,
        d_model,
        seq_len,
        stable_embedding: false,
        ..ModelConfig::default()
    };
    let gemm_before = gemm_limit(threads);
    let model = Gpt::new(&config, vocab_size);
    model.initialize(1)?;
    if unit_normal_embedding {
        for param in model.params() {
            if param.spec().name.starts_with("wte") || param.spec().name.starts_with("wpe") {
                let n = param.spec().len() as u64;
                let values: Vec<f32> = (0..n).map(|i| rng::normal(2, Purpose::Init, i)).collect();
                param.write(&values)?;
            }
        }
    }
    let options = EngineOptions {
        seed: 1,
        grad_clip: 1.0,
        recompute_blocks: false,
        min_8bit_size: 4096,
    };
    let mut engine = Engine::new(model, &OptimizerConfig::default(), Comm::solo(), options)?;
    let num_tokens = micro_batch * seq_len;
    let mut times_ms = Vec::new();
    for step in 0..num_steps.max(1) as u64 + 2 {
        let token = |which: u64, i: usize| {
            let index = (step * 2 + which) << 32 | i as u64;
            (rng::hash(3, Purpose::Sample, index) % vocab_size as u64) as u32
        };
        let batch = MicroBatch {
            first_sequence: 0,
            inputs: (0..num_tokens).map(|i| token(0, i)).collect(),
            targets: (0..num_tokens).map(|i| token(1, i)).collect(),
        };
        let start = Instant::now();
        engine.train_step(step, 3e-4, num_tokens, std::iter::once(batch))?;
        times_ms.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let mut timed = times_ms.split_off(2);
    timed.sort_by(f64::total_cmp);
    let step_ms = timed[timed.len() / 2];
    let flops = flops::Shape::new(&config, vocab_size, micro_batch).model_flops();
    Ok(StepRow {
        num_layers,
        d_model,
        num_heads,
        seq_len,
        micro_batch,
        vocab_size,
        unit_normal_embedding,
        threads,
        step_ms,
        tokens_per_s: num_tokens as f64 / step_ms * 1e3,
        gflops: flops / step_ms / 1e6,
        best_gflops: flops / timed[0] / 1e6,
        gemm_limit_gflops: gemm_before.max(gemm_limit(threads)),
        flops_formula: flops::FORMULA,
        peak_rss_mib: memory::resident()
            .peak_bytes
            .map(|bytes| bytes as f64 / (1 << 20) as f64),
    })
}

/// The fastest of several large products, in GFLOP/s: what the crate gemm reaches here.
fn gemm_limit(threads: usize) -> f64 {
    let n = 1536;
    let (a, b) = (vec![0.5; n * n], vec![0.25; n * n]);
    let mut out = vec![0.0; n * n];
    let mut best = f64::INFINITY;
    for _ in 0..8 {
        let start = Instant::now();
        gemm(
            MatMut::new(&mut out, n, n, n),
            Mat::new(&a, n, n, n),
            Mat::new(&b, n, n, n),
            false,
            threads,
        );
        best = best.min(start.elapsed().as_secs_f64());
    }
    2.0 * (n * n * n) as f64 / best / 1e9
}
