"""Rank side of group training_fsdp: the model sharded block by block with FSDP2, fp32 parameters that are
gathered in bf16. The all-gathers, in place, are HOCCL's; the reduce-scatters, in fp32, NCCL's."""

import training_model as gpt  # first: it sets what cuBLAS needs before it starts

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from steered import Expected
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training_clock import Clock

BATCH = 8  # sequences a rank
TOKENS_A_STEP = 2 * BATCH * gpt.LENGTH


class Whole(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.embedding = gpt.Embedding()
        self.blocks = gpt.blocks(gpt.LAYERS, clock)
        self.head = gpt.Head(clock)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)


def _sharded(clock):
    with torch.device(gpt.DEVICE):
        model = gpt.initialise(Whole(clock))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


@contextlib.contextmanager
def _every_all_gather(clock, note):
    """Within it, FSDP's all-gathers are timed by the clock, and `note` sees what each rank gives."""
    real = dist.all_gather_into_tensor

    def noting(out, own, **named):
        note(own.nbytes)
        return clock.transfer(lambda: real(out, own, **named))

    dist.all_gather_into_tensor = noting
    try:
        yield
    finally:
        dist.all_gather_into_tensor = real


def _gathered_a_step(model):
    """(all-gathers, bytes of this rank's blocks in them): each block forward and backward, what is in none
    of them once."""
    size = {name: 2 * p.to_local().numel() for name, p in model.named_parameters()}
    inside = sum(n for name, n in size.items() if name.startswith("blocks."))
    return 2 * gpt.LAYERS + 1, sum(size.values()) + inside


def train(rank):
    gpt.deterministic(1234)  # the same parameters on both ranks, each of which keeps its half
    clock = Clock()
    model = _sharded(clock)
    optimizer = torch.optim.AdamW(model.parameters(), lr=gpt.RATE, fused=True)
    steps = gpt.steps(rank)
    data = gpt.batches(7 + rank.rank, steps, BATCH)
    expected, gathered, losses = Expected(rank), [], []

    def note(size):
        gathered.append(size)
        expected.collective(size, 2 * size)

    with _every_all_gather(clock, note):
        for step in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = model(data[step, :, :-1], data[step, :, 1:])
            loss.backward()
            optimizer.step()
            clock.end_step()
            losses.append(float(loss.detach()))
    count, size = _gathered_a_step(model)
    got, want = (len(gathered), sum(gathered)), (count * steps, size * steps)
    rank.check(got == want, f"all-gathers and their bytes: {got}, not {want}")
    taken = expected.check(rank.path)
    local = [(name, p.to_local()) for name, p in model.named_parameters()]
    figures = gpt.result(rank, clock, local, losses)
    figures[f"rank{rank.rank}"]["steered"] = taken
    figures["tokens_a_step"] = TOKENS_A_STEP
    return figures


RANK_CASES = {"train": train}
