//! `train launch-check`.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::print;
use crate::comm::{Booking, Comm, CommOptions, LinkBytes, Moved, Purpose, connect};
use crate::launch::{LaunchFlags, discover, join};
use crate::{Error, Result, runtime};

/// Pause between exchanges while ranks stay.
const BETWEEN_EXCHANGES: Duration = Duration::from_millis(20);

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

/// Prints this rank's place and everybody's address once all ranks have reached each other, the way
/// training does.
pub fn launch_check(args: &LaunchCheckArgs) -> Result<()> {
    let launch = discover(&args.launch)?;
    tracing::info!("{launch}");
    if let Some(note) = &launch.note {
        tracing::warn!("{note}");
    }
    let options = CommOptions {
        timeout: Duration::from_secs(args.timeout_s),
        ..CommOptions::default()
    };
    let mut text = format!("rank {} of {}: ", launch.rank, launch.world);
    let comm = match join(&launch, options)? {
        None => {
            text += "nobody to reach";
            Comm::solo()
        }
        Some(bootstrap) => {
            let (topology, addrs) = (bootstrap.topology, bootstrap.addrs.clone());
            let comm = Comm::new(connect(bootstrap)?)?;
            let booking = Booking::small(Purpose::Scalars, "barrier");
            comm.run(booking, |groups| {
                groups.world.barrier()?;
                groups.local.barrier()?;
                groups.cross.barrier()?;
                Ok(Moved {
                    value: (),
                    elements: 0,
                    bytes: LinkBytes::default(),
                })
            })?;
            let _ = write!(
                text,
                "{topology}, node {}, local rank {}; all ranks reached:",
                topology.node(),
                topology.local_rank()
            );
            for addr in addrs {
                let _ = write!(text, " {addr}");
            }
            comm
        }
    };
    let cores = runtime::num_cores();
    let threads = runtime::cores_each(launch.host_size);
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
    hold(&comm, Duration::from_secs(args.hold_s), &stop)
}

/// Keeps the ranks together until the time is over or one of them was asked to stop: all of them stop
/// then, after the same exchange.
fn hold(comm: &Comm, time: Duration, stop: &AtomicBool) -> Result<()> {
    let end = Instant::now() + time;
    loop {
        let stops = Instant::now() >= end || stop.load(Ordering::Relaxed);
        if comm.any(stops)? {
            return Ok(());
        }
        thread::sleep(BETWEEN_EXCHANGES);
    }
}
