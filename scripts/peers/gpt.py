"""The GPT-2 decoder that the peer scripts share. Nothing to run here.

Parameter names follow Hugging Face's GPT-2 (`h.0.attn.c_attn.weight`, ...), but linear weights are stored
[out, in] as torch does; `parity.py` transposes them when it writes a file.
"""

from torch import arange, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads, bias):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        split = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1)]
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width, bias, gelu):
        super().__init__()
        self.gelu = gelu
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu))


class Layer(nn.Module):
    def __init__(self, width, heads, bias, gelu):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.attn = Attention(width, heads, bias)
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = Mlp(width, bias, gelu)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """Pre-norm decoder with learned positions. `forward(inputs, targets)` gives the mean cross-entropy."""

    def __init__(self, vocab, seq, layers, width, heads, bias=True, tied=True, gelu="tanh"):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(seq, width)
        self.h = nn.ModuleList([Layer(width, heads, bias, gelu) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width, bias=bias)
        self.lm_head = None if tied else nn.Linear(width, vocab, bias=False)

    def init(self, std=0.02, embedding_std=0.02, residual_std=None, generator=None):
        """Normal matrices, zero biases, unit norms. `residual_std` is for the two projections that end a branch."""
        for name, param in self.named_parameters():
            if param.dim() == 1:
                nn.init.constant_(param, 1.0 if name.endswith("weight") else 0.0)
                continue
            spread = std
            if name.startswith(("wte", "wpe")):
                spread = embedding_std
            elif residual_std is not None and name.endswith("c_proj.weight"):
                spread = residual_std
            nn.init.normal_(param, std=spread, generator=generator)
        return self

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe(arange(inputs.shape[1]))
        for layer in self.h:
            x = layer(x)
        head = self.wte if self.lm_head is None else self.lm_head
        logits = F.linear(self.ln_f(x), head.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def count(model):
    return sum(p.numel() for p in model.parameters())


def step_flops(batch, seq, layers, width, vocab):
    """Forward and backward of one step, without activation recomputation."""
    return 72 * batch * seq * layers * width**2 * (1 + seq / (6 * width) + vocab / (12 * layers * width))


def decay_groups(model, weight_decay):
    """AdamW parameter groups: matrices and embeddings decay, vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
