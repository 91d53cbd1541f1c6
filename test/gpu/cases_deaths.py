"""Rank side of group deaths: a second of large transfers, in the middle of which the parent
strikes."""

import os
import sys
import time

import procs
import torch
import torch.distributed as dist
from rank_side import GIB, MIB, Buffer, fill

SIZE = GIB
ROUNDS = 40  # about a second at the copy engines' rate
ERROR_LIMIT_S = 15  # past what the group asks for, so that it can say how late the error came


def _exchange(rank, out, into):
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, out, rank.peer), dist.P2POp(dist.irecv, into, rank.peer)]
    ):
        work.wait()


def _enqueue(rank):
    out, into = Buffer(SIZE), Buffer(SIZE)
    fill(out.bytes, 40 + rank.rank)
    _exchange(rank, out.bytes[:MIB], into.bytes[:MIB])
    torch.cuda.synchronize()
    rank.barrier()
    for _ in range(ROUNDS):
        _exchange(rank, out.bytes, into.bytes)
    rank.report({"event": "enqueued", "movers": procs.movers(os.getpid()), "t": time.monotonic()})
    return out, into


def until_error(rank):
    out, into = _enqueue(rank)
    try:
        torch.cuda.synchronize()
        rank.report({"event": "released", "t": time.monotonic()})
        # The streams are released; the error must reach the application by its next operations,
        # unless PyTorch's watchdog ends the process first.
        end = time.monotonic() + ERROR_LIMIT_S
        while time.monotonic() < end:
            time.sleep(0.1)
            _exchange(rank, out.bytes[:MIB], into.bytes[:MIB])
            torch.cuda.synchronize()
    except Exception as e:  # any exception is the error this test waits for
        rank.report({"event": "error", "t": time.monotonic(), "text": str(e)[:2000]})
        print(f"the application saw: {e}", file=sys.stderr, flush=True)
        os._exit(7)
    rank.report({"event": "no error", "t": time.monotonic()})
    os._exit(8)


def to_end(rank):
    before = rank.totals()
    began = time.monotonic()
    _, into = _enqueue(rank)
    torch.cuda.synchronize()
    lasted = time.monotonic() - began
    problem = into.problem(40 + rank.peer)
    rank.check(not problem, problem)
    rank.check_steered(before, [MIB] * 2 + [SIZE] * (2 * ROUNDS))
    return {f"rank{rank.rank}_s": round(lasted, 3)}


RANK_CASES = {"until_error": until_error, "to_end": to_end}
