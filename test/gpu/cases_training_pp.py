"""Rank side of group training_pp: the model in two pipeline stages, 1F1B.

Activations and gradients have a process group each, so that neither waits behind the other on its
stream, and every receive is posted one micro-batch ahead: transfers pass beside compute, and a kernel
of NCCL's that waits for its peer does so beside compute as well."""

import training_model as gpt  # first: it sets what cuBLAS needs before it starts

import math

import torch
import torch.distributed as dist
import torch.nn as nn
from steered import Expected
from training_clock import Clock

MICRO_BATCHES, BATCH = 8, 2
SHAPE = (BATCH, gpt.LENGTH, gpt.HIDDEN)  # of a transfer, bf16: 16 MiB
TOKENS_A_STEP = MICRO_BATCHES * BATCH * gpt.LENGTH


class FirstStage(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.embedding = gpt.Embedding()
        self.blocks = gpt.blocks(gpt.LAYERS // 2, clock)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class LastStage(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.blocks = gpt.blocks(gpt.LAYERS // 2, clock)
        self.head = gpt.Head(clock)

    def forward(self, x, targets):
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)


class Transfers:
    """From the first stage to the last and back."""

    def __init__(self, rank, clock):
        self._peer, self._clock = rank.peer, clock
        self._activations, self._gradients = (dist.new_group([0, 1]) for _ in range(2))
        self._first = rank.rank == 0

    def connect(self):
        """One transfer in each direction, so that the communicators are there: to make one behind a pending
        receive could stand still."""
        out = torch.zeros(SHAPE, device=gpt.DEVICE, dtype=torch.bfloat16)
        for sends in (self._first, not self._first):
            work = self.send(out) if sends else self.receive()[1]
            work.wait()
            torch.cuda.synchronize()

    def send(self, tensor):
        group = self._activations if self._first else self._gradients
        return self._clock.transfer(lambda: dist.isend(tensor, self._peer, group=group))

    def receive(self):
        """(what comes, the work to wait for)."""
        group = self._gradients if self._first else self._activations
        into = torch.empty(SHAPE, device=gpt.DEVICE, dtype=torch.bfloat16)
        return into, self._clock.transfer(lambda: dist.irecv(into, self._peer, group=group))


def _first_stage_step(model, transfers, tokens):
    outputs = [model(tokens[0])]
    sent = [transfers.send(outputs[0].detach())]
    for m in range(MICRO_BATCHES):
        gradient, coming = transfers.receive()
        if m + 1 < MICRO_BATCHES:
            outputs.append(model(tokens[m + 1]))
            sent.append(transfers.send(outputs[-1].detach()))
        coming.wait()
        sent[m].wait()  # the gradient has come, so this has gone
        outputs[m].backward(gradient)
        outputs[m] = None


def _last_stage_step(model, transfers, targets):
    total, sent = 0.0, []
    following, coming = transfers.receive()
    for m in range(MICRO_BATCHES):
        coming.wait()
        x = following.requires_grad_()
        if m + 1 < MICRO_BATCHES:
            following, coming = transfers.receive()
        loss = model(x, targets[m]) / MICRO_BATCHES
        loss.backward()
        total = total + loss.detach()
        sent.append(transfers.send(x.grad))
    for work in sent:
        work.wait()
    return total


def train(rank):
    gpt.deterministic(1234 + rank.rank)
    clock = Clock()
    with torch.device(gpt.DEVICE):
        model = gpt.initialise((FirstStage if rank.rank == 0 else LastStage)(clock))
    model = model.to(torch.bfloat16)
    optimizer = gpt.MasterAdamW(model)
    steps = gpt.steps(rank)
    data = gpt.batches(7, steps, MICRO_BATCHES * BATCH).unflatten(1, (MICRO_BATCHES, BATCH))
    transfers = Transfers(rank, clock)
    transfers.connect()
    expected, losses = Expected(rank), []
    for step in range(steps):
        optimizer.zero_grad()
        if rank.rank == 0:
            _first_stage_step(model, transfers, data[step, :, :, :-1])
        else:
            loss = _last_stage_step(model, transfers, data[step, :, :, 1:])
        optimizer.step()
        clock.end_step()
        if rank.rank == 1:
            losses.append(float(loss))
    size = 2 * math.prod(SHAPE)
    expected.sends(*[size] * (2 * MICRO_BATCHES * steps))
    taken = expected.check(rank.path)
    figures = gpt.result(rank, clock, model.named_parameters(), losses)
    figures[f"rank{rank.rank}"]["steered"] = taken
    figures["tokens_a_step"] = TOKENS_A_STEP
    return figures


RANK_CASES = {"train": train}
