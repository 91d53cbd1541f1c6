"""Bare copies from GPU 0 to GPU 1, one way and both ways at once, as JSON on standard output:
{"oneway": {bytes: us}, "bidir": {bytes: us}}. What no direct path can beat."""

import json
import statistics
import sys

import torch

BATCHES, LONGEST_S = 5, 0.1
GUESS_GBS = 300.0


def measure(copies, iterations):
    """Microseconds of one round of `copies` [(to, from, stream)] back to back, the slowest
    direction's; median of batches."""
    times = []
    for _ in range(BATCHES + 1):
        events = []
        for device in (0, 1):
            torch.cuda.synchronize(device)
        for to, of, stream in copies:
            with torch.cuda.device(of.device), torch.cuda.stream(stream):
                begin = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                begin.record()
                events.append((begin, end))
        for _ in range(iterations):
            for to, of, stream in copies:
                with torch.cuda.device(of.device), torch.cuda.stream(stream):
                    to.copy_(of, non_blocking=True)
        for (to, of, stream), (_, end) in zip(copies, events):
            with torch.cuda.device(of.device), torch.cuda.stream(stream):
                end.record()
        for device in (0, 1):
            torch.cuda.synchronize(device)
        times.append(max(b.elapsed_time(e) for b, e in events) * 1e3 / iterations)
    return statistics.median(times[1:])


def main():
    sizes = [int(n) for n in sys.argv[1:]]
    largest = max(sizes)
    out = [torch.zeros(largest, dtype=torch.uint8, device=f"cuda:{d}") for d in (0, 1)]
    into = [torch.zeros(largest, dtype=torch.uint8, device=f"cuda:{d}") for d in (0, 1)]
    streams = [torch.cuda.Stream(device=d) for d in (0, 1)]
    found = {"oneway": {}, "bidir": {}}
    for size in sizes:
        there = (into[1][:size], out[0][:size], streams[0])
        back = (into[0][:size], out[1][:size], streams[1])
        iterations = max(2, min(200, int(LONGEST_S * GUESS_GBS * 1e9 / size)))
        found["oneway"][size] = measure([there], iterations)
        found["bidir"][size] = measure([there, back], iterations)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
