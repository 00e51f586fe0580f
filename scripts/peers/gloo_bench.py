"""Measures gloo's collectives (torch.distributed) between processes of this machine, over loopback.

    python scripts/peers/gloo_bench.py --world 2 --mib 64

Prints one JSON object per collective: milliseconds as rank 0 sees them, the fastest of 5 calls between barriers after one
uncounted. `--mib` is what an all-gather gives, a reduce-scatter takes and an all-to-all moves in all on each rank, as
in `train bench collectives`; the all-reduce copies its input first, as there.
"""

import argparse
import json
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

REPEATS = 5


def fastest(action):
    action()
    best = float("inf")
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        action()
        dist.barrier()
        best = min(best, time.perf_counter() - start)
    return best


def rank_main(rank, world, mib, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    piece = (mib << 20) // 4 // world
    whole, shard = torch.randn(piece * world), torch.randn(piece)
    out, out_shard, data = torch.empty_like(whole), torch.empty_like(shard), torch.empty_like(whole)
    pieces = list(out.split(piece))
    for name, action in [
        ("all_gather", lambda: dist.all_gather(pieces, shard)),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(out_shard, whole)),
        ("all_reduce", lambda: dist.all_reduce(data.copy_(whole))),
        ("all_to_all", lambda: dist.all_to_all_single(out, whole)),
    ]:
        line = {"peer": "gloo", "op": name, "world": world, "bytes": mib << 20, "torch": torch.__version__}
        line["ms"] = round(fastest(action) * 1e3, 3)
        if rank == 0:
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--world", type=int, default=2)
    cli.add_argument("--mib", type=int, default=64)
    args = cli.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, (args.world, args.mib, port), nprocs=args.world)


if __name__ == "__main__":
    main()
