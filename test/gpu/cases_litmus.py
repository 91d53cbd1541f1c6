"""Rank side of group litmus: payload before flag, looked at by a kernel right behind the wait."""

import ctypes
import time

import torch
import torch.distributed as dist
from rank_side import KIB, MIB, library
from steered import Expected

RING = 64  # litmus.cu's
BATCH = 1000 * RING
# (bytes, rounds): the last bytes of the larger ones come in other chunks, from other lanes.
RUNS = [
    (64 * KIB, 1_000_000),
    (256 * KIB + 4, 100_000),
    (2 * MIB + 4, 20_000),
    (16 * MIB + 4, 2_000),
]
PLANTED_ROUNDS = 10 * RING
TIME_S = 160  # of all runs; past it the rest is not run, which fails


def _litmus(rank):
    lib = library("litmus")
    lib.litmusBegin.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_size_t]
    lib.litmusRun.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int]
    if not hasattr(rank, "litmus_comm"):
        # The group's communicator exists from its first collective on.
        one = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
        dist.all_gather_into_tensor(torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda"), one)
        torch.cuda.synchronize()
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))
        rank.litmus_comm = backend._comm_ptr()
    return lib


def _checked(what, code):
    if code != 0:
        raise RuntimeError(f"{what}: {code} (a CUDA error, or 10000 + an NCCL result)")


def _begin(rank, lib, size):
    sends = 1 if rank.rank == 0 else 0
    _checked("litmusBegin", lib.litmusBegin(rank.litmus_comm, rank.peer, sends, size))


def _end(lib):
    found = (ctypes.c_uint64 * 5)()
    _checked("litmusFound", lib.litmusFound(found))
    _checked("litmusEnd", lib.litmusEnd())
    return list(found)


def _goes_on(rank, key, deadline):
    """Rank 0's clock decides for both."""
    if rank.rank == 0:
        on = time.monotonic() < deadline
        rank.tell(key, "on" if on else "late")
        return on
    return rank.hear(key) == "on"


def _rounds_of(rank, lib, size, rounds, deadline):
    """Returns the rounds run."""
    rounds = -(-rounds // RING) * RING
    done = batch = 0
    while done < rounds:
        if not _goes_on(rank, f"{size}/{batch}", deadline):
            break
        count = min(BATCH, rounds - done)
        _checked("litmusRun", lib.litmusRun(done, count, 0))
        done += count
        batch += 1
    rank.check(done == rounds, f"{size} bytes: {done} of {rounds} rounds in {TIME_S} s")
    return done


def last_bytes_behind_the_wait(rank):
    lib, figures = _litmus(rank), []
    deadline = time.monotonic() + TIME_S
    for size, rounds in RUNS:
        if rank.quick:
            rounds //= 20
        _begin(rank, lib, size)
        expected = Expected(rank)
        rank.barrier()
        began = time.monotonic()
        done = _rounds_of(rank, lib, size, rounds, deadline)
        lasted = time.monotonic() - began
        expected.sends(*[size] * done)
        expected.check("staged")
        checked, stale, first, word, value = _end(lib)
        if rank.rank == 1:
            rank.check(checked == done, f"{size} bytes: {checked} of {done} rounds were looked at")
            rank.check(
                stale == 0,
                f"{size} bytes: {stale} stale reads in {checked} rounds; first in round {first}: "
                f"word {word} of the last 128 was {value:#x}",
            )
            figures.append(
                {
                    "bytes": size,
                    "rounds": checked,
                    "stale": stale,
                    "us_each": round(lasted / max(1, done) * 1e6, 2),
                }
            )
    if rank.rank == 0:
        return {}
    return {"stale": sum(f["stale"] for f in figures), "runs": figures}


def planted_early_reads_are_seen(rank):
    """The consumer before the wait: it must find nothing but stale reads."""
    lib = _litmus(rank)
    _begin(rank, lib, 64 * KIB)
    rank.barrier()
    _checked("litmusRun", lib.litmusRun(0, PLANTED_ROUNDS, 1))
    checked, stale, *_ = _end(lib)
    if rank.rank == 1:
        rank.check(
            checked == stale == PLANTED_ROUNDS,
            f"{stale} stale reads in {checked} of {PLANTED_ROUNDS} rounds: they would be missed",
        )
        return {"planted_stale": stale}
    return {}


RANK_CASES = {
    "planted_early_reads_are_seen": planted_early_reads_are_seen,
    "last_bytes_behind_the_wait": last_bytes_behind_the_wait,
}
