//! Every collective against a naive twin, over every transport and topology.

use std::net::TcpListener;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::{Error, Result};

/// What carries the ranks of a test, which are threads.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// [`thread_groups`].
    Threads,
    /// [`connect`], with the ranks of a node over...
    Sockets(LocalTransport),
}

const KINDS: [Kind; 3] = [
    Kind::Threads,
    Kind::Sockets(LocalTransport::Shm),
    Kind::Sockets(LocalTransport::Tcp),
];

/// What each rank still needs to make its groups.
enum Start {
    Made(Groups),
    Connects(Bootstrap),
}

impl Start {
    fn groups(self) -> Result<Groups> {
        match self {
            Start::Made(groups) => Ok(groups),
            Start::Connects(bootstrap) => connect(bootstrap),
        }
    }
}

fn bootstraps(num_nodes: usize, local_size: usize, options: CommOptions) -> Vec<Bootstrap> {
    let world = num_nodes * local_size;
    let listeners: Vec<_> = (0..world)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    let addrs: Vec<_> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
    (listeners.into_iter().enumerate())
        .map(|(rank, listener)| Bootstrap {
            topology: Topology {
                rank,
                num_nodes,
                local_size,
            },
            listener,
            addrs: addrs.clone(),
            token: [7; 32],
            options,
        })
        .collect()
}

/// Runs `f` on every rank and returns what they return, in rank order.
fn on_ranks<T: Send>(
    kind: Kind,
    (num_nodes, local_size): (usize, usize),
    timeout: Duration,
    f: impl Fn(&Groups) -> T + Sync,
) -> Vec<T> {
    let starts: Vec<Start> = match kind {
        Kind::Threads => (thread_groups_within(num_nodes, local_size, timeout).into_iter())
            .map(Start::Made)
            .collect(),
        Kind::Sockets(local) => {
            let options = CommOptions { timeout, local };
            (bootstraps(num_nodes, local_size, options).into_iter())
                .map(Start::Connects)
                .collect()
        }
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (starts.into_iter())
            .map(|start| scope.spawn(|| f(&start.groups().unwrap())))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const LONG: Duration = Duration::from_secs(60);

/// Values whose sum depends on the order of adding.
fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| {
            let hash = (rank * 7919 + i * 104_729 + 1) as u32;
            let mixed = hash.wrapping_mul(2_654_435_769) >> 8;
            (mixed as f32 / (1 << 23) as f32 - 1.0) * 10f32.powi((mixed % 7) as i32)
        })
        .collect()
}

fn bytes(rank: usize, to: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (rank * 31 + to * 17 + i * 7) as u8)
        .collect()
}

/// The sum in the stated order: ranks in rank order inside a node, then nodes in node order.
fn naive_sum(num_nodes: usize, local_size: usize, value: impl Fn(usize) -> f32) -> f32 {
    let node = |n: usize| {
        (n * local_size..(n + 1) * local_size)
            .map(&value)
            .reduce(|a, b| a + b)
            .unwrap()
    };
    (0..num_nodes).map(node).reduce(|a, b| a + b).unwrap()
}

/// Runs `call` and checks that what arrived is what the formula says.
fn counted(group: &dyn Group, volume: LinkBytes, call: impl FnOnce() -> Result<()>) {
    let before = group.received();
    call().unwrap();
    assert_eq!(before + volume, group.received());
}

