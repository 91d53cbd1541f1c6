"""The GPT-style model of the groups training_pp, training_fsdp and layer, in plain PyTorch: pre-norm
blocks of causal attention and a feed-forward of four times the width, learned positions, no biases.
About 1.35 billion parameters: 24 blocks of 50.3 million, token embedding and head of 67 million each.

With a clock (training_clock.py) every block and the head mark where their kernels begin and end."""

import hashlib
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda"
VOCABULARY, HIDDEN, HEADS, LAYERS, LENGTH = 32768, 2048, 16, 24, 2048
STEPS, QUICK_STEPS = 50, 14
OCCURRING = 512  # tokens of the vocabulary that occur in the data, so that the loss falls at once
DEVIATION = 0.02  # of the initial weights
RATE = 1e-4


def only_flash_attention():
    """One attention kernel for all runs: the one that has a deterministic backward."""
    torch.backends.cuda.enable_math_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def deterministic(seed):
    """The same bits whenever the same bytes arrive. Costs the same in every configuration: no
    operation that is communicated is concerned."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel for each new tensor
    torch.backends.cuda.matmul.allow_tf32 = False
    only_flash_attention()
    torch.manual_seed(seed)


class Block(nn.Module):
    def __init__(self, hidden, heads, clock=None):
        super().__init__()
        self.heads, self.clock = heads, clock
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def _compute(self, x):
        b, t, h = x.shape
        parts = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, h // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, h))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    def forward(self, x):
        if self.clock is None:
            return self._compute(x)
        return self.clock.leave(self._compute(self.clock.enter(x)))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions.weight


class Head(nn.Module):
    """Hidden states and the tokens to predict → their mean loss, fp32."""

    def __init__(self, clock=None):
        super().__init__()
        self.clock = clock
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def _compute(self, x, targets):
        logits = self.out(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))

    def forward(self, x, targets):
        if self.clock is None:
            return self._compute(x, targets)
        return self.clock.leave(self._compute(self.clock.enter(x), targets))


def blocks(count, clock):
    return nn.ModuleList(Block(HIDDEN, HEADS, clock) for _ in range(count))


def initialise(model):
    """GPT-2's: the outputs of each block weigh less the more blocks there are."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            last = name.endswith(("out.weight", "down.weight")) and "blocks" in name
            nn.init.normal_(p, 0.0, DEVIATION / (2 * LAYERS) ** 0.5 if last else DEVIATION)
    return model


def batches(seed, steps, batch):
    """(steps, batch, LENGTH + 1) tokens: a predictable sequence with noise."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, OCCURRING, (steps, batch, 1), generator=generator)
    noise = torch.randint(0, 3, (steps, batch, LENGTH + 1), generator=generator)
    return ((start + torch.arange(LENGTH + 1) * 5 + noise) % OCCURRING).to(DEVICE)


def steps(rank):
    return QUICK_STEPS if rank.quick else STEPS


class MasterAdamW:
    """AdamW on fp32 copies of bf16 parameters, as training in bf16 needs it: an update is smaller than
    what bf16 resolves."""

    def __init__(self, model):
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._masters = [p.detach().float() for p in self._parameters]
        self._adam = torch.optim.AdamW(self._masters, lr=RATE, fused=True)

    def zero_grad(self):
        for p in self._parameters:
            p.grad = None

    def step(self):
        for master, p in zip(self._masters, self._parameters):
            master.grad = p.grad.float()
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)


def digest(named):
    """SHA-256 of every parameter's name and bytes; `named` gives (name, tensor)."""
    found = hashlib.sha256()
    for name, p in sorted(named):
        found.update(name.encode())
        found.update(p.detach().contiguous().flatten().view(torch.uint8).cpu().numpy())
    return found.hexdigest()


def result(rank, clock, named, losses):
    """A run's figures: what must be equal bit for bit, and the times."""
    figures = {f"rank{rank.rank}_parameters_sha256": digest(named)}
    if losses:
        rank.check(losses[-1] < losses[0], f"the loss did not fall: {losses[0]} → {losses[-1]}")
        figures[f"rank{rank.rank}_losses"] = [loss.hex() for loss in losses]
        figures["first_loss"], figures["last_loss"] = round(losses[0], 4), round(losses[-1], 4)
    figures[f"rank{rank.rank}"] = {**clock.figures(), "environment": environment()}
    return figures


def environment():
    """The variables that say how this run communicated; without paths of this machine."""
    names = ("NCCL_", "HOCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "CUBLAS_")
    return {
        k: v for k, v in sorted(os.environ.items()) if k.startswith(names) and not v.startswith("/")
    }
