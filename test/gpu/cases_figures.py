"""Rank side of group figures: CPU use of the mover, latency after a pause, a GEMM beside a
transfer."""

import ctypes
import os
import time

import procs
import torch
import torch.distributed as dist
from rank_side import MIB, MIN_STEERED, Buffer, fill, library

CPU_WINDOW_S = 1.0
SETTLE_S = 0.3
PAUSE_S = 0.02  # far more than HOCCL_SPIN_US: the movers have backed off
LATENCY_ROUNDS = 40
SPIN_LIMIT_NS = 5_000_000_000
GEMM_SIZE, GEMMS, GEMM_PAIRS, GEMM_WARM_UP = 8192, 24, 20, 400
TRANSFER, TRANSFERS = 256 * MIB, 6  # 34 ms at 48 GB/s, the GEMMs of a segment about 37 ms


def _one_way(rank, tensor):
    return (dist.isend if rank.rank == 0 else dist.irecv)(tensor, rank.peer)


def _warm_up(rank, tensor):
    for _ in range(3):
        _one_way(rank, tensor).wait()
    torch.cuda.synchronize()


def _own_mover():
    found = procs.movers(os.getpid())
    if len(found) != 1:
        raise RuntimeError(f"this rank has {len(found)} movers, not 1")
    return found[0]


def _percent(share):
    return [round(100 * part, 3) for part in share]


def _gate():
    gate = library("gate")
    gate.gateOpen.restype = gate.spinUntilDone.restype = ctypes.c_int64
    gate.gateClose.argtypes = [ctypes.c_void_p]
    gate.spinUntilDone.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    code = gate.gatePrepare()
    if code != 0:
        raise RuntimeError(f"gatePrepare: CUDA error {code}")
    return gate


