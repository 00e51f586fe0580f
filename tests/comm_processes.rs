//! Ranks that are processes: this test binary starts itself again, once a rank.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use train::Result;
use train::comm::{Bootstrap, CommOptions, Groups, LocalTransport, ReduceOp, Topology, connect};

/// Environment variable of a rank: "rank nodes local_size transport task".
const RANK: &str = "COMM_TEST_RANK";

/// Not a test: what a rank runs.
#[test]
fn be_a_rank() {
    let Ok(role) = std::env::var(RANK) else {
        return;
    };
    let words: Vec<&str> = role.split(' ').collect();
    let number = |i: usize| words[i].parse::<usize>().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    say(&format!("addr {}", listener.local_addr().unwrap()));
    let mut lines = std::io::stdin().lines();
    let addrs: Vec<SocketAddr> = (lines.next().unwrap().unwrap())
        .split(' ')
        .map(|addr| addr.parse().unwrap())
        .collect();
    let groups = connect(Bootstrap {
        topology: Topology {
            rank: number(0),
            num_nodes: number(1),
            local_size: number(2),
        },
        listener,
        addrs,
        token: [3; 32],
        options: CommOptions {
            timeout: Duration::from_secs(60),
            local: match words[3] {
                "shm" => LocalTransport::Shm,
                _ => LocalTransport::Tcp,
            },
        },
    })
    .unwrap();
    let ended = task(words[4], &groups);
    say(&match ended {
        Ok(()) => "end".into(),
        Err(error) => format!("error {error}"),
    });
}

fn say(line: &str) {
    // Not through println!, which the test harness catches. A line of its own: the harness leaves
    // "test be_a_rank ... " without an end.
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n@{line}").unwrap();
    out.flush().unwrap();
}

fn task(name: &str, groups: &Groups) -> Result<()> {
    let rank = groups.topology.rank;
    match name {
        "sums" => {
            for len in [1, 1000, 100_003] {
                let mut data: Vec<f32> = (0..len).map(|i| (i % 7 + rank) as f32).collect();
                groups.world.all_reduce(&mut data, ReduceOp::Sum)?;
                let world = groups.topology.world();
                let ranks = (0..world).sum::<usize>();
                for (i, value) in data.iter().enumerate() {
                    assert_eq!(*value, (i % 7 * world + ranks) as f32);
                }
            }
            Ok(())
        }
        // Until somebody is killed.
        "forever" => {
            let piece = vec![rank as u8; 300_000];
            let mut all = vec![0; piece.len() * groups.topology.world()];
            say("running");
            loop {
                groups.world.all_gather(&piece, &mut all)?;
                groups.local.barrier()?;
            }
        }
        // Rank 0 waits for the others, who do something else.
        "idle" => {
            say("running");
            if rank == 0 {
                return groups.world.barrier();
            }
            std::thread::sleep(Duration::from_secs(60));
            Ok(())
        }
        "abort" => {
            if rank == 1 {
                groups.abort("the disk is full");
            }
            groups.world.barrier()
        }
        other => panic!("no task {other}"),
    }
}

struct Rank {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Rank {
    /// The next line that the rank says.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line).unwrap() == 0 {
                return "nothing more".into();
            }
            if let Some(said) = line.trim_end().strip_prefix('@') {
                return said.to_owned();
            }
        }
    }
}

/// Ends with the test, however that ends.
impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(nodes: usize, local_size: usize, transport: &str, task: &str) -> Vec<Rank> {
    let mut ranks: Vec<Rank> = (0..nodes * local_size)
        .map(|rank| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "be_a_rank", "--nocapture"])
                .env(
                    RANK,
                    format!("{rank} {nodes} {local_size} {transport} {task}"),
                )
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let output = BufReader::new(child.stdout.take().unwrap());
            Rank { child, output }
        })
        .collect();
    let addrs: Vec<String> = (ranks.iter_mut())
        .map(|rank| rank.hear().strip_prefix("addr ").unwrap().to_owned())
        .collect();
    for rank in &mut ranks {
        let mut input = rank.child.stdin.take().unwrap();
        writeln!(input, "{}", addrs.join(" ")).unwrap();
    }
    ranks
}

