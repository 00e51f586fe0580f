//! Ctrl-C and SIGTERM: the first asks the run to save and stop, the second stops at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::metrics::progress::write_above_bars;

/// Exit status after a second signal, as a shell reports an interrupt.
const INTERRUPTED: i32 = 130;

/// Whether somebody asked the run to stop.
#[derive(Clone, Default)]
pub struct Interrupt(Arc<AtomicU32>);

impl Interrupt {
    /// Starts listening. Where a handler exists already (tests in one process) nothing changes.
    pub fn listen() -> Self {
        let interrupt = Self::default();
        let signals = interrupt.0.clone();
        let installed = ctrlc::set_handler(move || {
            if signals.fetch_add(1, Ordering::SeqCst) == 0 {
                write_above_bars(
                    b"stopping after this step; once more stops at once and loses it\n",
                );
            } else {
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
        self.0.load(Ordering::SeqCst) > 0
    }
}
