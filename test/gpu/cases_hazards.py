"""Rank side of group hazards: calls that wait for a pending stream, made while a receive is
pending."""

import time

import torch
import torch.distributed as dist
from rank_side import MIB, Buffer, fill, library

SIZE = 16 * MIB
CACHED = 256 * MIB
SENDER_LATE_S = 2.0
PENDING_S = 0.2  # the receive is surely under way


def _prepare(rank):
    if not hasattr(rank, "hazards"):
        rank.hazards = library("hazards")
        if rank.rank == 1:
            code = rank.hazards.hazardPrepare()
            if code != 0:
                raise RuntimeError(f"hazardPrepare: CUDA error {code}")


def _under_pending_receive(rank, hazard):
    """Rank 1 makes the call while its receive waits for rank 0, which comes 2 s later."""
    _prepare(rank)
    warm = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    (dist.send if rank.rank == 0 else dist.recv)(warm, rank.peer)
    buffer = Buffer(SIZE)
    before = rank.totals()
    if rank.rank == 0:
        fill(buffer.bytes, 5)
        torch.cuda.synchronize()
        rank.hear("pending")
        time.sleep(SENDER_LATE_S)
        dist.send(buffer.bytes, 1)
        torch.cuda.synchronize()
        figures = {}
    else:
        torch.cuda.synchronize()
        dist.irecv(buffer.bytes, 0).wait()
        rank.tell("pending")
        time.sleep(PENDING_S)
        arrived = torch.cuda.Event()
        arrived.record()
        rank.check(not arrived.query(), "the receive was not pending when the call was made")
        began = time.monotonic()
        code = hazard()
        lasted = time.monotonic() - began
        torch.cuda.synchronize()
        rank.check(code == 0, f"CUDA error {code}")
        problem = buffer.problem(5)
        rank.check(not problem, problem)
        figures = {"call_s": round(lasted, 3)}
    rank.check_steered(before, [SIZE])
    return figures


def _named(name):
    return lambda rank: _under_pending_receive(rank, lambda: getattr(rank.hazards, name)())


def _empty_cache(rank):
    """PyTorch's own cudaFree, of a block it has cached. The block is made in the call, so that no
    buffer of the test comes to lie in it; cudaMalloc waits for nothing."""

    def call():
        reserved = torch.cuda.memory_reserved()
        torch.empty(CACHED, dtype=torch.uint8, device="cuda")  # at once back into the cache
        torch.cuda.empty_cache()
        rank.check(torch.cuda.memory_reserved() <= reserved, "the cached block was not freed")
        return 0

    return _under_pending_receive(rank, call)


RANK_CASES = {
    "cudaFree": _named("hazardFree"),
    "cudaFreeHost": _named("hazardFreeHost"),
    "first_launch_of_a_lazily_loaded_kernel": _named("hazardFirstLaunch"),
    "first_launch_with_more_shared_memory": _named("hazardSharedMemory"),
    "kernel_that_grows_the_stack": _named("hazardStack"),
    "torch_empty_cache": _empty_cache,
}
