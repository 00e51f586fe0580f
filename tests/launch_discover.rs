//! What each launcher's variables mean, and what is said when they are wrong.

use proptest::prelude::*;
use train::Error;
use train::launch::{Environment, Launch, LaunchFlags, Source, discover_from};

fn with(flags: &LaunchFlags, env: &[(&str, &str)]) -> Result<Launch, String> {
    let env: Environment = env.iter().copied().collect();
    discover_from(flags, &env).map_err(|e| match e {
        Error::Config(message) => message,
        other => panic!("{other:?}"),
    })
}

#[track_caller]
fn found(env: &[(&str, &str)]) -> Launch {
    with(&LaunchFlags::default(), env).unwrap()
}

/// Expects an error that has all `parts`.
#[track_caller]
fn refused(env: &[(&str, &str)], parts: &[&str]) {
    let message = with(&LaunchFlags::default(), env).expect_err(&format!("{env:?}"));
    for part in parts {
        assert!(message.contains(part), "{part:?} not in {message:?}");
    }
}

/// `base` without the names in `changes` and with those that have a value.
fn changed<'a>(
    base: &[(&'a str, &'a str)],
    changes: &[(&'a str, &'a str)],
) -> Vec<(&'a str, &'a str)> {
    let is_changed = |name: &str| changes.iter().any(|(changed, _)| *changed == name);
    let mut env: Vec<_> = base
        .iter()
        .copied()
        .filter(|(name, _)| !is_changed(name))
        .collect();
    env.extend(
        changes
            .iter()
            .copied()
            .filter(|(_, value)| !value.is_empty()),
    );
    env
}

/// rank, world, local rank, local size, node, nodes.
fn place(launch: &Launch) -> [usize; 6] {
    let l = launch;
    [
        l.rank,
        l.world,
        l.local_rank,
        l.local_size,
        l.node,
        l.num_nodes,
    ]
}

fn master(launch: &Launch) -> (&str, u16, bool) {
    let master = launch.master.as_ref().unwrap();
    (&master.addr, master.port, master.agent_store)
}

const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("GROUP_RANK", "1"),
    ("GROUP_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29400"),
    ("TORCHELASTIC_RESTART_COUNT", "3"),
    ("TORCHELASTIC_RUN_ID", "job7"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ("OMP_NUM_THREADS", "1"),
];

#[test]
fn torchrun_numbers_nodes_itself() {
    // Rank 5 of nodes of two is on node 1: torchrun places nodes as they arrive.
    let launch = found(TORCHRUN);
    assert_eq!(place(&launch), [5, 8, 1, 2, 1, 4]);
    assert_eq!(master(&launch), ("node0", 29400, true));
    assert_eq!((launch.source, launch.restart_count), (Source::Torchrun, 3));
    assert_eq!(launch.run_id, "job7");
    let text = launch.to_string();
    assert!(
        text.starts_with("ranks from torchrun: rank 5 of 8, local rank 1 of 2 on node 1 of 4"),
        "{text}"
    );
    let own_port = changed(TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "False")]);
    assert!(!master(&found(&own_port)).2);
}

