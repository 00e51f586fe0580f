"""Measures one AdamW step over a flat f32 vector: nanoseconds per parameter, the best of 7 steps after one uncounted.

    python scripts/peers/adamw_step.py --log2-n 26 --threads 2

Prints one JSON object per optimizer (torch fused, torch foreach, bitsandbytes 8-bit) and one for a plain copy of the
same vector, whose GB/s counts both the bytes read and the bytes written.
"""

import argparse
import json
import time

import torch

REPEATS = 7


def fastest(action):
    action()
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def fused(params):
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def foreach(params):
    return torch.optim.AdamW(params, lr=1e-3, foreach=True)


def eight_bit(params):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=1e-3)


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--log2-n", type=int, default=26)
    cli.add_argument("--threads", type=int, default=2)
    args = cli.parse_args()
    torch.set_num_threads(args.threads)
    size = 1 << args.log2_n

    for peer, name, make in [
        ("torch", "adamw_fused", fused),
        ("torch", "adamw_foreach", foreach),
        ("bitsandbytes", "adamw8bit", eight_bit),
    ]:
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(size))
        param.grad = torch.randn(size).mul_(1e-3)
        line = {"peer": peer, "optimizer": name, "num_params": size, "threads": args.threads}
        try:
            line["ns_per_param"] = round(fastest(make([param]).step) / size * 1e9, 4)
        except Exception as error:  # a peer that is missing or refuses the CPU must not hide the others
            line["error"] = repr(error)[:200]
        print(json.dumps(line), flush=True)
        del param

    source = torch.randn(size)
    target = torch.empty_like(source)
    seconds = fastest(lambda: target.copy_(source))
    rate = 2 * source.nbytes / seconds / 1e9
    print(json.dumps({"peer": "memcpy", "num_params": size, "threads": args.threads, "gb_per_s": round(rate, 2)}))


if __name__ == "__main__":
    main()
