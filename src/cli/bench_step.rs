//! `train bench step`: the training step on random tokens, as one rank or as one of many.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::bench::print_rows;
use super::num_threads;
use crate::comm::{self, Comm, CommOptions};
use crate::launch::{self, LaunchFlags};
use crate::metrics::{flops, logging, memory};
use crate::model::{Gpt, ModelConfig, Unit};
use crate::ops::{Mat, MatMut, gemm};
use crate::optim::OptimizerConfig;
use crate::rng::{self, Purpose};
use crate::zero::{Engine, EngineOptions, MicroBatch, ZeroConfig};
use crate::{Error, Result, runtime};

/// Untimed steps at the start.
const NUM_WARMUP: usize = 2;

/// Arguments of `train bench step`.
#[derive(clap::Args)]
pub struct StepArgs {
    /// L,D,H,S,B,V: layers, width, heads, sequence, batch of a rank, vocabulary. May be repeated.
    #[arg(long, value_name = "L,D,H,S,B,V")]
    shape: Vec<String>,
    /// Embeddings from N(0, 1), as torch and candle start them by default: a saturated softmax
    /// and a backward pass full of denormals.
    #[arg(long)]
    unit_normal_embedding: bool,
    /// Steps to time, of which the median counts; two more warm up.
    #[arg(long, default_value_t = 8)]
    steps: usize,
    /// Compute threads of a rank; its share of the machine's cores when absent.
    #[arg(long, value_parser = num_threads())]
    threads: Option<usize>,
    /// zero.stage: 3 spreads weights, gradients and optimizer state over the ranks, 0 keeps all of
    /// them on each.
    #[arg(long, default_value_t = 3, value_parser = stage)]
    stage: u8,
    /// zero.prefetch: units whose weights are gathered ahead.
    #[arg(long, value_name = "N", default_value_t = ZeroConfig::default().prefetch)]
    prefetch: usize,
    /// Wait for every collective at once (zero.overlap = false).
    #[arg(long)]
    no_overlap: bool,
    /// Keep gathered weights from the forward pass to the backward pass.
    #[arg(long)]
    no_reshard: bool,
    /// One JSON array instead of lines.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    launch: LaunchFlags,
}

fn stage(text: &str) -> std::result::Result<u8, String> {
    match text {
        "0" => Ok(0),
        "3" => Ok(3),
        _ => Err("expected 0 or 3".into()),
    }
}

