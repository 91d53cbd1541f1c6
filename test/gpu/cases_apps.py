"""Rank side of group apps: FSDP2, a 1F1B pipeline and DDP, trained deterministically.

Every result names each loss and a hash of the parameters' bytes, so that two runs can be compared
bit for bit. The model's parts come from cases_train.
"""

import contextlib
import hashlib

from cases_train import (  # first: it sets what cuBLAS needs before it starts
    BATCH,
    HIDDEN,
    LENGTH,
    MICRO_BATCHES,
    STEPS,
    VOCABULARY,
    Block,
    FirstStage,
    LastStage,
)

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from rank_side import MIB, Buffer, fill
from steered import Expected, parts_problem
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

LAYERS = 4
BUCKET_MB = 1
BESIDE, BESIDE_BACK = 4 * MIB + 1, 2 * MIB + 5


class Whole(nn.Module):
    """The Transformer in one piece. A block has 3 MiB of fp32 parameters, so half of one is
    steered."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LastStageForward(LastStage):
    def forward(self, x):
        return self.head(self.norm(self.blocks(x)))


def _loss(logits, targets):
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def _batches(seed, batch):
    """(steps, batch, LENGTH + 1): a predictable sequence with noise."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCABULARY, (STEPS, batch, 1), generator=generator)
    noise = torch.randint(0, 3, (STEPS, batch, LENGTH + 1), generator=generator)
    return ((start + torch.arange(LENGTH + 1) * 5 + noise) % VOCABULARY).cuda()


def _deterministic(seed):
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(seed)


def _figures(rank, parameters, losses):
    digest = hashlib.sha256()
    for name, p in sorted(parameters):
        digest.update(name.encode())
        digest.update(p.detach().cpu().numpy().tobytes())
    figures = {f"rank{rank.rank}_parameters_sha256": digest.hexdigest()}
    if losses:
        rank.check(losses[-1] < losses[0], f"the loss did not fall: {losses[0]} → {losses[-1]}")
        figures[f"rank{rank.rank}_losses"] = [loss.hex() for loss in losses]
    return figures


@contextlib.contextmanager
def _calls_of(name, note):
    """Within it, `note(*arguments)` sees every call of torch.distributed's function `name`."""
    real = getattr(dist, name)

    def noting(*arguments, **named):
        note(*arguments)
        return real(*arguments, **named)

    setattr(dist, name, noting)
    try:
        yield
    finally:
        setattr(dist, name, real)


def fsdp2(rank):
    """Parameters sharded block by block: all-gathers before each forward and backward (HOCCL's),
    reduce-scatters behind (NCCL's)."""
    _deterministic(1234)  # the same parameters on both ranks, each of which keeps its half
    model = Whole().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = _batches(7 + rank.rank, BATCH)
    expected, gathered, losses = Expected(rank), [], []

    def note(_, tensor):
        gathered.append(tensor.nbytes)
        expected.collective(tensor.nbytes, 2 * tensor.nbytes)

    with _calls_of("all_gather_into_tensor", lambda out, own, *_: note(out, own)):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            loss = _loss(model(data[step, :, :-1]), data[step, :, 1:])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    torch.cuda.synchronize()
    large = [n for n in gathered if n >= MIB]
    rank.check(
        len(large) >= 2 * LAYERS * STEPS,
        f"{len(large)} of {len(gathered)} all-gathers had a MiB: the blocks' are too small",
    )
    taken = expected.check("staged")
    local = [(name, p.to_local()) for name, p in model.named_parameters()]
    return {**_figures(rank, local, losses), f"rank{rank.rank}_steered": taken.get("staged")}


def pipeline_1f1b(rank):
    """PyTorch's own schedule: activations and gradients by batch_isend_irecv."""
    _deterministic(1234 + rank.rank)
    model = (FirstStage() if rank.rank == 0 else LastStageForward()).cuda()
    stage = PipelineStage(model, rank.rank, 2, torch.device("cuda", 0))
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = _batches(7, BATCH * MICRO_BATCHES)
    expected, losses, moved = Expected(rank), [], []
    with _calls_of("batch_isend_irecv", lambda ops: moved.extend(o.tensor.nbytes for o in ops)):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            if rank.rank == 0:
                schedule.step(data[step, :, :-1].contiguous())  # a chunk keeps its strides
            else:
                each = []
                schedule.step(target=data[step, :, 1:], losses=each)
                losses.append(float(torch.stack(each).double().mean()))
            optimizer.step()
    torch.cuda.synchronize()
    expected.sends(*moved)
    size = BATCH * LENGTH * HIDDEN * 4
    rank.check(
        moved.count(size) == 2 * MICRO_BATCHES * STEPS,
        f"{moved.count(size)} transfers of {size} bytes, not {2 * MICRO_BATCHES * STEPS}",
    )
    taken = expected.check("staged")
    named = list(model.named_parameters())
    return {**_figures(rank, named, losses), f"rank{rank.rank}_steered": taken.get("staged")}


class _Beside:
    """Operations of a second communicator, on a stream of their own, while DDP reduces."""

    def __init__(self, rank):
        self._rank, self._group, self._stream = rank, dist.new_group([0, 1]), torch.cuda.Stream()
        self._own, self._gathered = Buffer(BESIDE), Buffer(2 * BESIDE)
        self._out, self._into = Buffer(BESIDE_BACK), Buffer(BESIDE_BACK)
        self._works = []

    def start(self, step):
        me, peer, group = self._rank.rank, self._rank.peer, self._group
        with torch.cuda.stream(self._stream):
            fill(self._own.bytes, 2000 + 4 * step + me)
            fill(self._out.bytes, 2002 + 4 * step + me)
            self._works = [
                dist.all_gather_into_tensor(
                    self._gathered.bytes, self._own.bytes, group=group, async_op=True
                )
            ]
            self._works += dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self._out.bytes, peer, group),
                    dist.P2POp(dist.irecv, self._into.bytes, peer, group),
                ]
            )

    def finish(self, step, expected):
        with torch.cuda.stream(self._stream):
            for work in self._works:
                work.wait()
            parts = [(BESIDE, 2000 + 4 * step + r) for r in range(2)]
            problem = parts_problem(self._gathered, parts) or self._into.problem(
                2002 + 4 * step + self._rank.peer
            )
        self._rank.check(not problem, f"step {step}: {problem}")
        expected.collective(BESIDE, 2 * BESIDE)
        expected.sends(BESIDE_BACK, BESIDE_BACK)


def ddp(rank):
    _deterministic(1234 + rank.rank)  # rank 0's parameters are broadcast
    model = Whole().cuda()
    begun = Expected(rank)
    model = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=BUCKET_MB)
    begun.collective(*[sum(p.nbytes for p in model.parameters())] * 2)
    broadcast = begun.check("staged")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = _batches(7 + rank.rank, BATCH)
    beside = _Beside(rank)
    expected, losses = Expected(rank), []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(model(data[step, :, :-1]), data[step, :, 1:])
        beside.start(step)
        loss.backward()
        beside.finish(step, expected)
        optimizer.step()
        losses.append(float(loss.detach()))
    torch.cuda.synchronize()
    taken = expected.check("staged")
    return {
        **_figures(rank, list(model.named_parameters()), losses),
        f"rank{rank.rank}_steered": taken.get("staged"),
        f"rank{rank.rank}_broadcast": broadcast.get("staged"),
    }


APPS = {"fsdp2": fsdp2, "pipeline_1f1b": pipeline_1f1b, "ddp": ddp}
RANK_CASES = {**APPS, **{name + "_again": app for name, app in APPS.items()}}
