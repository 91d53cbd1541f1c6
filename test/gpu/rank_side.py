"""The rank's side of the suite: one PyTorch process, its cases, its view of HOCCL's counters.

A case is a function case(rank) in the group's module, listed in its RANK_CASES. It calls
rank.check(...) for what must hold, which lets both ranks stay in step when one finds something
wrong, and returns figures. An exception ends the rank: the peer would wait for it for ever.
"""

import ctypes
import datetime
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MIN_STEERED = 64 * KIB  # HOCCL_MIN_BYTES' default
POISON = 0xA5
GUARD = 64  # poisoned bytes kept on both sides of a received region
PATTERN_CHUNK = 16 * MIB
STORE_LIMIT_S = 60
STATS_LIMIT_S = 2


def pattern(begin, end, seed, device="cuda"):
    """Bytes begin..end of pattern `seed`: a hash of the position, so that a byte from the wrong
    place, chunk or transfer does not look right."""
    i = torch.arange(begin, end, dtype=torch.int32, device=device)
    i = i * -1640531535 + (seed * 40503 + 12345)
    i = (i ^ (i >> 15)) * -2048144789
    i = i ^ (i >> 13)
    return (i & 255).to(torch.uint8)


def fill(view, seed):
    """Writes pattern `seed` over a uint8 view, in stream order."""
    for begin in range(0, view.numel(), PATTERN_CHUNK):
        end = min(begin + PATTERN_CHUNK, view.numel())
        view[begin:end] = pattern(begin, end, seed)


def first_wrong(view, seed):
    """Index of the first byte that is not pattern `seed`, or -1. Compared on the GPU."""
    for begin in range(0, view.numel(), PATTERN_CHUNK):
        end = min(begin + PATTERN_CHUNK, view.numel())
        expected = pattern(begin, end, seed)
        if not torch.equal(view[begin:end], expected):
            return begin + int((view[begin:end] != expected).nonzero()[0])
    return -1


class Buffer:
    """`size` bytes at `offset` in a larger allocation, poisoned all over; `bytes` is the uint8
    view, `as_dtype` the same bytes as another type."""

    def __init__(self, size, offset=GUARD):
        assert offset >= GUARD
        self.size, self.offset = size, offset
        self.whole = torch.full((offset + size + GUARD,), POISON, dtype=torch.uint8, device="cuda")
        self.bytes = self.whole[offset : offset + size]

    def as_dtype(self, dtype):
        return self.bytes.view(dtype)

    def problem(self, seed):
        """What is wrong with the received bytes or those around them; empty when nothing is."""
        wrong = first_wrong(self.bytes, seed)
        if wrong >= 0:
            got, want = int(self.bytes[wrong]), int(pattern(wrong, wrong + 1, seed)[0])
            return f"byte {wrong} of {self.size} is {got}, not {want} (poison is {POISON})"
        for name, around in (
            ("before", self.whole[: self.offset]),
            ("behind", self.whole[self.offset + self.size :]),
        ):
            if bool((around != POISON).any()):
                return f"bytes {name} the received region were overwritten"
        return ""


