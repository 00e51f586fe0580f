//! `train run`.

use std::path::PathBuf;

use super::ConfigArgs;
use crate::Result;
use crate::comm::Comm;
use crate::config::Plan;
use crate::trainer::{self, Start};

/// Arguments of `train run`.
#[derive(clap::Args)]
pub struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Continue from the newest checkpoint of the run folder.
    #[arg(long, conflicts_with = "overwrite")]
    resume: bool,
    /// Delete what the run folder holds and start over.
    #[arg(long)]
    overwrite: bool,
    /// Start from the weights in this safetensors file instead of random ones.
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    init_from: Option<PathBuf>,
}

/// Trains.
pub fn run(args: &RunArgs) -> Result<()> {
    let plan = Plan::load(&args.config.config, &args.config.sets)?;
    let start = if args.resume {
        Start::Resume
    } else {
        Start::New {
            overwrite: args.overwrite,
            weights: args.init_from.clone(),
        }
    };
    trainer::train(&plan, start, Comm::solo())
}
