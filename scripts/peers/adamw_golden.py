"""Makes the golden numbers of the AdamW test: 20 steps of torch's f32 AdamW on 64 parameters.

    python scripts/peers/adamw_golden.py --out tests/golden

Parameter i (from 0) starts at sin(i + 1). Its gradient in step t (from 1) is cos(0.1 t (i + 1)), or 0 for i = 5, 21,
37 and 53, which only decay. Both are computed in f64 and rounded to f32. Writes adamw.json with the parameters after
steps 1, 2, 5 and 20, and prints one JSON object that names the file.
"""

import argparse
import json
import math
import pathlib

import torch

CONFIG = {"num_params": 64, "lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
KEPT = (1, 2, 5, 20)


def gradient(step):
    return [0.0 if i % 16 == 5 else math.cos(0.1 * step * (i + 1)) for i in range(CONFIG["num_params"])]


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=pathlib.Path, required=True)
    out = cli.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    param = torch.nn.Parameter(torch.tensor([math.sin(i + 1) for i in range(CONFIG["num_params"])]))
    optimizer = torch.optim.AdamW(
        [param], lr=CONFIG["lr"], betas=(CONFIG["beta1"], CONFIG["beta2"]), eps=CONFIG["eps"],
        weight_decay=CONFIG["weight_decay"], foreach=False,
    )  # fmt: skip
    params = {}
    for step in range(1, max(KEPT) + 1):
        param.grad = torch.tensor(gradient(step))
        optimizer.step()
        if step in KEPT:
            params[str(step)] = param.tolist()

    path = out / "adamw.json"
    golden = {"torch": torch.__version__, "config": CONFIG, "params_after_step": params}
    path.write_text(json.dumps(golden, indent=1) + "\n")
    print(json.dumps({"written": str(path), "steps": KEPT}))


if __name__ == "__main__":
    main()
