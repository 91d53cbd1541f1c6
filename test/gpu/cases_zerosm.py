"""Rank side of group zerosm: windows for the tracer, and transfers while every SM is occupied."""

import ctypes
import os
import time

import procs
import torch
import torch.distributed as dist
from rank_side import KIB, MIB, Buffer, fill, library

IDLE_S = 0.15  # on both sides of a window; more than trace_check's margin
FLUSH_S = 0.6  # several periods of the tracer
SIZES = [64 * MIB] * 8 + [16 * MIB, MIB + 3, 65537]
PLANTED_COPY, PLANTED_MEMSET = MIB, 4 * MIB
HOG_S = 4.0
STEERED_LIMIT_S = 2.0  # while the hog holds every SM; alone it takes 2 ms
BLOCKED_S = 0.7  # what needs an SM must not be done after this
NCCL_SIZE = 32 * KIB  # below HOCCL_MIN_BYTES: NCCL's kernels carry it


def _exchange(rank, out, into):
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, out, rank.peer), dist.P2POp(dist.irecv, into, rank.peer)]
    )
    for work in works:
        work.wait()


def _one_way(rank, tensor):
    work = (dist.isend if rank.rank == 0 else dist.irecv)(tensor, rank.peer)
    work.wait()


def _warm_up(rank):
    """Communicators, imports and lanes for both shapes of transfer."""
    a = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    b = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    _exchange(rank, a, b)
    _one_way(rank, a)
    _one_way(rank, a[:NCCL_SIZE])
    torch.cuda.synchronize()


def _hog_library():
    lib = library("hog")
    lib.hogStart.argtypes = [ctypes.c_double]
    lib.plantCopy.argtypes = lib.plantMemset.argtypes = [ctypes.c_size_t]
    return lib


def open_window(rank):
    torch.cuda.synchronize()
    rank.barrier()
    time.sleep(IDLE_S)
    return time.monotonic_ns()


def close_window(rank, begin, moved):
    torch.cuda.synchronize()
    end = time.monotonic_ns()
    time.sleep(IDLE_S)
    rank.barrier()
    time.sleep(FLUSH_S)
    return {
        f"rank{rank.rank}": {
            "pid": os.getpid(),
            "movers": procs.movers(os.getpid()),
            "begin_ns": begin,
            "end_ns": end,
            **moved,
        }
    }


def clean_window(rank):
    _warm_up(rank)
    out = [Buffer(n) for n in SIZES]
    into = [Buffer(n) for n in SIZES]
    for i, b in enumerate(out):
        fill(b.bytes, 10 + 2 * i + rank.rank)
    for a, b in zip(out, into):  # every buffer once before: the window sees no import either
        _exchange(rank, a.bytes, b.bytes)
    begin = open_window(rank)
    before = rank.totals()  # direct ones are counted when they move, so behind all of those
    for a, b in zip(out, into):
        _exchange(rank, a.bytes, b.bytes)
    for a in into[:4]:
        _one_way(rank, a.bytes if rank.rank == 1 else out[into.index(a)].bytes)
    one_way = sum(SIZES[:4])
    sent = sum(SIZES) + (one_way if rank.rank == 0 else 0)
    received = sum(SIZES) + (one_way if rank.rank == 1 else 0)
    figures = close_window(rank, begin, {"sent": sent, "received": received})
    rank.check_steered(before, SIZES * 2 + SIZES[:4])
    for i, b in enumerate(into):
        problem = b.problem(10 + 2 * i + rank.peer)
        rank.check(not problem, f"transfer {i}: {problem}")
    return figures


def planted_window(rank):
    """Rank 0 does in its window, once each, what HOCCL must not do."""
    _warm_up(rank)
    hog = _hog_library()
    if rank.rank == 0:
        rank.check(hog.hogPrepare() > 0, "hogPrepare failed")
    buffer = torch.zeros(SIZES[0], dtype=torch.uint8, device="cuda")
    begin = open_window(rank)
    _one_way(rank, buffer)
    if rank.rank == 0:
        for code in (
            hog.plantKernel(),
            hog.plantCopy(PLANTED_COPY),
            hog.plantMemset(PLANTED_MEMSET),
        ):
            rank.check(code == 0, f"planting failed with CUDA error {code}")
    moved = {
        "sent": SIZES[0] if rank.rank == 0 else 0,
        "received": SIZES[0] if rank.rank == 1 else 0,
    }
    return close_window(rank, begin, moved)