#[test]
fn torchrun_variables_that_are_wrong_are_named() {
    for (change, parts) in [
        (("RANK", ""), ["WORLD_SIZE = \"8\"", "RANK is not"]),
        (("WORLD_SIZE", ""), ["RANK = \"5\"", "WORLD_SIZE is not"]),
        (("LOCAL_RANK", ""), ["RANK = \"5\"", "LOCAL_RANK is not"]),
        (
            ("LOCAL_WORLD_SIZE", ""),
            ["RANK = \"5\"", "LOCAL_WORLD_SIZE is not"],
        ),
        (("GROUP_RANK", ""), ["RANK = \"5\"", "GROUP_RANK is not"]),
        (("MASTER_ADDR", ""), ["RANK = \"5\"", "MASTER_ADDR is not"]),
        (("MASTER_PORT", ""), ["RANK = \"5\"", "MASTER_PORT is not"]),
        (("RANK", "8"), ["RANK = 8", "WORLD_SIZE = 8"]),
        (("RANK", "-1"), ["RANK = \"-1\"", "whole number"]),
        (("RANK", "5.0"), ["RANK = \"5.0\"", "whole number"]),
        (
            ("LOCAL_RANK", "2"),
            ["LOCAL_RANK = 2", "LOCAL_WORLD_SIZE = 2"],
        ),
        (
            ("LOCAL_WORLD_SIZE", "9"),
            ["LOCAL_WORLD_SIZE = 9", "WORLD_SIZE = 8"],
        ),
        (
            ("GROUP_RANK", "4"),
            ["GROUP_RANK = 4", "GROUP_WORLD_SIZE = 4"],
        ),
        (
            ("WORLD_SIZE", "99999999999"),
            ["WORLD_SIZE = 99999999999", "at most"],
        ),
        (
            ("MASTER_PORT", "99999"),
            ["MASTER_PORT = \"99999\"", "a port"],
        ),
        (("MASTER_PORT", "0"), ["MASTER_PORT = 0", "1..65535"]),
        (
            ("TORCHELASTIC_RESTART_COUNT", "x"),
            ["TORCHELASTIC_RESTART_COUNT = \"x\"", ""],
        ),
        (
            ("TRAIN_BIND_ADDR", "eth0"),
            ["TRAIN_BIND_ADDR = \"eth0\"", "IP address"],
        ),
    ] {
        refused(&changed(TORCHRUN, &[change]), &parts);
    }
}

#[test]
fn nodes_of_different_sizes_are_refused() {
    let parts = ["WORLD_SIZE = 3", "same number of ranks on every node"];
    for (rank, local, size, node) in [
        ("0", "0", "2", "0"),
        ("1", "1", "2", "0"),
        ("2", "0", "1", "1"),
    ] {
        let ragged = [
            ("RANK", rank),
            ("WORLD_SIZE", "3"),
            ("LOCAL_RANK", local),
            ("LOCAL_WORLD_SIZE", size),
            ("GROUP_RANK", node),
            ("GROUP_WORLD_SIZE", "2"),
        ];
        refused(&changed(TORCHRUN, &ragged), &parts);
    }
    let ragged = [("SLURM_NTASKS", "7"), ("SLURM_TASKS_PER_NODE", "4,3")];
    refused(&changed(SRUN, &ragged), &["SLURM_NTASKS = 7", parts[1]]);
}

#[test]
fn rank_and_world_size_alone_will_do_on_one_machine() {
    let env = [("RANK", "1"), ("WORLD_SIZE", "3"), ("MASTER_PORT", "1234")];
    let launch = found(&changed(&env, &[("MASTER_ADDR", "127.0.0.1")]));
    assert_eq!(place(&launch), [1, 3, 1, 3, 0, 1]);
    refused(
        &changed(&env, &[("MASTER_ADDR", "node0")]),
        &["LOCAL_RANK is not"],
    );
    let one = found(&[("RANK", "0"), ("WORLD_SIZE", "1")]);
    assert_eq!(
        (place(&one), one.master.is_none()),
        ([0, 1, 0, 1, 0, 1], true)
    );
}

#[test]
fn train_launch_is_torchrun_with_its_own_name_secret_and_socket() {
    let own = [
        ("TRAIN_LAUNCHER_PID", "77"),
        ("TRAIN_RUN_ID", "mine"),
        ("TRAIN_RENDEZVOUS_ON_STDIN", "1"),
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
    ];
    let launch = found(&changed(TORCHRUN, &own));
    assert_eq!(
        (launch.source, launch.run_id.as_str()),
        (Source::TrainLaunch, "mine")
    );
    assert!(launch.listens_on_stdin && !master(&launch).2);
    let secret = changed(
        TORCHRUN,
        &[("TRAIN_JOB_SECRET", "x"), ("TRAIN_RUN_ID", "mine")],
    );
    assert!(found(&secret).job_token != launch.job_token);
}

