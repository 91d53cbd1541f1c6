"""Reads what kernel_trace.cpp wrote and names what needed an SM inside a window of time."""

import json
import os

SMALL_MEMSET = 4096  # runs without an SM; larger ones may not (docs/gpu-check.md)
SMALL_COPY = 32 << 10  # host-to-device copies below this go through the compute channel
MARGIN_NS = 50_000_000  # the ranks are idle this long on both sides of a window, so that the
# conversion of the GPU's clock cannot move work across its edge


class Trace:
    def __init__(self, path):
        with open(path) as f:
            data = json.load(f)
        self.pid, self.executable = data["pid"], os.path.basename(data["executable"])
        self.flushed_ns, self.lost, self.error = data["flushed_ns"], data["lost"], data["error"]
        self._names = data["names"]
        self.events = data["events"]  # [kind, start, end, bytes, index into names]

    def within(self, begin, end):
        """Events of the window; those without times belong to every window."""
        return [
            e
            for e in self.events
            if e[1] == 0 or (e[1] < end + MARGIN_NS and e[2] > begin - MARGIN_NS)
        ]

    def before(self, begin):
        return [e for e in self.events if 0 < e[1] < begin - MARGIN_NS]

    def violations(self, begin, end):
        """What must not be there, as text: kernels, copies inside one device, large memsets."""
        found = []
        for kind, start, _, size, name in self.within(begin, end):
            if start == 0:
                found.append(f"{kind} without a time")
            elif kind == "kernel":
                found.append(f"kernel {self._names[name]}")
            elif kind in ("DtoD", "copy"):
                found.append(f"{kind} {size}")
            elif kind == "memset" and size > SMALL_MEMSET:
                found.append(f"memset {size}")
        return sorted(found)

    def bytes(self, kind, begin, end):
        return sum(e[3] for e in self.within(begin, end) if e[0] == kind and e[3] >= SMALL_COPY)

    def small_copies_in(self, begin, end):
        return sum(1 for e in self.within(begin, end) if e[0] == "HtoD" and e[3] < SMALL_COPY)

    def counts(self, begin, end):
        """{kind: [number, bytes]} of the window."""
        out = {}
        for kind, _, _, size, _ in self.within(begin, end):
            entry = out.setdefault(kind, [0, 0])
            entry[0] += 1
            entry[1] += size
        return out

    def usable(self, end):
        """Why this trace cannot speak for a window that closed at `end`; empty when it can."""
        if self.error:
            return f"{self.executable} {self.pid}: CUPTI: {self.error}"
        if self.lost:
            return f"{self.executable} {self.pid}: {self.lost} records lost"
        if self.flushed_ns < end + MARGIN_NS:
            return f"{self.executable} {self.pid}: last flushed before the window closed"
        return ""


def load(directory, pid):
    """The trace of a process, or None where it left none."""
    path = os.path.join(directory, f"{pid}.json")
    return Trace(path) if os.path.exists(path) else None
