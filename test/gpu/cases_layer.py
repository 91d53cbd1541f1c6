"""Rank side of group layer: one Transformer layer, forward and backward, with and without traffic between
the two GPUs in turn; or beside nothing but copies to and from pinned host memory, which move the same bytes
over PCIe as the staged path does: what they cost, no path through the host can save.

A segment is some layers without a gap. In a segment with traffic, transfers are enqueued on a stream
of their own, more than last as long as its layers; compared are the layers all of whose time lies between
the end of the first transfer and the end of the last. The segment without traffic has the same
layers. Both ranks compute."""

import training_model as gpt  # first: it sets what cuBLAS needs before it starts

import math
import statistics

import torch
import torch.distributed as dist
from rank_side import MIB
from steered import Expected

DEVICE = "cuda"
HIDDEN, HEADS, BATCH, LENGTH = 4096, 32, 2, 2048
BLOCK = 256 * MIB  # a transfer: of one direction
LAYERS, PAIRS, QUICK_PAIRS = 16, 10, 4  # 0.14 s: long beside the GPU's control of its clock
WARM_UP_SEGMENTS, WARM_UP_TRANSFERS = 3, 6
OUTLAST = 1.5  # times as long as the layers, were both undisturbed


class AllGather:
    """In place, as FSDP's."""

    moved = 2 * BLOCK  # sent and received by this GPU

    def __init__(self, rank):
        self._all = torch.zeros(2 * BLOCK, dtype=torch.uint8, device=DEVICE)
        self._own = self._all.narrow(0, rank.rank * BLOCK, BLOCK)

    def start(self):
        return [dist.all_gather_into_tensor(self._all, self._own, async_op=True)]

    def expect(self, expected):
        expected.collective(BLOCK, 2 * BLOCK)


class OneWay:
    """Rank 0 sends, rank 1 receives."""

    moved = BLOCK

    def __init__(self, rank):
        self._tensor = torch.zeros(BLOCK, dtype=torch.uint8, device=DEVICE)
        self._call, self._peer = (dist.isend if rank.rank == 0 else dist.irecv), rank.peer

    def start(self):
        return [self._call(self._tensor, self._peer)]

    def expect(self, expected):
        expected.sends(BLOCK)


class BothWays:
    moved = 2 * BLOCK

    def __init__(self, rank):
        self._out, self._into = torch.zeros(2, BLOCK, dtype=torch.uint8, device=DEVICE).unbind(0)
        self._peer = rank.peer

    def start(self):
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._out, self._peer),
                dist.P2POp(dist.irecv, self._into, self._peer),
            ]
        )

    def expect(self, expected):
        expected.sends(BLOCK, BLOCK)


class _HostCopies:
    """Copies between the device and pinned memory, on streams of their own; no peer takes part."""

    def __init__(self, out, into):
        self._copies = []
        for wanted, to_host in ((out, True), (into, False)):
            if wanted:
                host = torch.zeros(BLOCK, dtype=torch.uint8, pin_memory=True)
                device = torch.zeros(BLOCK, dtype=torch.uint8, device=DEVICE)
                pair = (host, device) if to_host else (device, host)
                self._copies.append((*pair, torch.cuda.Stream()))

    def start(self):
        """Like a transfer of torch.distributed's: begins behind the current stream, which the wait
        has wait for it."""
        works = []
        for to, source, stream in self._copies:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
            works.append(_Copied(stream))
        return works

    def expect(self, expected):
        """Nothing that is counted."""


class _Copied:
    def __init__(self, stream):
        self._done = stream.record_event()

    def wait(self):
        torch.cuda.current_stream().wait_event(self._done)


class HostOneWay(_HostCopies):
    """Rank 0 copies to the host, rank 1 from it."""

    moved = BLOCK

    def __init__(self, rank):
        super().__init__(rank.rank == 0, rank.rank == 1)


class HostBothWays(_HostCopies):
    moved = 2 * BLOCK

    def __init__(self, rank):
        super().__init__(True, True)


def _event():
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Layer:
    def __init__(self):
        with torch.device(DEVICE):
            self._layer = gpt.Block(HIDDEN, HEADS).to(torch.bfloat16)
            shape = (BATCH, LENGTH, HIDDEN)
            self._x = torch.randn(shape, dtype=torch.bfloat16).requires_grad_()
            self._gradient = torch.randn(shape, dtype=torch.bfloat16)

    def run(self):
        """Enqueues it once; the events before, between and behind forward and backward."""
        self._x.grad = None
        self._layer.zero_grad(set_to_none=True)
        begun = _event()
        y = self._layer(self._x)
        between = _event()
        y.backward(self._gradient)
        return begun, between, _event()


