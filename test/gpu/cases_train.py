"""Rank side of group train: a small Transformer cut in two pipeline stages, trained
deterministically.

The result names every loss and a hash of every parameter's bytes, so that two runs can be compared
bit for bit.
"""

import hashlib
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

STEPS, MICRO_BATCHES = 20, 4
VOCABULARY, HIDDEN, HEADS, LENGTH, BATCH = 512, 256, 4, 128, 4
# One activation: 4 x 128 x 256 fp32 = 512 KiB, so each is steered.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, HIDDEN // HEADS).unbind(2)
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / (HIDDEN // HEADS) ** 0.5
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v.transpose(1, 2)).transpose(1, 2).reshape(b, t, HIDDEN))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class FirstStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN) * 0.02)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens):
        return self.blocks(self.tokens(tokens) + self.positions)


class LastStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def loss(self, x, targets):
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def _batches():
    generator = torch.Generator().manual_seed(7)
    shape = (STEPS, MICRO_BATCHES, BATCH, LENGTH + 1)
    # A predictable sequence with noise, so that the loss has something to learn.
    start = torch.randint(0, VOCABULARY, shape[:3] + (1,), generator=generator)
    noise = torch.randint(0, 3, shape, generator=generator)
    return ((start + torch.arange(LENGTH + 1) * 5 + noise) % VOCABULARY).cuda()


def _exchange(out, into, peer):
    """One group: sends `out`, receives `into`, either of which may be None."""
    ops = []
    if out is not None:
        ops.append(dist.P2POp(dist.isend, out.detach().contiguous(), peer))
    if into is not None:
        ops.append(dist.P2POp(dist.irecv, into, peer))
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _first_stage_step(model, data):
    """1F1B with two stages: one micro-batch ahead, then an activation out and a gradient in."""
    outputs = [model(data[0, :, :-1])]
    _exchange(outputs[0], None, 1)
    for m in range(MICRO_BATCHES):
        following = m + 1 < MICRO_BATCHES
        if following:
            outputs.append(model(data[m + 1, :, :-1]))
        gradient = torch.empty_like(outputs[m])
        _exchange(outputs[m + 1] if following else None, gradient, 1)
        outputs[m].backward(gradient)


def _last_stage_step(model, data):
    total = 0.0
    x = torch.empty(BATCH, LENGTH, HIDDEN, device="cuda")
    _exchange(None, x, 0)
    for m in range(MICRO_BATCHES):
        x.requires_grad_(True)
        loss = model.loss(x, data[m, :, 1:]) / MICRO_BATCHES
        loss.backward()
        total += loss.detach().double()
        following = torch.empty(BATCH, LENGTH, HIDDEN, device="cuda")
        _exchange(x.grad, following if m + 1 < MICRO_BATCHES else None, 0)
        x = following
    return float(total)


def train(rank):
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1234 + rank.rank)
    model = (FirstStage() if rank.rank == 0 else LastStage()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = _batches()
    before = rank.totals() if rank.has_stats() else None
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        if rank.rank == 0:
            _first_stage_step(model, data[step])
        else:
            losses.append(_last_stage_step(model, data[step]))
        optimizer.step()
    torch.cuda.synchronize()
    digest = hashlib.sha256()
    for name, p in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(p.cpu().numpy().tobytes())
    figures = {f"stage{rank.rank}_parameters_sha256": digest.hexdigest()}
    if rank.rank == 1:
        rank.check(losses[-1] < losses[0], f"the loss did not fall: {losses[0]} → {losses[-1]}")
        figures["losses"] = [loss.hex() for loss in losses]
        figures["first_loss"], figures["last_loss"] = round(losses[0], 4), round(losses[-1], 4)
    if before is not None:
        size = BATCH * LENGTH * HIDDEN * 4
        rank.check_steered(before, [size] * (2 * MICRO_BATCHES * STEPS))
    return figures


RANK_CASES = {"first_run": train, "second_run": train}