def mover_cpu_and_latency(rank):
    """The receive is pending; the sender's operation is in its ring, its start held back by a gate
    on the stream. Host time from opening the gate to the receiver's stream passing its wait."""
    gate = _gate()
    buffer = Buffer(MIN_STEERED)
    fill(buffer.bytes, 3)
    _warm_up(rank, buffer.bytes)
    stream = torch.cuda.Stream()
    mover = _own_mover()
    figures = {}

    rank.barrier()
    time.sleep(SETTLE_S)
    figures["idle_cpu_percent"] = _percent(procs.cpu_share([mover], CPU_WINDOW_S)[mover])

    latencies, pending = [], None
    for i in range(LATENCY_ROUNDS + 1):
        with torch.cuda.stream(stream):
            if rank.rank == 0:
                if gate.gateClose(ctypes.c_void_p(stream.cuda_stream)) != 0:
                    raise RuntimeError("cuStreamWaitValue32 failed")
            work = _one_way(rank, buffer.bytes)
            work.wait()
        rank.barrier()
        if pending is None:  # once: what a pending operation costs
            time.sleep(SETTLE_S)
            pending = _percent(procs.cpu_share([mover], CPU_WINDOW_S)[mover])
            rank.barrier()
        if rank.rank == 0:
            time.sleep(PAUSE_S)
            rank.tell(f"opened{i}", str(gate.gateOpen()))
            torch.cuda.synchronize()
        else:
            done = gate.spinUntilDone(ctypes.c_void_p(stream.cuda_stream), SPIN_LIMIT_NS)
            if done <= 0:
                raise RuntimeError(f"the transfer did not end: {done}")
            latencies.append((done - int(rank.hear(f"opened{i}"))) / 1e3)
        rank.barrier()
    figures["pending_cpu_percent"] = pending
    if rank.rank == 1:
        problem = buffer.problem(3)
        rank.check(not problem, problem)
        ordered = sorted(latencies[1:])  # the first came after the CPU window
        figures["latency_us"] = {
            "median": round(ordered[len(ordered) // 2], 1),
            "p90": round(ordered[len(ordered) * 9 // 10], 1),
            "max": round(ordered[-1], 1),
        }
    return {f"rank{rank.rank}": figures}


def _gemm_chain(pairs):
    """GEMMs without a gap: segments beside a transfer and segments alone in turn, so that clocks and
    temperature are the same for both. Returns the event before each segment, and a function that
    enqueues segment i and records an event around each of its GEMMs."""
    shape = (GEMM_SIZE, GEMM_SIZE)
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    for _ in range(GEMM_WARM_UP):
        torch.mm(a, b, out=c)
    marks = [
        [torch.cuda.Event(enable_timing=True) for _ in range(GEMMS + 1)] for _ in range(2 * pairs)
    ]

    def segment(i):
        for k in range(GEMMS):
            torch.mm(a, b, out=c)
            marks[i][k + 1].record()

    return marks, segment


def gemm_beside_transfer(rank):
    """In each pair of segments the transfers of the first begin with its first GEMM and end within
    its last ones. Compared are the GEMMs all of whose time lies within the transfers, with the same
    ones of the second segment."""
    buffer = Buffer(TRANSFER)
    fill(buffer.bytes, 4)
    side = torch.cuda.Stream()
    _warm_up(rank, buffer.bytes)
    pairs = GEMM_PAIRS // 4 if rank.quick else GEMM_PAIRS
    before = rank.totals()
    rank.barrier()
    spans = []

    def transfers(after):
        with torch.cuda.stream(side):
            if after is not None:
                side.wait_event(after)
            begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            for work in [_one_way(rank, buffer.bytes) for _ in range(TRANSFERS)]:
                work.wait()
            done.record()
        spans.append((begun, done))

    if rank.rank == 1:
        for _ in range(pairs):
            transfers(None)
        torch.cuda.synchronize()
        rank.check_steered(before, [TRANSFER] * (TRANSFERS * pairs))
        return {}
    marks, segment = _gemm_chain(pairs)
    for i in range(pairs):
        marks[2 * i][0].record()
        transfers(marks[2 * i][0])
        segment(2 * i)
        marks[2 * i + 1][0].record()
        segment(2 * i + 1)
    torch.cuda.synchronize()
    rank.check_steered(before, [TRANSFER] * (TRANSFERS * pairs))
    alone, beside, rates = [], [], []
    for i, (begun, done) in enumerate(spans):
        busy, free = marks[2 * i], marks[2 * i + 1]
        end = busy[0].elapsed_time(done)
        rates.append(TRANSFERS * TRANSFER / begun.elapsed_time(done) / 1e6)
        # The first GEMM runs while the first transfer starts.
        compared = [k for k in range(1, GEMMS) if busy[0].elapsed_time(busy[k + 1]) <= end]
        rank.check(
            len(compared) >= GEMMS // 2 and end <= busy[0].elapsed_time(free[0]),
            f"pair {i}: the transfers took {end:.1f} ms, the GEMMs beside them "
            f"{busy[0].elapsed_time(busy[GEMMS]):.1f} ms: nothing was compared",
        )
        for times, events in ((beside, busy), (alone, free)):
            each = sorted(events[k].elapsed_time(events[k + 1]) for k in compared)
            times.append(each[len(each) // 2])
    return {
        "alone_ms": alone,
        "beside_ms": beside,
        "transfer_gbs": round(sorted(rates)[len(rates) // 2], 2),
    }


def hold(rank):
    """Stays with its mover in place until the parent ends it."""
    buffer = Buffer(16 * MIB)
    _warm_up(rank, buffer.bytes)
    _warm_up(rank, buffer.bytes[:MIN_STEERED])
    rank.report({"event": "holding", "movers": procs.movers(os.getpid())})
    time.sleep(60)


RANK_CASES = {
    "mover_cpu_and_latency": mover_cpu_and_latency,
    "gemm_beside_transfer": gemm_beside_transfer,
    "hold": hold,
}
