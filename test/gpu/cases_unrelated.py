"""Rank side of group unrelated: worker and other child processes of a rank with transfers under
way."""

import os
import subprocess
import sys
import time

import procs
import torch
import torch.distributed as dist
import unrelated_programs
from rank_side import GIB, MIB, Buffer, fill
from steered import Expected

CHILDREN = 20
IN_FLIGHT, SIZE = 20, GIB  # about half a second at the copy engines' rate
GONE_S = 5


class _Transfers:
    """Exchanges that are under way from `with` to its end."""

    def __init__(self, rank):
        self._rank, self._size = rank, 64 * MIB if rank.quick else SIZE
        self._out, self._into = Buffer(self._size), Buffer(self._size)
        fill(self._out.bytes, 60 + rank.rank)
        self._children = None

    def _exchange(self):
        peer = self._rank.peer
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._out.bytes, peer),
                dist.P2POp(dist.irecv, self._into.bytes, peer),
            ]
        )

    def __enter__(self):
        for work in self._exchange():
            work.wait()
        torch.cuda.synchronize()
        self._children = set(procs.descendants(os.getpid()))
        self._rank.barrier()
        self._expected = Expected(self._rank)
        self._works = [w for _ in range(IN_FLIGHT) for w in self._exchange()]
        return self

    def __exit__(self, *_):
        for work in self._works:
            work.wait()
        torch.cuda.synchronize()
        problem = self._into.problem(60 + self._rank.peer)
        self._rank.check(not problem, problem)
        self._expected.sends(*[self._size] * (2 * IN_FLIGHT))
        self._expected.check("staged")

        def left():
            return set(procs.descendants(os.getpid())) - self._children

        procs.wait_until(lambda: not left(), GONE_S, 0.05)
        found = [procs.describe(p) for p in left() if "resource_tracker" not in _command(p)]
        self._rank.check(not found, f"processes left: {found}")


def _command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _loaders(rank, method):
    with _Transfers(rank):
        began = time.monotonic()
        found = unrelated_programs.loaded((method,))
        lasted = time.monotonic() - began
    want = 64 * 63 // 2
    rank.check(found == [want, want], f"{method}ed workers gave {found}, not {want} twice")
    return {f"rank{rank.rank}_s": round(lasted, 2)}


def subprocesses(rank):
    with _Transfers(rank):
        for i in range(CHILDREN):
            out = subprocess.run(
                ["sh", "-c", f"seq 1 1000 | sort -rn | head -1; exit {i % 3}"],
                capture_output=True,
                text=True,
                timeout=20,
            )
            rank.check(
                (out.stdout, out.stderr, out.returncode) == ("1000\n", "", i % 3),
                f"child {i}: {out}",
            )
        out = subprocess.run(
            [sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, timeout=20
        )
        rank.check((out.stdout, out.stderr) == ("42\n", ""), f"python: {out}")


def forked_children(rank):
    """Copies of the rank that end at once, with the rank's descriptors and mappings in them: by
    _exit, by exec, by a signal."""
    with _Transfers(rank):
        for i in range(CHILDREN):
            pid = os.fork()
            if pid == 0:
                if i % 3 == 0:
                    os._exit(5)
                if i % 3 == 1:
                    os.execv("/bin/sh", ["sh", "-c", "exit 5"])
                os.kill(os.getpid(), 9)
            _, status = os.waitpid(pid, 0)
            good = os.WTERMSIG(status) == 9 if i % 3 == 2 else os.WEXITSTATUS(status) == 5
            rank.check(good, f"child {i} ended with wait status {status}")


RANK_CASES = {
    "forked_data_loaders": lambda rank: _loaders(rank, "fork"),
    "spawned_data_loaders": lambda rank: _loaders(rank, "spawn"),
    "subprocesses": subprocesses,
    "forked_children": forked_children,
}
