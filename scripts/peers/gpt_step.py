"""Measures one PyTorch GPT-2 training step on the CPU: forward, loss, backward, fused AdamW, and reading the loss.

    python scripts/peers/gpt_step.py --layers 4 --d-model 256 --heads 4 --seq 256 --batch 8 --vocab 4096 \
        --steps 20 --threads 2 [--compile] [--untied] [--dtype f32|bf16] [--embedding-std 0.02]

Prints one JSON object. `step_ms` is the median of the timed steps, after --warmup steps that are not counted.
Batches are random and are drawn outside the timed part. bf16 is torch's autocast over f32 weights.
"""

import argparse
import json
import resource
import statistics
import time

import torch

from gpt import Gpt, count, step_flops


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("layers", "d-model", "heads", "seq", "batch", "vocab", "steps"):
        cli.add_argument(f"--{flag}", type=int, required=True)
    cli.add_argument("--warmup", type=int, default=2)
    cli.add_argument("--threads", type=int)
    cli.add_argument("--compile", action="store_true")
    cli.add_argument("--untied", action="store_true")
    cli.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    cli.add_argument("--embedding-std", type=float, default=0.02)
    args = cli.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    model = Gpt(args.vocab, args.seq, args.layers, args.d_model, args.heads, tied=not args.untied)
    model.init(embedding_std=args.embedding_std)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    forward = torch.compile(model) if args.compile else model

    def step(inputs, targets):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    seconds = []
    for _ in range(args.warmup + args.steps):
        inputs, targets = torch.randint(args.vocab, (2, args.batch, args.seq))
        start = time.perf_counter()
        loss = step(inputs, targets)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[args.warmup :])
    flops = step_flops(args.batch, args.seq, args.layers, args.d_model, args.vocab)
    print(
        json.dumps(
            {
                "peer": "torch",
                "version": torch.__version__,
                "compile": args.compile,
                "dtype": args.dtype,
                "threads": torch.get_num_threads(),
                "params": count(model),
                "step_ms": round(median * 1e3, 3),
                "tokens_per_s": round(args.batch * args.seq / median, 1),
                "gflops": round(flops / median / 1e9, 2),
                "best_gflops": round(flops / min(seconds[args.warmup :]) / 1e9, 2),
                "loss": loss,
                "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