const SRUN: &[(&str, &str)] = &[
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NNODES", "2"),
    ("SLURM_TASKS_PER_NODE", "4(x2)"),
    ("SLURM_JOB_NODELIST", "gpu[07-08]"),
];

#[test]
fn slurm() {
    let launch = found(SRUN);
    assert_eq!(place(&launch), [5, 8, 1, 4, 1, 2]);
    assert_eq!(
        (launch.source, launch.run_id.as_str()),
        (Source::Slurm, "4711.0")
    );
    let (addr, port, agent_store) = master(&launch);
    assert!(
        addr == "gpu07" && (20000..30000).contains(&port) && !agent_store,
        "{port}"
    );
    // The same on every rank, another in another job.
    let other = changed(
        SRUN,
        &[
            ("SLURM_PROCID", "0"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NODEID", "0"),
        ],
    );
    assert_eq!(master(&found(&other)).1, port);
    let other = changed(SRUN, &[("SLURM_JOB_ID", "4712")]);
    assert_ne!(master(&found(&other)).1, port);
    let told = changed(SRUN, &[("MASTER_PORT", "5"), ("MASTER_ADDR", "ib0")]);
    assert_eq!(master(&found(&told)), ("ib0", 5, false));
    let on_one = [
        ("SLURM_NNODES", "1"),
        ("SLURM_NODEID", "0"),
        ("SLURM_TASKS_PER_NODE", "8"),
    ];
    assert_eq!(master(&found(&changed(SRUN, &on_one))).0, "127.0.0.1");
    // Without counts per node they are equal.
    let plain = changed(SRUN, &[("SLURM_TASKS_PER_NODE", ""), ("SLURM_STEP_ID", "")]);
    assert_eq!(place(&found(&plain)), [5, 8, 1, 4, 1, 2]);
}

#[test]
fn a_step_may_be_smaller_than_its_slurm_job() {
    let step = [
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_STEP_NUM_NODES", "2"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
        ("SLURM_STEP_NODELIST", "gpu[08-09]"),
        ("SLURM_PROCID", "1"),
        ("SLURM_LOCALID", "0"),
    ];
    let launch = found(&changed(SRUN, &step));
    assert_eq!(place(&launch), [1, 2, 0, 1, 1, 2]);
    assert_eq!(master(&launch).0, "gpu08");
}

#[test]
fn slurm_variables_do_not_break_a_run_of_one_rank() {
    let shells: [&[(&str, &str)]; 5] = [
        &[("SLURM_NTASKS", "1")],
        &[
            ("SLURM_NTASKS", "1"),
            ("SLURM_PROCID", "0"),
            ("SLURM_JOB_ID", "7"),
        ],
        // salloc's shell
        &[
            ("SLURM_NTASKS", "8"),
            ("SLURM_NNODES", "2"),
            ("SLURM_JOB_ID", "7"),
        ],
        // sbatch's script, as before and after Slurm counted it as a step
        &[
            ("SLURM_NTASKS", "8"),
            ("SLURM_PROCID", "0"),
            ("SLURM_LOCALID", "0"),
            ("ENVIRONMENT", "BATCH"),
        ],
        &[
            ("SLURM_NTASKS", "8"),
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_ID", "4294967291"),
            ("ENVIRONMENT", "BATCH"),
        ],
    ];
    for env in shells {
        let launch = found(env);
        assert_eq!(
            (launch.world, launch.source),
            (1, Source::Single),
            "{env:?}"
        );
        assert_eq!(
            launch.note.is_some(),
            env.contains(&("SLURM_NTASKS", "8")),
            "{env:?}"
        );
    }
    // A step of a batch script is one nevertheless.
    assert_eq!(found(&changed(SRUN, &[("ENVIRONMENT", "BATCH")])).world, 8);
}

#[test]
fn slurm_variables_that_are_wrong_are_named() {
    for (change, parts) in [
        (
            ("SLURM_NTASKS", ""),
            ["SLURM_PROCID = \"5\"", "SLURM_NTASKS is not"],
        ),
        (
            ("SLURM_LOCALID", ""),
            ["SLURM_PROCID = \"5\"", "SLURM_LOCALID is not"],
        ),
        (
            ("SLURM_PROCID", "9"),
            ["SLURM_PROCID = 9", "SLURM_NTASKS = 8"],
        ),
        (("SLURM_NODEID", "2"), ["SLURM_TASKS_PER_NODE", "no node 2"]),
        (
            ("SLURM_TASKS_PER_NODE", "4(y2)"),
            ["SLURM_TASKS_PER_NODE", "4(y2)"],
        ),
        (
            ("SLURM_JOB_NODELIST", "gpu["),
            ["SLURM_JOB_NODELIST", "gpu["],
        ),
        (
            ("SLURM_JOB_NODELIST", ""),
            ["MASTER_ADDR is not set", "2 nodes"],
        ),
        (
            ("SLURM_NTASKS", "eight"),
            ["SLURM_NTASKS = \"eight\"", "whole number"],
        ),
    ] {
        refused(&changed(SRUN, &[change]), &parts);
    }
}

const OPEN_MPI: &[(&str, &str)] = &[
    ("OMPI_COMM_WORLD_RANK", "3"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "prterun-host-99@1"),
];

const HYDRA: &[(&str, &str)] = &[
    ("PMI_RANK", "1"),
    ("PMI_SIZE", "2"),
    ("MPI_LOCALRANKID", "1"),
    ("MPI_LOCALNRANKS", "2"),
];

#[test]
fn mpi() {
    refused(
        OPEN_MPI,
        &["MASTER_ADDR is not set", "2 nodes", "--master-addr"],
    );
    let launch = found(&changed(OPEN_MPI, &[("MASTER_ADDR", "node0")]));
    assert_eq!(
        (place(&launch), launch.source),
        ([3, 4, 1, 2, 1, 2], Source::OpenMpi)
    );
    assert_eq!(master(&launch).0, "node0");
    let launch = found(HYDRA);
    assert_eq!(
        (place(&launch), launch.source),
        ([1, 2, 1, 2, 0, 1], Source::Pmi)
    );
    assert_eq!(master(&launch).0, "127.0.0.1");
    // mpirun under Slurm: srun's variables are about mpirun's daemons.
    let both = [SRUN, OPEN_MPI, &[("MASTER_ADDR", "node0")]].concat();
    assert_eq!(found(&both).source, Source::OpenMpi);
    // srun --mpi=pmi2 sets PMI_RANK, and knows nodes better.
    let both = [SRUN, &[("PMI_RANK", "5"), ("PMI_SIZE", "8")]].concat();
    assert_eq!(found(&both).source, Source::Slurm);
    // An MPI singleton.
    assert_eq!(found(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]).world, 1);
}

