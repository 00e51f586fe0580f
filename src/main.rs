//! The `train` command.

use std::process::ExitCode;

use clap::Parser;
use mimalloc::MiMalloc;

// Chosen by measurement against the system's allocator (LOG.md, 2026-11-30): activations of several
// MiB come and go every step, and mimalloc gives the same pages back.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    train::runtime::keep_freed_memory();
    match train::cli::main(train::cli::Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_status())
        }
    }
}
