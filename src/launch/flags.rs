//! What the command line says about ranks.

use std::net::IpAddr;

/// Given to each argument: given to the struct, it would also head what follows it in a command.
const HEADING: &str = "Ranks (launchers set these in the environment)";

/// Flags of every command that runs on several ranks. Launchers say all of it in the environment;
/// the flags are for starting ranks by hand and for what a launcher leaves out.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct LaunchFlags {
    /// Treat the ranks as K nodes: hierarchical collectives and per-link bytes on one machine.
    #[arg(long, help_heading = HEADING, value_name = "K")]
    pub emulate_nodes: Option<usize>,
    /// This process's rank, when started by hand.
    #[arg(long, help_heading = HEADING, value_name = "R", requires = "world_size")]
    pub rank: Option<usize>,
    /// Number of ranks, when started by hand.
    #[arg(long, help_heading = HEADING, value_name = "W", requires = "rank")]
    pub world_size: Option<usize>,
    /// Ranks on each node, when started by hand [default: all of them].
    #[arg(long, help_heading = HEADING, value_name = "L", requires = "rank")]
    pub ranks_per_node: Option<usize>,
    /// Where rank 0 can be reached; wins over MASTER_ADDR.
    #[arg(long, help_heading = HEADING, value_name = "HOST")]
    pub master_addr: Option<String>,
    /// Port on which rank 0 waits for the others; wins over MASTER_PORT.
    #[arg(long, help_heading = HEADING, value_name = "PORT")]
    pub master_port: Option<u16>,
    /// Address to listen on (0.0.0.0 for all) instead of the interface that reaches rank 0; wins over
    /// TRAIN_BIND_ADDR.
    #[arg(long, help_heading = HEADING, value_name = "IP")]
    pub bind_addr: Option<IpAddr>,
}