class Rank:
    def __init__(self, results):
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.peer = 1 - self.rank
        self.quick = os.environ.get("GPU_CHECK_QUICK") == "1"
        self.path = os.environ.get("GPU_CHECK_PATH", "staged")  # of what passes between the two
        self.problems = []
        self._results = results
        self._barriers = 0
        self._case = ""
        self._stats = None

    def start(self):
        torch.cuda.set_device(0)
        limit = datetime.timedelta(seconds=STORE_LIMIT_S)
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            self.world,
            self.rank == 0,
            timeout=limit,
        )
        dist.init_process_group(
            "nccl",
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world,
        )
        self.report({"event": "ready"})

    def report(self, event):
        with open(self._results, "a") as f:
            f.write(json.dumps(event) + "\n")

    # Steps between the ranks, by the store: no NCCL operation, nothing on the GPU.
    def barrier(self, limit_s=STORE_LIMIT_S):
        self._barriers += 1
        self.tell(f"barrier{self._barriers}")
        self.hear(f"barrier{self._barriers}", limit_s)

    def tell(self, key, value=""):
        self.store.set(f"{self._case}/{key}/{self.rank}", value)

    def hear(self, key, limit_s=STORE_LIMIT_S):
        """What the peer told (or tells within the limit) under `key`, as text."""
        name = f"{self._case}/{key}/{self.peer}"
        self.store.wait([name], datetime.timedelta(seconds=limit_s))
        return self.store.get(name).decode()

    def check(self, condition, problem):
        if not condition and len(self.problems) < 20:
            self.problems.append(problem)
        return bool(condition)

    # HOCCL's counters.
    def has_stats(self):
        return self._load_stats() is not None

    def _load_stats(self):
        if self._stats is None:
            try:
                self._stats = ctypes.CDLL(None).hocclStatsJson
            except AttributeError:
                return None
            self._stats.restype = ctypes.c_size_t
            self._stats.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        return self._stats

    def stats(self):
        """The counters of all communicators, as hocclStatsJson gives them."""
        function = self._load_stats()
        if function is None:
            raise RuntimeError("hocclStatsJson is not there: is the library preloaded?")
        size = 1 << 16
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = function(buffer, size)
            if length < size:
                return json.loads(buffer.value.decode() or '{"communicators":[]}')
            size = length + 1

    def totals(self, path=None):
        """(operations, bytes) over all communicators that took `path` (the one expected here)."""
        path = path or self.path
        ops = size = 0
        for c in self.stats()["communicators"]:
            counts = c["paths"].get(path, {})
            ops += counts.get("ops", 0)
            size += counts.get("bytes", 0)
        return ops, size

    def check_steered(self, before, sizes, path=None):
        """Since totals() gave `before`, exactly the operations of `sizes` (bytes of this rank's
        sends and receives) that are large enough took `path`."""
        path = path or self.path
        large = [n for n in sizes if n >= MIN_STEERED]
        want = (before[0] + len(large), before[1] + sum(large))
        end = time.monotonic() + STATS_LIMIT_S
        while (got := self.totals(path)) != want and time.monotonic() < end:
            time.sleep(0.01)
        self.check(
            got == want,
            f"{path} went from {before} to {got} (operations, bytes), "
            f"expected {want}; counters: {json.dumps(self.stats())[:1500]}",
        )

    # Running cases.
    def run(self, module, names):
        for name in names:
            self._case, self.problems, self._barriers = name, [], 0
            self.report({"event": "begin", "case": name})
            began = time.monotonic()
            try:
                self.barrier()
                figures = module.RANK_CASES[name](self) or {}
                torch.cuda.synchronize()
                outcome, detail = (
                    ("fail", "\n".join(self.problems)) if self.problems else ("pass", "")
                )
            except Exception:  # whatever it is, it is reported and ends this rank
                figures, outcome, detail = {}, "error", traceback.format_exc()[-3000:]
            self.report(
                {
                    "event": "end",
                    "case": name,
                    "outcome": outcome,
                    "detail": detail,
                    "figures": figures,
                    "seconds": time.monotonic() - began,
                }
            )
            if outcome == "error":
                print(detail, file=sys.stderr, flush=True)
                return 3
        self.barrier()
        return 0


def library(name):
    """A helper library that build.py made, loaded into this process."""
    return ctypes.CDLL(os.path.join(os.environ["GPU_CHECK_DIR"], f"lib{name}.so"))


def run_job(job):
    """Entry of a freshly forked rank. Returns the exit status."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module = importlib.import_module(job["module"])
    rank = Rank(job["results"])
    status = 4
    try:
        rank.start()
        status = rank.run(module, job["cases"])
    except Exception:
        traceback.print_exc()
    if status != 0:
        # The peer may be in any state: leave without the collective tear-down, which could wait.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    dist.destroy_process_group()
    return 0
