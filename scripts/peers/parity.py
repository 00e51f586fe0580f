"""Makes the golden numbers of the training parity test: 50 AdamW steps of a small GPT-2 in torch, in f32 and in f64.

    python scripts/peers/parity.py --out tests/golden

Writes parity_init.safetensors (the starting f32 weights, Hugging Face GPT-2 names, linear weights [in, out]) and
parity.json (the loss and the gradient norm of every step). The losses are those before the step's update, and the
norms those before clipping. Both runs start from the same f32 weights, so the f64 one shows how far rounding in f32
carries. Token s (0 to seq inclusive) of sequence b in step t, all counted from 0, is

    (31 t + 17 b + 7 s + (s^2 mod 11) + t s) mod vocab

where the inputs are tokens 0 to seq-1 and the targets tokens 1 to seq. Clipping is torch's: when the norm n exceeds
1, gradients are scaled by 1 / (n + 1e-6). The key part of c_attn.bias has no gradient but rounding noise, since a
softmax does not see it: AdamW turns that noise into updates, so compare losses and not those biases.
Prints one JSON object that sums up the two runs.
"""

import argparse
import copy
import json
import pathlib

import torch
from safetensors.torch import save_file

from gpt import Gpt, decay_groups

CONFIG = {
    "layers": 4, "heads": 4, "d_model": 64, "seq": 32, "vocab": 97, "micro_batch": 4, "accumulation": 1, "steps": 50,
    "bias": True, "tied": True, "gelu": "tanh", "layer_norm_eps": 1e-5, "seed": 20,
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_clip": 1.0,
    "weight_decay_2d": 0.1, "weight_decay_1d": 0.0,
}  # fmt: skip


def initial_model():
    """Drawn in f64 and rounded, so that the f32 weights do not hang on a vectorised random-number path."""
    generator = torch.Generator().manual_seed(CONFIG["seed"])
    model = Gpt(CONFIG["vocab"], CONFIG["seq"], CONFIG["layers"], CONFIG["d_model"], CONFIG["heads"])
    model.double().init(generator=generator)
    for name, param in model.named_parameters():
        if name.endswith(".bias") and "ln_" not in name:
            torch.nn.init.normal_(param, std=0.01, generator=generator)
    return model.float()


def hugging_face(model):
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {
        name: (p.detach().T if name.endswith(linear) else p.detach()).contiguous()
        for name, p in model.named_parameters()
    }


def batch(step):
    b = torch.arange(CONFIG["micro_batch"])[:, None]
    s = torch.arange(CONFIG["seq"] + 1)
    return (step * 31 + b * 17 + s * 7 + s * s % 11 + step * s) % CONFIG["vocab"]


def train(model):
    optimizer = torch.optim.AdamW(
        decay_groups(model, CONFIG["weight_decay_2d"]),
        lr=CONFIG["lr"], betas=(CONFIG["beta1"], CONFIG["beta2"]), eps=CONFIG["eps"], foreach=False,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(CONFIG["steps"]):
        tokens = batch(step)
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG["grad_clip"]).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=pathlib.Path, required=True)
    out = cli.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)

    model = initial_model()
    save_file(hugging_face(model), out / "parity_init.safetensors")
    wide = copy.deepcopy(model).double()
    losses, norms = train(model)
    losses_f64, norms_f64 = train(wide)

    golden = {
        "torch": torch.__version__,
        "config": CONFIG,
        "tokens_step_3_sequence_2": batch(3)[2].tolist(),
        "losses": losses,
        "grad_norms": norms,
        "losses_f64": losses_f64,
        "grad_norms_f64": norms_f64,
    }
    (out / "parity.json").write_text(json.dumps(golden, indent=1) + "\n")
    gap = max(abs(a - b) for a, b in zip(losses, losses_f64))
    norm_gap = max(abs(a - b) / b for a, b in zip(norms, norms_f64))
    summary = {"first_loss": losses[0], "last_loss": losses[-1], "max_loss_gap_f64": gap}
    print(json.dumps({**summary, "max_grad_norm_relative_gap_f64": norm_gap}))


if __name__ == "__main__":
    main()
