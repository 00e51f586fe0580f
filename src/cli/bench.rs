//! `train bench`.

use clap::Subcommand;
use serde::Serialize;

use super::{bench_collectives, bench_step, num_threads, print};
use crate::{Result, optim, runtime};

/// Arguments of `train bench`.
#[derive(clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// The training step that `run` runs, optimizer included, beside the machine's GEMM limit; as one
    /// rank, or under a launcher as one of many.
    Step(bench_step::StepArgs),
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

impl BenchArgs {
    /// Whether this can run as one of many ranks.
    pub fn runs_on_ranks(&self) -> bool {
        matches!(self.what, What::Step(_))
    }
}

/// Runs a benchmark and prints its rows.
pub fn bench(args: &BenchArgs) -> Result<()> {
    let start =
        |common: &Common| runtime::start_workers(common.threads.unwrap_or_else(runtime::num_cores));
    match &args.what {
        What::Collectives(args) => bench_collectives::bench(args),
        What::Step(args) => bench_step::bench(args),
        What::Optimizer { log2_n, common } => {
            start(common)?;
            print_rows(
                common.json,
                optim::bench::optimizers(1 << log2_n).into_iter().map(Ok),
            )
        }
        What::Quantize { log2_n, common } => {
            start(common)?;
            print_rows(
                common.json,
                optim::bench::codecs(1 << log2_n).into_iter().map(Ok),
            )
        }
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