/// All collectives of one group whose ranks are `members`, against naive twins.
fn check_group(group: &dyn Group, members: &[usize], run_len: usize, len: usize) {
    let (me, size) = (group.rank(), group.size());
    let rank = members[me];
    assert_eq!(size, members.len());
    let sum = |value: &dyn Fn(usize) -> f32| {
        naive_sum(size / run_len, run_len, |place| value(members[place]))
    };
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();

    let mut gathered = vec![0; len * size];
    let volume = group.volume(Call::AllGather { piece_bytes: len });
    counted(group, volume, || {
        group.all_gather(&bytes(rank, 0, len), &mut gathered)
    });
    let expected: Vec<u8> = members.iter().flat_map(|&r| bytes(r, 0, len)).collect();
    assert_eq!(gathered, expected);

    let mut piece = vec![f32::NAN; len];
    let volume = group.volume(Call::ReduceScatter {
        piece_bytes: len * 4,
    });
    counted(group, volume, || {
        group.reduce_scatter(&values(rank, len * size), &mut piece)
    });
    let all: Vec<Vec<f32>> = (0..=members[size - 1])
        .map(|r| values(r, len * size))
        .collect();
    let expected: Vec<f32> = (0..len).map(|i| sum(&|r| all[r][me * len + i])).collect();
    assert_eq!(bits(&piece), bits(&expected));

    for op in [ReduceOp::Sum, ReduceOp::Max] {
        let mut data = values(rank, len);
        let volume = group.volume(Call::AllReduce { bytes: len * 4 });
        counted(group, volume, || group.all_reduce(&mut data, op));
        let all: Vec<Vec<f32>> = (0..=members[size - 1]).map(|r| values(r, len)).collect();
        let expected: Vec<f32> = (0..len)
            .map(|i| match op {
                ReduceOp::Sum => sum(&|r| all[r][i]),
                ReduceOp::Max => members.iter().map(|&r| all[r][i]).reduce(f32::max).unwrap(),
            })
            .collect();
        assert_eq!(bits(&data), bits(&expected));
    }

    // Sizes differ by pair, and some are 0.
    let size_of_pair = |from: usize, to: usize| match (from + 2 * to) % 4 {
        0 => 0,
        k => len * k / 2 + from,
    };
    let send_bytes: Vec<usize> = members.iter().map(|&to| size_of_pair(rank, to)).collect();
    let recv_bytes: Vec<usize> = members
        .iter()
        .map(|&from| size_of_pair(from, rank))
        .collect();
    let send: Vec<u8> = (members.iter().zip(&send_bytes))
        .flat_map(|(&to, &len)| bytes(rank, to, len))
        .collect();
    let mut recv = vec![0; recv_bytes.iter().sum()];
    let volume = group.volume(Call::AllToAll {
        recv_bytes: &recv_bytes,
    });
    counted(group, volume, || {
        group.all_to_all(&send, &send_bytes, &mut recv, &recv_bytes)
    });
    let expected: Vec<u8> = (members.iter().zip(&recv_bytes))
        .flat_map(|(&from, &len)| bytes(from, rank, len))
        .collect();
    assert_eq!(recv, expected);

    for (root, &root_rank) in members.iter().enumerate() {
        let mut data = bytes(rank, 1, len);
        let volume = group.volume(Call::Broadcast { bytes: len, root });
        counted(group, volume, || group.broadcast(&mut data, root));
        assert_eq!(data, bytes(root_rank, 1, len));
    }
    counted(group, group.volume(Call::Barrier), || group.barrier());
}

