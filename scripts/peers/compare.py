#!/usr/bin/env python3
"""Ours beside the peers, alternately, on one machine in one sitting; prints ratios.

usage: compare.py step|optimizer|collectives|zero3|shakespeare [--rounds 3] [--seeds 1 2 3] [--threads 2] [--text FILE] [--train PATH]

step         the training step at three sizes and with N(0,1) embeddings: eager and compiled PyTorch
optimizer    nanoseconds a parameter at 2^26: PyTorch's fused and default AdamW, bitsandbytes' 8-bit
collectives  64 MiB between 2 and 4 processes: gloo; and ours over TCP, for comparison
zero3        a training step on 2 ranks of 1 thread: DeepSpeed's ZeRO-3; and ours as one process of 2 threads with
             the same tokens a step. Medians over rounds, as well as the best
shakespeare  nanoGPT's character recipe (--text FILE): loss on the whole validation split and seconds, ours of
             the whole process, PyTorch's of training (train_seconds) and with its evaluations (seconds)

Run it with the Python that has the peers (see README.md). The best of all rounds counts on both sides.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SHAPES = [
    # layers, width, heads, sequence, batch, vocabulary, N(0,1) embeddings
    (4, 256, 4, 256, 8, 4096, False),
    (4, 256, 4, 256, 8, 4096, True),
    (6, 384, 6, 256, 8, 8192, False),
    (12, 768, 12, 256, 4, 50257, False),
]


def lines(command):
    """The JSON objects that a command prints, one a line."""
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    # `train launch` puts the rank in front.
    printed = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    return [json.loads(line) for line in printed if line.startswith("{")]


def peer(script, *arguments):
    return lines([sys.executable, HERE / script, *arguments])


def step(args):
    ours = {shape: 0.0 for shape in SHAPES}
    limit = dict(ours)
    memory = {}
    torch = {(shape, compiled): 0.0 for shape in SHAPES for compiled in (False, True)}
    for _ in range(args.rounds):
        for shape in SHAPES:
            layers, width, heads, seq, batch, vocab, unit = shape
            numbers = ",".join(map(str, shape[:6]))
            command = [args.train, "bench", "step", "--shape", numbers, "--threads", args.threads]
            row = lines(command + (["--unit-normal-embedding"] if unit else []))[0]
            ours[shape] = max(ours[shape], row["gflops"])
            limit[shape] = max(limit[shape], row["gemm_limit_gflops"])
            memory[shape, "ours"] = row["peak_rss_mib"]
            for compiled in (False, True):
                arguments = ["--layers", layers, "--d-model", width, "--heads", heads, "--seq", seq]
                arguments += ["--batch", batch, "--vocab", vocab, "--steps", 8, "--threads", args.threads]
                arguments += ["--compile"] if compiled else []
                arguments += ["--embedding-std", 1] if unit else []
                row = peer("gpt_step.py", *arguments)[0]
                torch[shape, compiled] = max(torch[shape, compiled], row["gflops"])
                memory[shape, compiled] = row["peak_rss_mib"]
    for shape in SHAPES:
        eager, compiled = torch[shape, False], torch[shape, True]
        print(json.dumps({
            "shape": shape,
            "gflops": round(ours[shape], 1),
            "torch_eager": round(eager, 1),
            "torch_compile": round(compiled, 1),
            "times_the_faster": round(ours[shape] / max(eager, compiled), 2),
            "gemm_limit": round(limit[shape], 1),
            "share_of_limit": round(ours[shape] / limit[shape], 3),
            "peak_rss_mib": [round(memory[shape, who]) for who in ("ours", False, True)],
        }), flush=True)


def optimizer(args):
    best = {}
    for _ in range(args.rounds):
        rows = lines([args.train, "bench", "optimizer", "--log2-n", 26, "--threads", args.threads])
        named = [(f"ours {r['name']} {r['state']} {r.get('block') or ''}".strip(), r["ns_per_param"]) for r in rows]
        rows = peer("adamw_step.py", "--log2-n", 26, "--threads", args.threads)
        named += [(f"{r['peer']} {r.get('optimizer', '')}".strip(), r["ns_per_param"]) for r in rows if "ns_per_param" in r]
        for name, ns in named:
            best[name] = min(ns, best.get(name, ns))
    for name, ns in best.items():
        print(json.dumps({"optimizer": name, "ns_per_param": round(ns, 3)}), flush=True)


def collectives(args):
    for world in (2, 4):
        gloo, best = {}, {}
        for _ in range(args.rounds):
            for row in peer("gloo_bench.py", "--world", world):
                gloo[row["op"]] = min(row["ms"], gloo.get(row["op"], row["ms"]))
            for transport in ("shm", "tcp"):
                command = [args.train, "bench", "collectives", "--world", world, "--transport", transport]
                for row in lines(command):
                    key = row["op"], transport
                    best[key] = min(row["ms"], best.get(key, row["ms"]))
        for op, ms in gloo.items():
            ours, tcp = best[op, "shm"], best[op, "tcp"]
            print(json.dumps({
                "op": op,
                "world": world,
                "gloo_ms": round(ms, 1),
                "ours_ms": round(ours, 1),
                "times_the_faster": round(ms / ours, 2),
                "ours_tcp_ms": round(tcp, 1),
                "times_the_faster_tcp": round(ms / tcp, 2),
            }), flush=True)


def zero3(args):
    layers, width, heads, seq, batch, vocab = 4, 256, 4, 256, 4, 4096
    launch = [args.train, "launch", "--nproc-per-node", 2, "--"]
    sharded = ["bench", "step", "--threads", 1, "--shape", f"{layers},{width},{heads},{seq},{batch},{vocab}"]
    whole = ["bench", "step", "--threads", 2, "--shape", f"{layers},{width},{heads},{seq},{2 * batch},{vocab}"]
    torchrun = [pathlib.Path(sys.executable).parent / "torchrun", "--nproc-per-node", 2]
    arguments = ["--layers", layers, "--d-model", width, "--heads", heads, "--seq", seq, "--batch", batch]
    arguments += ["--vocab", vocab, "--steps", 8, "--threads", 1]
    commands = {
        "ours 2 x 1": launch + sharded,
        # DeepSpeed keeps weights that are used again soon (stage3_max_reuse_distance), which here is all of them.
        "ours 2 x 1, kept": launch + sharded + ["--no-reshard"],
        "deepspeed 2 x 1": torchrun + [HERE / "zero3_step.py", *arguments],
        "ours 1 x 2": [args.train] + whole,
    }
    rows = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, command in commands.items():
            rows[name].append(lines(command)[0])
        print(json.dumps({name: round(rows[name][-1]["tokens_per_s"]) for name in commands}), flush=True)
    for name in commands:
        rates = [row["tokens_per_s"] for row in rows[name]]
        of_name = {"zero3": name, "tokens_per_s": round(statistics.median(rates)), "best": round(max(rates))}
        of_name |= {key: rows[name][0][key] for key in ("optimizer", "version") if key in rows[name][0]}
        of_name["peak_rss_mib"] = round(max(row["peak_rss_mib"] for row in rows[name]))
        if "comm_busy_ms" in rows[name][0] and rows[name][0]["world"] > 1:
            for key in ("step_ms", "comm_busy_ms", "comm_exposed_ms"):
                of_name[key] = round(statistics.median(row[key] for row in rows[name]), 1)
        print(json.dumps(of_name), flush=True)
    for sharded in ("ours 2 x 1", "ours 2 x 1, kept"):
        ours = [row["tokens_per_s"] for row in rows[sharded]]
        for name in ("deepspeed 2 x 1", "ours 1 x 2"):
            theirs = [row["tokens_per_s"] for row in rows[name]]
            print(json.dumps({
                "ratio": [sharded, name],
                "of_medians": round(statistics.median(ours) / statistics.median(theirs), 2),
                "of_bests": round(max(ours) / max(theirs), 2),
                "by_round": [round(a / b, 2) for a, b in zip(ours, theirs)],
            }), flush=True)


def shakespeare(args):
    config = HERE.parent.parent / "configs" / "shakespeare_char.toml"
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as runs:
            for state in ("f32", "8bit"):
                name = f"{state}-{seed}"
                sets = [f"data.text={args.text}", f"run.dir={runs}", f"run.name={name}", f"run.seed={seed}"]
                sets += [f"optimizer.state={state}", f"train.threads={args.threads}"]
                command = [args.train, "run", config] + [a for s in sets for a in ("--set", s)]
                start = time.time()
                lines(command)
                seconds = round(time.time() - start, 1)
                records = [json.loads(l) for l in open(pathlib.Path(runs, name, "metrics.jsonl"))]
                val = [r["val_loss"] for r in records if r["kind"] == "eval"][-1]
                print(json.dumps({"ours": state, "seed": seed, "seconds": seconds, "val_loss": val}), flush=True)
        row = peer("nanogpt_char.py", "--text", args.text, "--seed", seed, "--threads", args.threads)[0]
        print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "optimizer", "collectives", "zero3", "shakespeare"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of shakespeare")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text")
    parser.add_argument("--train", default=HERE.parent.parent / "target" / "release" / "train")
    args = parser.parse_args()
    if args.what == "shakespeare" and not args.text:
        parser.error("shakespeare needs --text FILE")
    {
        "step": step,
        "optimizer": optimizer,
        "collectives": collectives,
        "zero3": zero3,
        "shakespeare": shakespeare,
    }[args.what](args)


if __name__ == "__main__":
    main()
