//! Ctrl-C and SIGTERM: the first asks the run to save and stop, a later one stops at once.
//!
//! Batch systems signal every process of a job, and launchers pass on what they got: one request
//! may arrive several times. Only a signal more than [`REPEAT`] after the first is a second request.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::metrics::progress::write_above_bars;

/// Exit status after a second signal, as a shell reports an interrupt.
const INTERRUPTED: i32 = 130;

/// How long copies of one request may take to arrive.
const REPEAT: Duration = Duration::from_secs(1);

/// Whether somebody asked the run to stop.
#[derive(Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Starts listening. Where a handler exists already (tests in one process) nothing changes.
    pub fn listen() -> Self {
        let interrupt = Self::default();
        let requested = interrupt.0.clone();
        let first = OnceLock::new();
        let installed = ctrlc::set_handler(move || {
            let is_first = first.set(Instant::now()).is_ok();
            if is_first {
                requested.store(true, Ordering::SeqCst);
                write_above_bars(
                    b"stopping after this step; once more stops at once and loses it\n",
                );
            } else if first.get().is_some_and(|first| first.elapsed() > REPEAT) {
                std::process::exit(INTERRUPTED);
            }
        });
        if let Err(error) = installed {
            tracing::warn!("signals are not handled: {error}");
        }
        interrupt
    }

    /// Whether to stop after this step.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
