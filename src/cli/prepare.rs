//! `train prepare`.

use super::{ConfigArgs, print};
use crate::config::Plan;
use crate::{Result, data};

/// Tokenizes and shards the corpus, and prints what a model has to beat.
pub fn prepare(args: &ConfigArgs) -> Result<()> {
    let plan = Plan::load(&args.config, &args.sets)?;
    let dataset = data::prepare(&plan.raw().data, true)?;
    print(&format!("{}\n", dataset.describe()))
}