#[test]
fn mpi_variables_that_are_wrong_are_named() {
    refused(&HYDRA[..2], &["PMI_RANK = \"1\"", "MPI_LOCALRANKID is not"]);
    refused(&changed(HYDRA, &[("PMI_SIZE", "")]), &["PMI_SIZE is not"]);
    refused(
        &changed(HYDRA, &[("MPI_LOCALRANKID", "0")]),
        &["MPI_LOCALRANKID = 0", "machine by machine"],
    );
    refused(
        &changed(HYDRA, &[("MPI_LOCALNRANKS", "0")]),
        &["MPI_LOCALNRANKS = 0"],
    );
    let cyclic = [
        ("OMPI_COMM_WORLD_RANK", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ];
    refused(
        &changed(OPEN_MPI, &cyclic),
        &["OMPI_COMM_WORLD_RANK = 2", "--map-by slot"],
    );
}

fn by_hand() -> LaunchFlags {
    LaunchFlags {
        rank: Some(3),
        world_size: Some(4),
        ranks_per_node: Some(2),
        master_addr: Some("a".into()),
        master_port: Some(9),
        ..LaunchFlags::default()
    }
}

#[test]
fn flags_win() {
    let launch = with(&by_hand(), TORCHRUN).unwrap();
    assert_eq!(
        (place(&launch), launch.source),
        ([3, 4, 1, 2, 1, 2], Source::Flags)
    );
    assert_eq!(master(&launch), ("a", 9, false));
    let change = |change: fn(&mut LaunchFlags)| {
        let mut flags = by_hand();
        change(&mut flags);
        with(&flags, &[]).unwrap_err()
    };
    assert!(change(|f| f.ranks_per_node = Some(3)).contains("--ranks-per-node 3"));
    assert!(change(|f| f.rank = Some(4)).contains("--rank = 4"));
    assert!(change(|f| f.master_port = None).contains("--master-port"));
    assert!(change(|f| f.master_addr = None).contains("--master-addr"));
    assert!(change(|f| f.world_size = Some(0)).contains("--world-size"));
}

#[test]
fn emulated_nodes_split_the_ranks() {
    let emulate = |nodes, env: &[(&str, &str)]| {
        let flags = LaunchFlags {
            emulate_nodes: Some(nodes),
            ..LaunchFlags::default()
        };
        with(&flags, env)
    };
    let env = [
        ("RANK", "5"),
        ("WORLD_SIZE", "6"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
    ];
    let launch = emulate(3, &env).unwrap();
    assert_eq!(place(&launch), [5, 6, 1, 2, 2, 3]);
    assert_eq!(
        [launch.host_rank, launch.host_size, launch.num_hosts],
        [5, 6, 1]
    );
    assert!(launch.to_string().contains("node 2 of 3 (emulated)"));
    let passed_on = changed(&env, &[("TRAIN_EMULATE_NODES", "2")]);
    assert_eq!(place(&found(&passed_on)), [5, 6, 2, 3, 1, 2]);
    assert_eq!(emulate(6, &passed_on).unwrap().num_nodes, 6);
    assert!(
        emulate(4, &env)
            .unwrap_err()
            .contains("--emulate-nodes = 4 does not divide the 6 ranks")
    );
    assert!(
        emulate(0, &env)
            .unwrap_err()
            .contains("--emulate-nodes = 0")
    );
    assert!(emulate(2, TORCHRUN).unwrap_err().contains("4 machines"));
    assert!(
        emulate(2, &[])
            .unwrap_err()
            .contains("does not divide the 1 ranks")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Any mixture of the variables gives a place that is consistent, or an error.
    #[test]
    fn no_environment_panics(values in prop::collection::vec(
        (0usize..34, prop_oneof!["[0-9]{1,3}", "[0-4]", Just("18446744073709551615".to_string()), ".{0,6}"]), 0..16)
    ) {
        let names = [TORCHRUN, SRUN, OPEN_MPI, HYDRA, &[
            ("TRAIN_EMULATE_NODES", ""), ("TRAIN_BIND_ADDR", ""), ("SLURM_STEP_NUM_TASKS", ""),
            ("SLURM_NTASKS_PER_NODE", ""),
        ]].concat();
        let env: Environment = values.iter().map(|(i, v)| (names[i % names.len()].0, v.as_str())).collect();
        if let Ok(launch) = discover_from(&LaunchFlags::default(), &env) {
            prop_assert!(launch.rank < launch.world && launch.node < launch.num_nodes);
            prop_assert!(launch.local_rank < launch.local_size && launch.host_rank < launch.host_size);
            prop_assert_eq!(launch.master.is_some(), launch.world > 1);
            prop_assert_eq!(launch.host_size * launch.num_hosts, launch.world);
            let _ = launch.to_string();
        }
    }
}
