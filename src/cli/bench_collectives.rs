//! `train bench collectives`: ranks on this machine, each a process that runs this program again.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::bench::print_rows;
use crate::comm::{
    Bootstrap, CommOptions, Groups, LocalTransport, ReduceOp, Topology, connect, thread_groups,
};
use crate::{Error, Result};

/// Timed calls of each collective, after one that warms up; the fastest counts.
const REPEATS: usize = 5;

/// Arguments of `train bench collectives`.
#[derive(clap::Args)]
pub struct CollectivesArgs {
    /// Ranks.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=256))]
    world: u16,
    /// MiB in all: what an all-gather gives and a reduce-scatter takes.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    mib: u16,
    /// Nodes that the ranks count as; TCP runs between them.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    nodes: u16,
    /// What carries data inside a node.
    #[arg(long, value_enum, default_value_t = Transport::Shm)]
    transport: Transport,
    /// One JSON array instead of lines.
    #[arg(long)]
    json: bool,
    /// This process is a rank of another's bench: it says its address on standard output and hears
    /// all of them on standard input.
    #[arg(long, hide = true)]
    rank: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transport {
    /// Processes that share memory.
    Shm,
    /// Processes that talk over TCP.
    Tcp,
    /// Threads of one process that share memory, "nodes" too.
    Thread,
}

/// A row of `bench collectives`.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    op: String,
    world: usize,
    nodes: usize,
    transport: String,
    bytes: usize,
    ms: f64,
}

/// Runs the benchmark and prints its rows.
pub fn bench(args: &CollectivesArgs) -> Result<()> {
    let (world, nodes) = (usize::from(args.world), usize::from(args.nodes));
    if !world.is_multiple_of(nodes) {
        return Err(Error::Config(format!(
            "--world {world} ranks do not divide into --nodes {nodes}"
        )));
    }
    if let Some(rank) = args.rank {
        return be_rank(args, rank);
    }
    let rows = match args.transport {
        Transport::Thread => threads(args)?,
        Transport::Shm | Transport::Tcp => processes(args)?,
    };
    print_rows(args.json, rows.into_iter().map(Ok))
}

fn threads(args: &CollectivesArgs) -> Result<Vec<Row>> {
    let (world, nodes) = (usize::from(args.world), usize::from(args.nodes));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (thread_groups(nodes, world / nodes).into_iter())
            .map(|groups| scope.spawn(move || measure(args, &groups)))
            .collect();
        let mut rows = Err(Error::Peer("no ranks".into()));
        for rank in ranks.into_iter().rev() {
            rows = Ok(rank
                .join()
                .map_err(|_| Error::Peer("a rank panicked".into()))??);
        }
        rows
    })
}

fn pipe(e: std::io::Error) -> Error {
    Error::Peer(format!("a rank of the bench is gone: {e}"))
}

/// Starts the ranks, tells them each other's addresses, and returns the rows of rank 0.
fn processes(args: &CollectivesArgs) -> Result<Vec<Row>> {
    let program = std::env::current_exe().map_err(pipe)?;
    let transport = format!("{:?}", args.transport).to_lowercase();
    let mut ranks: Vec<Child> = (0..args.world)
        .map(|rank| {
            let mut command = Command::new(&program);
            command.args(["bench", "collectives", "--transport", &transport]);
            for (flag, value) in [
                ("--world", args.world),
                ("--mib", args.mib),
                ("--nodes", args.nodes),
                ("--rank", rank),
            ] {
                command.arg(flag).arg(value.to_string());
            }
            let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
            command.spawn().map_err(pipe)
        })
        .collect::<Result<_>>()?;
    let mut outputs: Vec<_> = (ranks.iter_mut())
        .map(|rank| BufReader::new(rank.stdout.take().expect("piped")))
        .collect();
    let mut addrs = String::new();
    for output in &mut outputs {
        output.read_line(&mut addrs).map_err(pipe)?;
    }
    for rank in &mut ranks {
        let mut input = rank.stdin.take().expect("piped");
        input.write_all(addrs.as_bytes()).map_err(pipe)?;
    }
    let mut rows = String::new();
    outputs[0].read_to_string(&mut rows).map_err(pipe)?;
    for (i, rank) in ranks.iter_mut().enumerate() {
        let status = rank.wait().map_err(pipe)?;
        if !status.success() {
            return Err(Error::Peer(format!("rank {i} of the bench: {status}")));
        }
    }
    serde_json::from_str(&rows)
        .map_err(|e| Error::Peer(format!("rank 0 of the bench printed {rows:?}: {e}")))
}

fn be_rank(args: &CollectivesArgs, rank: usize) -> Result<()> {
    let (world, nodes) = (usize::from(args.world), usize::from(args.nodes));
    let listener = TcpListener::bind("127.0.0.1:0").map_err(pipe)?;
    let addr = listener.local_addr().map_err(pipe)?;
    super::print(&format!("{addr}\n"))?;
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).map_err(pipe)?;
    let addrs: Vec<SocketAddr> = text
        .lines()
        .map(|line| line.parse())
        .collect::<std::result::Result<_, _>>()
        .map_err(|e| Error::Peer(format!("addresses of the bench: {e}")))?;
    let groups = connect(Bootstrap {
        topology: Topology {
            rank,
            num_nodes: nodes,
            local_size: world / nodes,
        },
        listener,
        addrs,
        token: [0; 32],
        options: CommOptions {
            timeout: Duration::from_secs(60),
            local: match args.transport {
                Transport::Tcp => LocalTransport::Tcp,
                _ => LocalTransport::Shm,
            },
        },
    })?;
    let rows = measure(args, &groups)?;
    if rank == 0 {
        print_rows(true, rows.into_iter().map(Ok))?;
    }
    Ok(())
}

/// Measures every collective on the world group, as this rank sees it.
fn measure(args: &CollectivesArgs, groups: &Groups) -> Result<Vec<Row>> {
    let group = &*groups.world;
    let (world, bytes) = (group.size(), usize::from(args.mib) << 20);
    let piece = bytes / size_of::<f32>() / world;
    let whole: Vec<f32> = (0..piece * world)
        .map(|i| (i % 1000) as f32 * 1e-3 + group.rank() as f32)
        .collect();
    let shard = vec![1.0f32; piece];
    let (mut out, mut out_shard) = (vec![0.0f32; piece * world], vec![0.0f32; piece]);
    let sizes = vec![piece * size_of::<f32>(); world];
    let mut rows = Vec::new();
    let mut time = |op: &str, call: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        call()?;
        let mut best = f64::INFINITY;
        for _ in 0..REPEATS {
            group.barrier()?;
            let start = Instant::now();
            call()?;
            group.barrier()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        rows.push(Row {
            op: op.into(),
            world,
            nodes: usize::from(args.nodes),
            transport: format!("{:?}", args.transport).to_lowercase(),
            bytes,
            ms: best * 1e3,
        });
        Ok(())
    };
    use bytemuck::{cast_slice, cast_slice_mut};
    time("all_gather", &mut || {
        group.all_gather(cast_slice(&shard), cast_slice_mut(&mut out))
    })?;
    time("reduce_scatter", &mut || {
        group.reduce_scatter(&whole, &mut out_shard)
    })?;
    time("all_reduce", &mut || {
        out.copy_from_slice(&whole);
        group.all_reduce(&mut out, ReduceOp::Sum)
    })?;
    time("all_to_all", &mut || {
        let (send, recv) = (cast_slice(&whole), cast_slice_mut(&mut out));
        group.all_to_all(send, &sizes, recv, &sizes)
    })?;
    Ok(rows)
}