#[test]
fn processes_sum_over_shared_memory_and_tcp() {
    for (nodes, local_size, transport) in [(1, 3, "shm"), (1, 2, "tcp"), (2, 2, "shm")] {
        for mut rank in start(nodes, local_size, transport, "sums") {
            assert_eq!(rank.hear(), "end");
            assert!(rank.child.wait().unwrap().success());
        }
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    for (nodes, local_size, transport) in [(1, 3, "shm"), (1, 3, "tcp"), (2, 2, "shm")] {
        for task in ["forever", "idle"] {
            let mut ranks = start(nodes, local_size, transport, task);
            for rank in &mut ranks {
                assert_eq!(rank.hear(), "running");
            }
            ranks[2].child.kill().unwrap();
            let killed = Instant::now();
            let mut waiting = if task == "idle" { 1 } else { ranks.len() };
            for (i, rank) in ranks.iter_mut().enumerate().filter(|(i, _)| *i != 2) {
                if waiting == 0 {
                    break;
                }
                waiting -= 1;
                let said = rank.hear();
                assert!(
                    said.contains("error peer: rank 2 is gone"),
                    "rank {i}: {said}"
                );
            }
            // Far from the timeout of 60 s.
            assert!(killed.elapsed() < Duration::from_secs(30));
        }
    }
}

#[test]
fn an_abort_ends_all_with_its_reason() {
    for mut rank in start(1, 3, "shm", "abort") {
        let said = rank.hear();
        assert!(said.contains("rank 1 stopped: the disk is full"), "{said}");
    }
}

#[test]
fn nothing_is_left_in_shared_memory() {
    let of_ranks = |ranks: &[Rank]| {
        let ids: Vec<u32> = ranks.iter().map(|rank| rank.child.id()).collect();
        let maps = |id: &u32| std::fs::read_to_string(format!("/proc/{id}/maps")).unwrap();
        ids.iter().map(maps).collect::<Vec<_>>()
    };
    let mut ranks = start(1, 2, "shm", "idle");
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "running");
    }
    for maps in of_ranks(&ranks) {
        let line = maps.lines().find(|line| line.contains("/dev/shm/train-"));
        assert!(
            line.is_some_and(|line| line.contains("(deleted)")),
            "{maps}"
        );
    }
}

#[test]
fn strangers_do_not_end_the_job() {
    let world = 2;
    let listeners: Vec<_> = (0..world)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    let addrs: Vec<SocketAddr> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
    // One says nothing, one something else, one leaves at once; all before the ranks are there.
    let silent = TcpStream::connect(addrs[0]).unwrap();
    let mut rude = TcpStream::connect(addrs[0]).unwrap();
    rude.write_all(
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\nand more than a hello has bytes, much more",
    )
    .unwrap();
    drop(TcpStream::connect(addrs[0]).unwrap());
    let bootstrap = |(rank, listener), token| Bootstrap {
        topology: Topology {
            rank,
            num_nodes: 1,
            local_size: world,
        },
        listener,
        addrs: addrs.clone(),
        token,
        options: CommOptions {
            timeout: Duration::from_secs(60),
            ..CommOptions::default()
        },
    };
    let mut ranks = listeners.into_iter().enumerate();
    let first = bootstrap(ranks.next().unwrap(), [1; 32]);
    let second = bootstrap(ranks.next().unwrap(), [1; 32]);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(first)?.world.barrier());
        // Of another job: refused with an error of its own.
        let other = bootstrap((1, TcpListener::bind("127.0.0.1:0").unwrap()), [2; 32]);
        let refused = connect(other).map(|_| ()).unwrap_err().to_string();
        assert!(refused.contains("another job"), "{refused}");
        let second = scope.spawn(|| connect(second)?.world.barrier());
        first.join().unwrap().unwrap();
        second.join().unwrap().unwrap();
    });
    drop(silent);
    let mut rest = Vec::new();
    let _ = rude.read_to_end(&mut rest);
    assert!(rest.is_empty(), "{rest:?}");
}

#[test]
fn missing_ranks_are_named_when_connecting() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    // Nobody listens at the first address any more.
    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let bootstrap = Bootstrap {
        topology: Topology {
            rank: 1,
            num_nodes: 1,
            local_size: 3,
        },
        listener,
        addrs: vec![closed, addr, addr],
        token: [1; 32],
        options: CommOptions {
            timeout: Duration::from_millis(600),
            ..CommOptions::default()
        },
    };
    let text = connect(bootstrap).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("ranks 0, 2"), "{text}");
    assert!(text.contains("refused"), "{text}");
}
