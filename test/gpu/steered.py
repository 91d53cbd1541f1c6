"""What the cases about collectives, memory and connections share on the rank's side: what HOCCL has
to have counted, buffers of several parts, the shapes that every collective is tried in."""

import collections
import json
import time

import torch
from rank_side import KIB, MIB, MIN_STEERED, POISON, STATS_LIMIT_S, first_wrong

DTYPES = (torch.int8, torch.bfloat16, torch.float32)
SIZES = [4 * KIB, 64 * KIB, MIB + 3, 16 * MIB, 64 * MIB, 256 * MIB]  # of a block, about
NCCL_PATH = "nccl"
OWN_BLOCK_PATH = "own-block"  # of what else would have taken the path in question


class Expected:
    """The steered operations from its making on, and their comparison with HOCCL's counters, where
    there are any.

    HOCCL counts every call to NCCL that moves data: once, with the bytes this rank sends to and
    receives from others in it; a send or receive, to itself too, with its bytes."""

    def __init__(self, rank):
        self._rank = rank
        self._sizes = []
        self._before = self._taken() if rank.has_stats() else None

    def _taken(self):
        """{path: [operations, bytes]} of what did not stay with NCCL."""
        paths = {}
        for c in self._rank.stats()["communicators"]:
            for path, counts in c["paths"].items():
                if path != NCCL_PATH:
                    entry = paths.setdefault(path, [0, 0])
                    entry[0] += counts.get("ops", 0)
                    entry[1] += counts.get("bytes", 0)
        return paths

    def collective(self, block, moved):
        """A collective each pair of which moves `block` bytes, `moved` of them by this rank."""
        if block >= MIN_STEERED:
            self._sizes.append(moved)

    def sends(self, *sizes):
        """Sends and receives."""
        self._sizes += [n for n in sizes if n >= MIN_STEERED]

    def check(self, path=None):
        """Exactly these took `path`; None: any path of HOCCL's, for memory that may need another
        one than the staged. Returns {path: [operations, bytes]}."""
        if self._before is None:
            return {}
        # Between GPUs of a node a rank's operations with itself are staged all the same.
        direct = path == "staged" and self._rank.path == "direct"
        if direct:
            path = None
        want = [len(self._sizes), sum(self._sizes)]
        end = time.monotonic() + STATS_LIMIT_S
        while True:
            now = self._taken()
            grown = {
                p: [n - b for n, b in zip(now[p], self._before.get(p, (0, 0)))]
                for p in now
                if path is None or p in (path, OWN_BLOCK_PATH)
            }
            got = [sum(g[0] for g in grown.values()), sum(g[1] for g in grown.values())]
            if got == want or time.monotonic() > end:
                break
            time.sleep(0.01)
        self._rank.check(
            got == want,
            f"{path or 'all paths but NCCL'}: {got} operations and bytes, expected {want}; "
            f"counters: {json.dumps(self._rank.stats())[:1500]}",
        )
        if direct and self._sizes:
            self._rank.check(
                grown.get("direct", [0, 0])[0] > 0, f"nothing went directly: {json.dumps(grown)}"
            )
        return {p: g for p, g in grown.items() if g[0]}


def parts_problem(buffer, parts):
    """What is wrong in a Buffer that consists of `parts` [(bytes, seed)], one behind the other, or
    with the guards around it; empty when nothing is."""
    at = 0
    for number, (size, seed) in enumerate(parts):
        view = buffer.bytes[at : at + size]
        wrong = first_wrong(view, seed)
        if wrong >= 0:
            got = int(view[wrong])
            return f"byte {wrong} of {size} of part {number} is {got} (poison is {POISON})"
        at += size
    assert at == buffer.size, f"{at} bytes of parts in a buffer of {buffer.size}"
    for name, around in (
        ("before", buffer.whole[: buffer.offset]),
        ("behind", buffer.whole[buffer.offset + buffer.size :]),
    ):
        if bool((around != POISON).any()):
            return f"bytes {name} the received region were overwritten"
    return ""


class Shape(collections.namedtuple("Shape", "dtype count asynchronous stream seed")):
    """One way to run a collective: `count` elements a block, as async_op or not, on a stream."""

    @property
    def block(self):
        return self.count * self.dtype.itemsize

    def run(self, call):
        """`call(async_op)`, and its completion in the order of the current stream."""
        work = call(self.asynchronous)
        if self.asynchronous:
            work.wait()

    def __str__(self):
        kind = "async" if self.asynchronous else "sync"
        return f"{self.count} x {str(self.dtype)[6:]} {kind}"


def shapes(rank, largest=256 * MIB):
    """Every type and size, each as async_op and not; by turns on the default stream, a side stream
    and one of high priority. All counts are odd."""
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    if rank.quick:
        largest = min(largest, 16 * MIB)
    turn = 0
    for dtype in DTYPES:
        for size in [n for n in SIZES if n <= largest]:
            for asynchronous in (False, True):
                count = size // dtype.itemsize | 1
                yield Shape(dtype, count, asynchronous, streams[turn % 3], 100 + 16 * turn)
                turn += 1
