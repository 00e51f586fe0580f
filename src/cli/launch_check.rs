//! `train launch-check`.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::print;
use crate::launch::{JoinOptions, LaunchFlags, check, discover, join};
use crate::{Error, Result, runtime};

/// Arguments of `train launch-check`.
#[derive(clap::Args)]
pub struct LaunchCheckArgs {
    #[command(flatten)]
    launch: LaunchFlags,
    /// Seconds to wait for the other ranks.
    #[arg(long, value_name = "S", default_value_t = 60)]
    timeout_s: u64,
    /// Seconds to stay after the check, to try what a signal or the end of a rank does.
    #[arg(long, value_name = "S", default_value_t = 0)]
    hold_s: u64,
}

/// Prints this rank's place and everybody's address once all ranks have reached each other.
pub fn launch_check(args: &LaunchCheckArgs) -> Result<()> {
    let launch = discover(&args.launch)?;
    let timeout = Duration::from_secs(args.timeout_s);
    tracing::info!("{launch}");
    if let Some(note) = &launch.note {
        tracing::warn!("{note}");
    }
    let mut text = format!("rank {} of {}: ", launch.rank, launch.world);
    match join(&launch, &JoinOptions { timeout })? {
        None => text += "nobody to reach",
        Some(meeting) => {
            check::reach_all(&meeting, timeout)?;
            let topology = meeting.topology;
            let _ = write!(
                text,
                "{topology}, node {}, local rank {}; all ranks reached:",
                topology.node(),
                topology.local_rank()
            );
            for addr in &meeting.addrs {
                let _ = write!(text, " {addr}");
            }
        }
    }
    let cores = runtime::num_cores();
    let threads = launch.default_threads(cores);
    let _ = writeln!(
        text,
        "; {threads} of {cores} cores, restart {}, process {}",
        launch.restart_count,
        std::process::id()
    );
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, stop.clone())
            .map_err(|e| Error::Config(format!("signals cannot be handled: {e}")))?;
    }
    print(&text)?;
    let end = Instant::now() + Duration::from_secs(args.hold_s);
    while Instant::now() < end && !stop.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
