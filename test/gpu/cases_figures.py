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
GEMM_SIZE, GEMMS, GEMM_PAIRS = 8192, 16, 20
TRANSFER, TRANSFERS = 256 * MIB, 14  # outlasts the GEMMs (about 50 ms) at 48 GB/s


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


class _Gemm:
    def __init__(self):
        shape = (GEMM_SIZE, GEMM_SIZE)
        self.a = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.b = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.c = torch.empty_like(self.a)
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def run(self):
        """Times GEMMS products; as many go before them untimed, since a GPU that was idle for a
        moment is several percent slower at first, with and without a transfer."""
        for _ in range(GEMMS):
            torch.mm(self.a, self.b, out=self.c)
        self.events[0].record()
        for _ in range(GEMMS):
            torch.mm(self.a, self.b, out=self.c)
        self.events[1].record()

    def milliseconds(self):
        self.events[1].synchronize()
        return self.events[0].elapsed_time(self.events[1]) / GEMMS


def gemm_beside_transfer(rank):
    buffer = Buffer(TRANSFER)
    fill(buffer.bytes, 4)
    side = torch.cuda.Stream()
    _warm_up(rank, buffer.bytes)
    gemm = _Gemm() if rank.rank == 0 else None
    if gemm:
        for _ in range(20):
            gemm.run()
        gemm.milliseconds()
    pairs = GEMM_PAIRS // 4 if rank.quick else GEMM_PAIRS
    alone, beside, rates = [], [], []
    before = rank.totals()

    def transfers():
        with torch.cuda.stream(side):
            works = [_one_way(rank, buffer.bytes) for _ in range(TRANSFERS)]
            for work in works:
                work.wait()
            done = torch.cuda.Event()
            done.record()
        return done

    def with_transfers():
        torch.cuda.synchronize()
        rank.barrier()
        began = time.monotonic()
        done = transfers()
        if gemm:
            time.sleep(0.002)  # the first transfer is under way
            gemm.run()
            beside.append(gemm.milliseconds())
            rank.check(
                not done.query(), "the transfers ended before the GEMMs: nothing was compared"
            )
        done.synchronize()
        rates.append(TRANSFERS * TRANSFER / (time.monotonic() - began) / 1e9)

    def without():
        torch.cuda.synchronize()
        rank.barrier()
        if gemm:
            time.sleep(0.002)  # as with transfers
            gemm.run()
            alone.append(gemm.milliseconds())

    for i in range(pairs):  # in turn, each first as often as the other
        for step in ((with_transfers, without), (without, with_transfers))[i % 2]:
            step()
    rank.check_steered(before, [TRANSFER] * (TRANSFERS * pairs))
    if rank.rank == 1:
        return {"transfer_gbs": round(sorted(rates)[len(rates) // 2], 2)}
    return {"alone_ms": alone, "beside_ms": beside}


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