fn check_all(kind: Kind, (num_nodes, local_size): (usize, usize), len: usize) {
    on_ranks(kind, (num_nodes, local_size), LONG, |groups| {
        let topology = groups.topology;
        let world: Vec<usize> = (0..topology.world()).collect();
        let first = topology.node() * local_size;
        let node: Vec<usize> = (first..first + local_size).collect();
        let column: Vec<usize> = (topology.local_rank()..topology.world())
            .step_by(local_size)
            .collect();
        check_group(&*groups.world, &world, local_size, len);
        check_group(&*groups.local, &node, local_size, len);
        check_group(&*groups.cross, &column, column.len(), len);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn every_collective_matches_its_naive_twin(
        num_nodes in 1usize..4,
        local_size in 1usize..4,
        len in prop_oneof![Just(0usize), Just(1), 2usize..700, 4000usize..6000],
        kind in 0usize..3,
    ) {
        check_all(KINDS[kind], (num_nodes, local_size), len);
    }
}

#[test]
fn chunks_and_rings_wrap() {
    // More than all slots of a lane, and than what runs ahead over TCP.
    for kind in KINDS {
        check_all(kind, (1, 3), 600_001);
    }
    check_all(Kind::Threads, (2, 2), 300_001);
    check_all(Kind::Sockets(LocalTransport::Auto), (2, 2), 300_001);
}

/// What every rank's collective failed with.
fn failures(kind: Kind, f: impl Fn(&Groups) -> Result<()> + Sync) -> Vec<String> {
    on_ranks(kind, (1, 3), LONG, |groups| {
        // A rank whose own part fits learns from its next call.
        let later = || groups.world.barrier();
        let error = f(groups).and_then(|()| later()).unwrap_err();
        assert!(matches!(error, Error::Peer(_)), "{error}");
        // The first cause stays.
        let again = later().unwrap_err();
        assert_eq!(error.to_string(), again.to_string());
        error.to_string()
    })
}

#[test]
fn different_collectives_name_both_calls_and_ranks() {
    for kind in KINDS {
        for text in failures(kind, |groups| match groups.topology.rank {
            1 => groups.world.reduce_scatter(&[0.0; 6], &mut [0.0; 2]),
            _ => groups.world.all_gather(&[0; 8], &mut [0; 24]),
        }) {
            for part in ["rank 1 reduce_scatter of 8", "all_gather of 8"] {
                assert!(text.contains(part), "{kind:?}: {text}");
            }
        }
    }
}

#[test]
fn different_sizes_name_both() {
    for kind in KINDS {
        for text in failures(kind, |groups| {
            let len = if groups.topology.rank == 2 { 5 } else { 9 };
            groups.world.broadcast(&mut vec![0; len], 0)
        }) {
            let both = text.contains("of 5 bytes") && text.contains("of 9 bytes");
            assert!(both && text.contains("rank 2"), "{kind:?}: {text}");
        }
        for text in failures(kind, |groups| {
            let rank = groups.topology.rank;
            let mut recv_bytes = [4; 3];
            if rank == 2 {
                recv_bytes[0] = 7;
            }
            let mut recv = vec![0; recv_bytes.iter().sum()];
            groups
                .world
                .all_to_all(&[0; 12], &[4; 3], &mut recv, &recv_bytes)
        }) {
            let told = text.contains("rank 2 expects 7 bytes from rank 0, which sends 4");
            assert!(told, "{kind:?}: {text}");
        }
    }
}

#[test]
fn a_missing_rank_is_named_after_the_timeout() {
    for kind in KINDS {
        let texts = on_ranks(kind, (1, 3), Duration::from_millis(700), |groups| {
            if groups.topology.rank == 1 {
                std::thread::sleep(Duration::from_millis(1500));
                return groups.world.barrier().unwrap_err().to_string();
            }
            groups
                .world
                .all_gather(&[1], &mut [0; 3])
                .unwrap_err()
                .to_string()
        });
        for text in texts {
            assert!(text.contains("for rank 1"), "{kind:?}: {text}");
        }
    }
}

#[test]
fn a_missing_rank_is_named_by_those_who_wait_for_others_that_wait_for_it() {
    type Step = fn(&dyn Group) -> Result<()>;
    let steps: [Step; 4] = [
        |world| world.barrier(),
        |world| world.all_gather(&[1], &mut [0; 4]),
        |world| world.reduce_scatter(&[1.0; 4], &mut [0.0]),
        |world| world.all_to_all(&[0; 4], &[1; 4], &mut [0; 4], &[1; 4]),
    ];
    let check = |kind: Kind, step: Step| {
        on_ranks(kind, (2, 2), Duration::from_millis(900), |groups| {
            if groups.topology.rank == 3 {
                std::thread::sleep(Duration::from_millis(2500));
            }
            // Some ranks finish the first call without rank 3, and wait in a later one.
            let error = std::iter::repeat_with(|| step(&*groups.world)).find_map(Result::err);
            let text = error.unwrap().to_string();
            assert!(text.contains("for rank 3"), "{kind:?}: {text}");
        });
    };
    std::thread::scope(|scope| {
        for kind in KINDS {
            for step in steps {
                scope.spawn(move || check(kind, step));
            }
        }
    });
}

#[test]
fn shared_memory_is_unlinked_when_a_rank_fails() {
    let options = CommOptions {
        local: LocalTransport::Shm,
        ..CommOptions::default()
    };
    let mut ranks = bootstraps(1, 2, options);
    let (second, first) = (ranks.pop().unwrap(), ranks.pop().unwrap());
    let first = std::thread::spawn(move || connect(first).map(drop));
    let deadline = std::time::Instant::now() + LONG;
    let mesh = mesh::connect(second, deadline).unwrap();
    let control = mesh.get(handshake::Channel::Control, 0);
    let frame::Frame::ShmOffer(Ok(path)) = mesh::read_frame(control, 0, deadline).unwrap() else {
        panic!("no offer");
    };
    assert!(std::path::Path::new(&path).exists());
    drop(mesh);
    assert!(matches!(first.join().unwrap(), Err(Error::Peer(_))));
    assert!(!std::path::Path::new(&path).exists());
}

#[test]
fn an_abort_reaches_ranks_that_wait() {
    for kind in KINDS {
        for topology in [(1, 3), (2, 2)] {
            on_ranks(kind, topology, LONG, |groups| {
                let world = &groups.world;
                let met = world.barrier();
                if groups.topology.rank == 2 {
                    groups.abort("the loss is NaN");
                }
                let text = met.and_then(|()| world.barrier()).unwrap_err().to_string();
                assert!(text.contains("rank 2 stopped: the loss is NaN"), "{text}");
                let text = groups.local.barrier().unwrap_err().to_string();
                assert!(text.contains("rank 2 stopped"), "{text}");
            });
        }
    }
}

#[test]
fn a_rank_that_left_is_named() {
    for kind in KINDS {
        let starts = on_ranks(kind, (1, 3), LONG, |groups| {
            groups.world.barrier().unwrap();
            if groups.topology.rank == 1 {
                return None;
            }
            Some(
                groups
                    .world
                    .all_gather(&[1], &mut [0; 3])
                    .unwrap_err()
                    .to_string(),
            )
        });
        for text in starts.into_iter().flatten() {
            assert!(text.contains("rank 1 has ended"), "{kind:?}: {text}");
        }
    }
}

#[test]
fn a_panicking_rank_stops_the_others() {
    let mut ranks = thread_groups(1, 2);
    let (second, first) = (ranks.pop().unwrap(), ranks.pop().unwrap());
    let panics = std::thread::spawn(move || {
        let _groups = second;
        panic!("as this test wants");
    });
    let text = first.world.barrier().unwrap_err().to_string();
    assert!(text.contains("rank 1 stopped: it panicked"), "{text}");
    assert!(panics.join().is_err());
}

#[test]
fn an_abort_ends_what_the_communication_thread_waits_for() {
    let mut ranks = thread_groups(1, 2);
    let (_second, first) = (ranks.pop().unwrap(), ranks.pop().unwrap());
    let comm = Comm::new(first).unwrap();
    let booking = Booking::small(Purpose::Scalars, "barrier");
    let pending = comm.start(booking, |groups| {
        groups.world.barrier()?;
        Ok(Moved {
            value: (),
            elements: 0,
            bytes: LinkBytes::default(),
        })
    });
    comm.abort("enough");
    let text = pending.wait().unwrap_err().to_string();
    assert!(text.contains("rank 0 stopped: enough"), "{text}");
}

#[test]
fn all_ranks_of_a_job_hear_that_their_options_differ() {
    let mut ranks = bootstraps(1, 2, CommOptions::default());
    ranks[0].options.local = LocalTransport::Tcp;
    let connect = |bootstrap| connect(bootstrap).map(|_| ()).unwrap_err().to_string();
    std::thread::scope(|scope| {
        let second = ranks.pop().unwrap();
        let second = scope.spawn(move || connect(second));
        for text in [connect(ranks.pop().unwrap()), second.join().unwrap()] {
            assert!(
                text.contains("rank 1 has another comm.local")
                    || text.contains("rank 0 has another comm.local"),
                "{text}"
            );
        }
    });
}

#[test]
fn a_rank_of_another_version_is_told_so() {
    use std::io::{Read, Write};
    let mut ranks = bootstraps(1, 2, CommOptions::default());
    let second = ranks.pop().unwrap();
    // In place of rank 0: a listener of version 9.
    let listener = ranks.pop().unwrap().listener;
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut opening = [0; handshake::OPENING_BYTES];
        stream.read_exact(&mut opening).unwrap();
        stream
            .write_all(&handshake::Reply::Version(9).encode())
            .unwrap();
        opening
    });
    let text = connect(second).map(|_| ()).unwrap_err().to_string();
    assert!(
        text.contains("version 9") && text.contains("rank 0"),
        "{text}"
    );
    let opening = other.join().unwrap();
    assert_eq!(handshake::opening(&opening), Some(handshake::VERSION));

    // And the other way: a caller of version 9 hears this rank's, which waits for the right one.
    let options = CommOptions {
        timeout: Duration::from_millis(600),
        ..CommOptions::default()
    };
    let first = bootstraps(1, 2, options).remove(0);
    let addr = first.listener.local_addr().unwrap();
    let waiting = std::thread::spawn(move || connect(first).map(|_| ()).unwrap_err().to_string());
    let mut stream = std::net::TcpStream::connect(addr).unwrap();
    let mut hello = opening;
    hello[8] = 9;
    stream.write_all(&hello).unwrap();
    let mut reply = [0; handshake::REPLY_BYTES];
    stream.read_exact(&mut reply).unwrap();
    let [_, version] = [0, 8].map(|at| u32::from_le_bytes(reply[at..at + 4].try_into().unwrap()));
    assert_eq!(version, handshake::VERSION);
    let text = waiting.join().unwrap();
    assert!(
        text.contains("speaks version 9") && text.contains("rank 1"),
        "{text}"
    );
}
