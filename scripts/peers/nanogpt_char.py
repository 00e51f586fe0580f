"""Trains nanoGPT's small CPU character model (its `train_shakespeare_char` settings with the README's CPU flags).

    python scripts/peers/nanogpt_char.py --text tinyshakespeare.txt --seed 1337 --steps 2000 --threads 2 [--out DIR]

Prints one JSON object. `val_loss` is the mean over the whole validation split, in consecutive windows of 64.
`train_seconds` is the training steps alone; `seconds` adds the sampled evaluations that nanoGPT makes along the way
(--eval-every 0 leaves them out). The final whole-split evaluation is in neither. Progress goes to stderr.
--out DIR also writes the result, with the history of sampled losses, to DIR/seed-N.json.

Two choices of ours: AdamW is torch's fused one, the fastest it has on a CPU (nanoGPT fuses only on CUDA), and exactly
--steps updates are made (nanoGPT's loop makes one more). GELU is the exact one, as in nanoGPT, unless --gelu tanh.
"""

import argparse
import json
import math
import pathlib
import sys
import time

import torch

from gpt import Gpt, count, decay_groups, step_flops

LAYERS, HEADS, WIDTH, BLOCK, BATCH = 4, 4, 128, 64, 12
PEAK_LR, FINAL_LR, WARMUP = 1e-3, 1e-4, 100


def learning_rate(step, steps):
    if step < WARMUP:
        return PEAK_LR * (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return FINAL_LR + 0.5 * (1 + math.cos(math.pi * done)) * (PEAK_LR - FINAL_LR)


def sample(tokens):
    """A batch of windows at random places, and the same windows one character later."""
    starts = torch.randint(len(tokens) - BLOCK, (BATCH, 1))
    windows = tokens[starts + torch.arange(BLOCK + 1)]
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def whole_split_loss(model, tokens, rows=64):
    windows = (len(tokens) - 1) // BLOCK
    inputs = tokens[: windows * BLOCK].view(windows, BLOCK)
    targets = tokens[1 : windows * BLOCK + 1].view(windows, BLOCK)
    total = 0.0
    for x, y in zip(inputs.split(rows), targets.split(rows)):
        total += model(x, y).item() * len(x)
    return total / windows


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--text", type=pathlib.Path, required=True)
    cli.add_argument("--seed", type=int, default=1337)
    cli.add_argument("--steps", type=int, default=2000)
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--eval-every", type=int, default=250)
    cli.add_argument("--eval-iters", type=int, default=20)
    cli.add_argument("--gelu", choices=["exact", "tanh"], default="exact")
    cli.add_argument("--out", type=pathlib.Path)
    args = cli.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    text = args.text.read_text(encoding="utf-8")
    index = {char: i for i, char in enumerate(sorted(set(text)))}
    tokens = torch.tensor([index[char] for char in text])
    cut = int(0.9 * len(tokens))
    train, val = tokens[:cut], tokens[cut:]

    gelu = "none" if args.gelu == "exact" else "tanh"
    model = Gpt(len(index), BLOCK, LAYERS, WIDTH, HEADS, bias=False, gelu=gelu)
    model.init(residual_std=0.02 / math.sqrt(2 * LAYERS))
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=PEAK_LR, betas=(0.9, 0.99), eps=1e-8, fused=True)

    history = []

    @torch.no_grad()
    def evaluate(step):
        means = [sum(model(*sample(part)).item() for _ in range(args.eval_iters)) / args.eval_iters for part in (train, val)]
        history.append({"step": step, "train": means[0], "val": means[1]})
        print(f"step {step}: sampled train {means[0]:.4f}, val {means[1]:.4f}", file=sys.stderr)

    training = evaluating = 0.0
    for step in range(args.steps + 1):
        start = time.perf_counter()
        if args.eval_every and (step % args.eval_every == 0 or step == args.steps):
            evaluate(step)
        middle = time.perf_counter()
        evaluating += middle - start
        if step == args.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        optimizer.zero_grad(set_to_none=True)
        loss = model(*sample(train))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        training += time.perf_counter() - middle

    flops = step_flops(BATCH, BLOCK, LAYERS, WIDTH, len(index)) * args.steps
    result = {
        "peer": "torch nanogpt recipe",
        "version": torch.__version__,
        "seed": args.seed,
        "steps": args.steps,
        "threads": args.threads,
        "params": count(model),
        "train_seconds": round(training, 3),
        "seconds": round(training + evaluating, 3),
        "val_loss": whole_split_loss(model, val),
        "sampled_val_loss": history[-1]["val"] if history else None,
        "gflops": round(flops / training / 1e9, 2),
    }
    print(json.dumps(result))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        report = json.dumps({**result, "history": history}, indent=1)
        (args.out / f"seed-{args.seed}.json").write_text(report + "\n")


if __name__ == "__main__":
    main()