class _Hog:
    """Every SM of this process's context, from `with` to its end."""

    def __init__(self, rank):
        self._rank = rank
        self._library = rank.hog_library
        self.blocks = rank.hog_blocks

    def __enter__(self):
        code = self._library.hogStart(HOG_S)
        if code != 0:
            raise RuntimeError(f"the hog did not start: CUDA error {code}")
        procs.wait_until(self.holds, 1.0, 0.001)
        self._rank.check(
            self.holds(), f"the hog holds {self._library.hogHolding()} of " f"{self.blocks} places"
        )
        return self

    def holds(self):
        return self._library.hogHolding() == self.blocks

    def __exit__(self, *_):
        code = self._library.hogStop()
        self._rank.check(code == 0, f"the hog ended with CUDA error {code}")


def _prepare_hog(rank):
    if not hasattr(rank, "hog_library"):
        lib = _hog_library()
        rank.hog_library, rank.hog_blocks = lib, lib.hogPrepare()
        if rank.hog_blocks <= 0:
            raise RuntimeError(f"hogPrepare failed: {rank.hog_blocks}")
        _warm_up(rank)


def _transfer_under_hog(rank, size, hogs, limit_s):
    """Rank 0 → 1 while the ranks in `hogs` hold every SM in their contexts. Returns (done within
    the limit, seconds, the hog still held every place then)."""
    _prepare_hog(rank)
    buffer = Buffer(size)
    seed = 50 + len(hogs)
    if rank.rank == 0:
        fill(buffer.bytes, seed)
    event = torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()
    rank.barrier()
    hog = _Hog(rank) if rank.rank in hogs else None
    if hog:
        hog.__enter__()
    try:
        rank.barrier()
        began = time.monotonic()
        _one_way(rank, buffer.bytes)
        event.record()
        done = procs.wait_until(event.query, limit_s, 0.0005)
        lasted = time.monotonic() - began
        held = hog.holds() if hog else True
        rank.barrier()
    finally:
        if hog:
            hog.__exit__()
    torch.cuda.synchronize()
    if rank.rank == 1:
        problem = buffer.problem(seed)
        rank.check(not problem, problem)
    return done, lasted, held


def _hogged(rank, hogs):
    _prepare_hog(rank)
    before = rank.totals()
    done, lasted, held = _transfer_under_hog(rank, 64 * MIB, hogs, STEERED_LIMIT_S)
    rank.check(done, f"the steered transfer was not done after {lasted:.2f} s under the hog")
    rank.check(held, "the hog had ended before the transfer had")
    rank.check_steered(before, [64 * MIB])
    return {f"rank{rank.rank}_transfer_ms": round(lasted * 1e3, 2), "hog_in_ranks": list(hogs)}


def hogged_nccl(rank):
    """The planted counterpart: what NCCL's kernels carry cannot finish, so the hog really hogs."""
    done, lasted, held = _transfer_under_hog(rank, NCCL_SIZE, (0, 1), BLOCKED_S)
    rank.check(
        not done, f"NCCL moved {NCCL_SIZE} bytes in {lasted:.3f} s though every SM was taken"
    )
    rank.check(held, "the hog did not hold every SM for as long as that was watched")


def hogged_copy(rank):
    _prepare_hog(rank)
    lib = rank.hog_library
    with _Hog(rank) as hog:
        code = lib.plantCopy(64 * MIB)
        rank.check(code == 0, f"cudaMemcpyAsync: CUDA error {code}")
        done = procs.wait_until(lambda: lib.plantedDone() != 0, BLOCKED_S, 0.001)
        rank.check(not done, "a copy inside the device ran though every SM was taken")
        rank.check(hog.holds(), "the hog did not hold every SM for as long as that was watched")
    rank.check(procs.wait_until(lambda: lib.plantedDone() == 1, 5), "the copy never ran")


RANK_CASES = {
    "clean_window": clean_window,
    "planted_window": planted_window,
    "every_sm_occupied_in_the_sender": lambda rank: _hogged(rank, (0,)),
    "every_sm_occupied_in_the_receiver": lambda rank: _hogged(rank, (1,)),
    "every_sm_occupied_in_both": lambda rank: _hogged(rank, (0, 1)),
    "planted_nccl_under_hog_is_blocked": hogged_nccl,
    "planted_copy_under_hog_is_blocked": hogged_copy,
}
