//! The command line: one file a subcommand.

mod bench;
mod bench_collectives;
mod bench_step;
mod launch;
mod launch_check;
mod prepare;
mod run;
mod sample;

use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Parser, Subcommand};

use crate::{Error, Result};

/// Trains GPT-style language models from a TOML config.
///
/// Exit status: 0 done; 2 the config or command line is wrong; 3 bad data or checkpoint; 4 a peer or
/// the network failed; 5 training stopped by policy; 130 stopped at once by a second Ctrl-C; 1 a bug.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train.
    Run(run::RunArgs),
    /// Start ranks on this machine, one of several machines or the only one, and watch over them.
    Launch(launch::LaunchArgs),
    /// Print what the launcher says, and check that all ranks reach each other.
    LaunchCheck(launch_check::LaunchCheckArgs),
    /// Tokenize and shard the corpus of a config; `run` does it when needed.
    Prepare(ConfigArgs),
    /// Write text from a run's newest checkpoint.
    Sample(sample::SampleArgs),
    /// Measure this machine: the training step, optimizers, codecs, collectives.
    Bench(bench::BenchArgs),
    /// Print every config key with its type, default and meaning.
    ConfigReference,
}

/// A config file and changes to it.
#[derive(clap::Args)]
pub struct ConfigArgs {
    /// Config file.
    config: PathBuf,
    /// Overrides one key: `--set train.steps=100`. Wins over the file and the environment
    /// (`TRAIN__TRAIN__STEPS=100`).
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

/// What `--threads` takes.
fn num_threads() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1024)
}

/// Runs the chosen subcommand.
///
/// # Errors
/// Whatever ended it; [`crate::Error::exit_status`] is the process's exit status.
pub fn main(args: Args) -> Result<()> {
    crate::launch::follow_launcher();
    crate::metrics::logging::init(std::env::var("TRAIN_LOG").ok().as_deref())?;
    match args.command {
        Command::Run(args) => run::run(&args),
        Command::Launch(args) => launch::launch(&args),
        Command::LaunchCheck(args) => launch_check::launch_check(&args),
        Command::Prepare(args) => prepare::prepare(&args),
        Command::Sample(args) => sample::sample(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::ConfigReference => print(&crate::config::reference()),
    }
}

/// Writes to standard output. Once nobody reads it any more, as in `train ... | head`, there is
/// nothing left to do, and the process ends.
fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        written => written.map_err(Error::io("standard output")),
    }
}
