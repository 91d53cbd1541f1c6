"""Rank side of group badinput: a job that must run as plain NCCL."""

import torch
import torch.distributed as dist
from rank_side import KIB, MIB, Buffer, fill

SIZES = [4 * KIB, MIB]


def plain_nccl(rank):
    for i, size in enumerate(SIZES):
        out, into = Buffer(size), Buffer(size)
        fill(out.bytes, 60 + 2 * i + rank.rank)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, out.bytes, rank.peer),
                dist.P2POp(dist.irecv, into.bytes, rank.peer),
            ]
        ):
            work.wait()
        torch.cuda.synchronize()
        problem = into.problem(60 + 2 * i + rank.peer)
        rank.check(not problem, f"{size} bytes: {problem}")
    if rank.has_stats():
        staged = rank.totals()
        rank.check(staged == (0, 0), f"{staged} (operations, bytes) were steered")


RANK_CASES = {"plain_nccl": plain_nccl}