class _Measurement:
    def __init__(self, rank, traffic):
        self._rank, self._traffic = rank, traffic
        self._layer, self._side = _Layer(), torch.cuda.Stream()
        self.transfers = 0

    def segment(self, transfers):
        """Runs one; ([(begin, middle, end) of each layer], [end of each transfer]) in ms."""
        torch.cuda.synchronize()
        self._rank.barrier()
        origin, ends = _event(), []
        with torch.cuda.stream(self._side):
            works = [self._traffic.start() for _ in range(transfers)]
            for each in works:
                for work in each:
                    work.wait()
                ends.append(_event())
        layers = [self._layer.run() for _ in range(LAYERS)]
        torch.cuda.synchronize()
        self.transfers += transfers
        return (
            [tuple(origin.elapsed_time(e) for e in layer) for layer in layers],
            [origin.elapsed_time(e) for e in ends],
        )

    def enough(self):
        """How many transfers outlast the layers of a segment; the same on both ranks."""
        for _ in range(WARM_UP_SEGMENTS):
            layers, _ = self.segment(0)
        _, ends = self.segment(WARM_UP_TRANSFERS)
        _, ends = self.segment(WARM_UP_TRANSFERS)
        if self._rank.rank == 0:
            each = (ends[-1] - ends[0]) / (len(ends) - 1)
            wanted = math.ceil(OUTLAST * (layers[-1][2] - layers[0][0]) / each) + 2
            self._rank.tell("transfers", str(wanted))
            return wanted
        return int(self._rank.hear("transfers"))


def _moved(ends, begin, end):
    """Transfers, with fractions, that lie between `begin` and `end`."""
    total = 0.0
    for first, last in zip(ends, ends[1:]):
        total += max(0.0, min(end, last) - max(begin, first)) / (last - first)
    return total


def _medians(layers):
    return {
        "forward_ms": round(statistics.median(m - b for b, m, _ in layers), 4),
        "backward_ms": round(statistics.median(e - m for _, m, e in layers), 4),
        "layer_ms": round(statistics.median(e - b for b, _, e in layers), 4),
    }


def _measure(rank, kind):
    gpt.only_flash_attention()
    expected, traffic = Expected(rank), kind(rank)
    measurement = _Measurement(rank, traffic)
    transfers = measurement.enough()
    pairs, missed = [], ""
    for n in range(QUICK_PAIRS if rank.quick else PAIRS):
        # Whichever comes first finds the GPU a little cooler: by turns.
        order = (transfers, 0) if n % 2 else (0, transfers)
        runs = {count: measurement.segment(count) for count in order}
        layers, ends = runs[transfers]
        beside = [x for x in layers[1:] if x[0] >= ends[0] and x[2] <= ends[-1]]
        if len(beside) < LAYERS // 2:
            pairs.append(None)
            missed = (
                f"the last such pair, {n}: {len(beside)} of {LAYERS} layers, {layers[0][0]:.1f} to "
                f"{layers[-1][2]:.1f} ms, within the transfers, {ends[0]:.1f} to {ends[-1]:.1f} ms"
            )
            continue
        moved = statistics.median(_moved(ends, b, e) for b, _, e in beside) * traffic.moved
        pairs.append(
            {
                "alone": _medians(runs[0][0][1:]),
                "beside": _medians(beside),
                "gb_a_layer": round(moved / 1e9, 4),
                "one_way_gbs": round(BLOCK * (len(ends) - 1) / (ends[-1] - ends[0]) / 1e6, 2),
            }
        )
    compared = len(pairs) - pairs.count(None)
    rank.check(
        compared > len(pairs) // 2, f"{compared} of {len(pairs)} pairs can be compared; {missed}"
    )
    for _ in range(measurement.transfers):
        traffic.expect(expected)
    taken = expected.check(rank.path)
    return {
        f"rank{rank.rank}": {
            "pairs": pairs,
            "transfers_a_segment": transfers,
            "steered": taken,
            "environment": gpt.environment(),
        }
    }


def all_gather(rank):
    return _measure(rank, AllGather)


def send_recv_one_way(rank):
    return _measure(rank, OneWay)


def send_recv_both_ways(rank):
    return _measure(rank, BothWays)


def bare_one_way(rank):
    return _measure(rank, HostOneWay)


def bare_both_ways(rank):
    return _measure(rank, HostBothWays)


RANK_CASES = {
    "all_gather": all_gather,
    "send_recv_one_way": send_recv_one_way,
    "send_recv_both_ways": send_recv_both_ways,
    "bare_one_way": bare_one_way,
    "bare_both_ways": bare_both_ways,
}
