//! `train run`.

use std::path::PathBuf;

use super::ConfigArgs;
use crate::comm::{self, Comm, Topology};
use crate::config::Plan;
use crate::launch::{self, LaunchFlags, Source};
use crate::metrics::logging;
use crate::trainer::{self, Start};
use crate::{Error, Result};

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
    #[command(flatten)]
    launch: LaunchFlags,
}

/// Trains, as one rank or as one of many.
pub fn run(args: &RunArgs) -> Result<()> {
    let launch = launch::discover(&args.launch)?;
    if launch.rank > 0 {
        logging::only_warnings();
    }
    match launch.source {
        Source::Single => tracing::debug!("{launch}"),
        _ => tracing::info!("{launch}"),
    }
    if let Some(note) = &launch.note {
        tracing::warn!("{note}");
    }
    let topology = Topology {
        rank: launch.rank,
        num_nodes: launch.num_nodes,
        local_size: launch.local_size,
    };
    if topology.world() != launch.world {
        return Err(Error::Config(format!(
            "{} ranks on {} nodes, of which this one has {}: every node needs the same number of ranks",
            launch.world, topology.num_nodes, topology.local_size
        )));
    }
    let (path, sets) = (&args.config.config, &args.config.sets);
    let plan = Plan::load_for(path, sets, topology, launch.host_size)?;
    let start = if args.resume {
        Start::Resume
    } else {
        Start::New {
            overwrite: args.overwrite,
            weights: args.init_from.clone(),
        }
    };
    // Before the ranks meet: a launcher that restarts ranks which did not meet adds --resume.
    trainer::check(&plan, &start)?;
    let comm = match launch::join(&launch, plan.raw().comm.options())? {
        Some(bootstrap) => Comm::new(comm::connect(bootstrap)?)?,
        None => Comm::solo(),
    };
    trainer::train(&plan, start, comm)
}