/// Runs the benchmark; rank 0 prints its rows.
pub fn bench(args: &StepArgs) -> Result<()> {
    let launch = launch::discover(&args.launch)?;
    if launch.rank > 0 {
        logging::only_warnings();
    }
    if let Some(note) = &launch.note {
        tracing::warn!("{note}");
    }
    let mut shapes = match args.shape.as_slice() {
        [] => DEFAULT_SHAPES.to_vec(),
        given => given
            .iter()
            .map(|s| Shape::parse(s))
            .collect::<Result<_>>()?,
    };
    for shape in &mut shapes {
        shape.unit_normal_embedding |= args.unit_normal_embedding;
    }
    let threads = (args.threads).unwrap_or_else(|| runtime::cores_each(launch.host_size));
    runtime::start_workers(threads)?;
    let comm = Arc::new(match launch::join(&launch, CommOptions::default())? {
        Some(bootstrap) => Comm::new(comm::connect(bootstrap)?)?,
        None => Comm::solo(),
    });
    let rows = shapes.iter().map(|shape| {
        let row = bench_shape(shape, args, threads, &comm);
        if let Err(error) = &row
            && !matches!(error, Error::Peer(_))
        {
            // The others wait for this rank: they end with its reason instead of a timeout's.
            comm.abort(&error.to_string());
        }
        row
    });
    if launch.rank == 0 {
        return print_rows(args.json, rows);
    }
    { rows }.try_for_each(|row| row.map(drop))
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

/// A row of `bench step`. Rates are of all ranks together.
#[derive(Serialize)]
struct StepRow {
    num_layers: usize,
    d_model: usize,
    num_heads: usize,
    seq_len: usize,
    /// Of a rank.
    micro_batch: usize,
    vocab_size: usize,
    unit_normal_embedding: bool,
    world: usize,
    num_nodes: usize,
    /// Of a rank.
    threads: usize,
    stage: u8,
    prefetch: usize,
    overlap: bool,
    reshard_after_forward: bool,
    /// Of the slowest rank; the median over steps.
    step_ms: f64,
    tokens_per_s: f64,
    gflops: f64,
    /// Of the fastest step: what the machine gives when its neighbours are quiet.
    best_gflops: f64,
    /// Of large products that run on all ranks at once.
    gemm_limit_gflops: f64,
    flops_formula: &'static str,
    /// Time of rank 0's collectives in the median step.
    comm_busy_ms: f64,
    /// Of that, time in which its computation waited.
    comm_exposed_ms: f64,
    /// Received by rank 0 in a step.
    comm_bytes: u64,
    /// Of rank 0.
    peak_rss_mib: Option<f64>,
}

fn bench_shape(
    shape: &Shape,
    args: &StepArgs,
    threads: usize,
    comm: &Arc<Comm>,
) -> Result<StepRow> {
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
    let limit_before = gemm_limit(threads, comm)?;
    let fill = |unit: &Arc<dyn Unit>| {
        unit.buffer().initialize(1)?;
        for param in unit.buffer().params() {
            if !unit_normal_embedding {
                break;
            }
            let name = &param.spec().name;
            if name.starts_with("wte") || name.starts_with("wpe") {
                let n = param.spec().len() as u64;
                let values: Vec<f32> = (0..n).map(|i| rng::normal(2, Purpose::Init, i)).collect();
                param.write(&values)?;
            }
        }
        Ok(())
    };
    let options = EngineOptions {
        seed: 1,
        grad_clip: 1.0,
        recompute_blocks: false,
        min_8bit_size: 4096,
        zero: ZeroConfig {
            stage: args.stage,
            prefetch: args.prefetch,
            overlap: !args.no_overlap,
            reshard_after_forward: !args.no_reshard,
            ..ZeroConfig::default()
        },
        ..EngineOptions::default()
    };
    let model = Gpt::new(&config, vocab_size);
    let optimizer = OptimizerConfig::default();
    let mut engine = Engine::new(model, &optimizer, comm.clone(), options, fill)?;
    let topology = comm.topology();
    let (world, rank) = (topology.world(), topology.rank);
    let num_tokens = micro_batch * seq_len;
    let mut times_ms = Vec::new();
    let mut traffic = Vec::new();
    for step in 0..(args.steps.max(1) + NUM_WARMUP) as u64 {
        let token = |which: u64, i: usize| {
            let index = (step * 2 + which) << 32 | (rank * num_tokens + i) as u64;
            (rng::hash(3, Purpose::Sample, index) % vocab_size as u64) as u32
        };
        let batch = MicroBatch {
            first_sequence: (rank * micro_batch) as u64,
            inputs: (0..num_tokens).map(|i| token(0, i)).collect(),
            targets: (0..num_tokens).map(|i| token(1, i)).collect(),
        };
        // No rank's step contains another's drawing of tokens.
        comm.any(false)?;
        comm.take_step();
        let start = Instant::now();
        engine.train_step(step, 3e-4, num_tokens * world, std::iter::once(batch))?;
        times_ms.push(start.elapsed().as_secs_f64() * 1e3);
        traffic.push(comm.take_step());
    }
    let times_ms = slowest(comm, &times_ms)?;
    let mut order: Vec<usize> = (NUM_WARMUP..times_ms.len()).collect();
    order.sort_by(|&a, &b| times_ms[a].total_cmp(&times_ms[b]));
    let median = order[order.len() / 2];
    let (step_ms, best_ms) = (times_ms[median], times_ms[order[0]]);
    let flops = flops::Shape::new(&config, vocab_size, micro_batch).model_flops() * world as f64;
    let limit = limit_before.max(gemm_limit(threads, comm)?);
    Ok(StepRow {
        num_layers,
        d_model,
        num_heads,
        seq_len,
        micro_batch,
        vocab_size,
        unit_normal_embedding,
        world,
        num_nodes: topology.num_nodes,
        threads,
        stage: args.stage,
        prefetch: args.prefetch,
        overlap: !args.no_overlap,
        reshard_after_forward: !args.no_reshard,
        step_ms,
        tokens_per_s: (num_tokens * world) as f64 / step_ms * 1e3,
        gflops: flops / step_ms / 1e6,
        best_gflops: flops / best_ms / 1e6,
        gemm_limit_gflops: limit,
        flops_formula: flops::FORMULA,
        comm_busy_ms: traffic[median].busy_ms,
        comm_exposed_ms: traffic[median].exposed_ms,
        comm_bytes: traffic[median].intra_bytes + traffic[median].inter_bytes,
        peak_rss_mib: memory::resident()
            .peak_bytes
            .map(|bytes| bytes as f64 / (1 << 20) as f64),
    })
}

/// Each step's time on the rank where it was longest.
fn slowest(comm: &Comm, times_ms: &[f64]) -> Result<Vec<f64>> {
    let bytes = times_ms.iter().flat_map(|ms| ms.to_le_bytes()).collect();
    let all = comm.gather_bytes(comm::Purpose::Scalars, bytes)?;
    let mut slowest = vec![0.0f64; times_ms.len()];
    for (i, bytes) in all.as_chunks().0.iter().enumerate() {
        let of_step = &mut slowest[i % times_ms.len()];
        *of_step = of_step.max(f64::from_le_bytes(*bytes));
    }
    Ok(slowest)
}

/// The fastest of several large products on each rank, all at once, in GFLOP/s together: what the
/// crate gemm reaches here.
fn gemm_limit(threads: usize, comm: &Comm) -> Result<f64> {
    let n = 1536;
    let (a, b) = (vec![0.5; n * n], vec![0.25; n * n]);
    let mut out = vec![0.0; n * n];
    let mut best = f64::INFINITY;
    for _ in 0..8 {
        comm.any(false)?;
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
    Ok(comm.sum(&[2.0 * (n * n * n) as f64 / best / 1e9])?[0])
}
