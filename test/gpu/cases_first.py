"""Rank side of group first."""

import time

import torch
import torch.distributed as dist
from rank_side import MIB, Buffer, fill

SIZE = 64 * MIB


def send_recv(rank):
    buffer = Buffer(SIZE)
    if rank.rank == 0:
        fill(buffer.bytes, 1)
    torch.cuda.synchronize()
    before = rank.totals()
    rank.barrier()
    began = time.monotonic()
    if rank.rank == 0:
        dist.send(buffer.bytes, 1)
    else:
        dist.recv(buffer.bytes, 0)
    torch.cuda.synchronize()
    lasted = time.monotonic() - began
    problem = buffer.problem(1)
    rank.check(not problem, problem)
    rank.check_steered(before, [SIZE])
    return {"with_set_up_s": round(lasted, 3)} if rank.rank == 1 else {}


RANK_CASES = {"send_recv_64MiB": send_recv}
