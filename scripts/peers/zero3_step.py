"""Measures one training step of DeepSpeed's ZeRO-3 on CPU ranks: forward, loss, backward, clipping, AdamW, reading the loss.

    torchrun --nproc-per-node 2 scripts/peers/zero3_step.py --layers 4 --d-model 256 --heads 4 --seq 256 --batch 4 \
        --vocab 4096 --steps 8 --threads 1 [--optimizer cpu_adam|torch]

--batch and --threads are of a rank. Rank 0 prints one JSON object, with rates of all ranks together; `step_ms` is the
median over the timed steps, each as long as on its slowest rank. Batches are random and are drawn outside the timed
part. The optimizer is DeepSpeed's own CPU kernel where it builds (it needs a C++ compiler and ninja), and torch's
fused AdamW otherwise; the row says which.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time

# The folder of this Python holds ninja, which builds DeepSpeed's kernels.
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

from gpt import Gpt, count, step_flops


def cpu_adam(params):
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params, lr=3e-4, weight_decay=0.1, adamw_mode=True)
    except Exception as error:  # whatever a failed build raises
        print(f"no cpu_adam, torch's AdamW instead: {error}", file=sys.stderr)
        return None


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("layers", "d-model", "heads", "seq", "batch", "vocab", "steps"):
        cli.add_argument(f"--{flag}", type=int, required=True)
    cli.add_argument("--warmup", type=int, default=2)
    cli.add_argument("--threads", type=int, default=1)
    cli.add_argument("--optimizer", choices=["cpu_adam", "torch"], default="cpu_adam")
    args = cli.parse_args()
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(args.threads)

    torch.manual_seed(0)
    model = Gpt(args.vocab, args.seq, args.layers, args.d_model, args.heads).init()
    num_params = count(model)
    optimizer = cpu_adam(model.parameters()) if args.optimizer == "cpu_adam" else None
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    torch.manual_seed(1 + rank)
    seconds = []
    for _ in range(args.warmup + args.steps):
        inputs, targets = torch.randint(args.vocab, (2, args.batch, args.seq))
        dist.barrier()
        start = time.perf_counter()
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        loss = loss.item()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds[args.warmup :], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    median = statistics.median(slowest.tolist())
    flops = world * step_flops(args.batch, args.seq, args.layers, args.d_model, args.vocab)
    if rank == 0:
        print(
            json.dumps(
                {
                    "peer": "deepspeed_zero3",
                    "version": deepspeed.__version__,
                    "torch": torch.__version__,
                    "optimizer": type(optimizer).__name__,
                    "world": world,
                    "threads": torch.get_num_threads(),
                    "params": num_params,
                    "step_ms": round(median * 1e3, 3),
                    "tokens_per_s": round(world * args.batch * args.seq / median, 1),
                    "gflops": round(flops / median / 1e9, 2),
                    "loss": loss,
                    "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
                }
            ),
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
