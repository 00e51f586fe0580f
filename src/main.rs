//! The `train` command.

use std::io::Write;
use std::panic::catch_unwind;
use std::process::ExitCode;

use clap::Parser;
use mimalloc::MiMalloc;

// Chosen by measurement against the system's allocator (LOG.md, 2026-11-30): activations of several
// MiB come and go every step, and mimalloc gives the same pages back.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    train::runtime::keep_freed_memory();
    match catch_unwind(|| train::cli::main(train::cli::Args::parse())) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            // A closed standard error must not become a panic.
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::from(error.exit_status())
        }
        // A bug; its message is out already.
        Err(_) => ExitCode::from(1),
    }
}
