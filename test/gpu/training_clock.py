"""What a step of training takes, measured without holding anything up.

**Compute time** is the time of the forward and backward kernels on the compute stream. Each block and
the head record a CUDA event in front of and behind their kernels, in the backward pass by an autograd
function at either end. Waits for transfers, the parameters that FSDP gathers and gradients that it
reduces are in front of the first or behind the second event, so what the sum holds is kernels: longer
where transfers take SMs, memory bandwidth or power from them. Not in it are the embedding, the
optimizer and the copies of FSDP.

**CPU slack** is GPU start minus end of CPU launch: how far the thread that launches is ahead of the GPU. The
marked operation is the event in front of a block: the host's clock is read when the call that
enqueues it has returned, and the event's own time stamp is when the GPU came to it. The two clocks are
tied together at the end of each step, when the GPU is idle: an event is recorded and waited for, and
the host's clock read then; that reading is late by the way back, about 10 us. A transfer's slack is the
same for the call that starts it: from its return to the time stamp of an event recorded on the
caller's stream just before, which is when its data were ready; transfers before it in the same stream
make its real start later.

**Step time** is between the moments at which the host finds two successive steps done; it waits for the GPU
once a step, as a program that prints the loss does."""

import statistics
import time

import torch

WARM_UP = 10  # steps that count in no figure: lazy loading, communicators, clocks


class _Mark(torch.autograd.Function):
    """Passes a tensor on, and tells when forward and backward pass come by."""

    @staticmethod
    def forward(ctx, x, in_forward, in_backward):
        ctx.in_backward = in_backward
        in_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.in_backward()
        return gradient, None, None


def spread(values, digits=3):
    """Median and the tenth and ninetieth percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": round(statistics.median(ordered), digits),
        "p10": round(ordered[round(0.1 * last)], digits),
        "p90": round(ordered[round(0.9 * last)], digits),
    }


def _event():
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Step:
    def __init__(self):
        self.spans = {"forward": [], "backward": []}  # [first event, last event]
        self.launched = []  # (event, host's ns when the call that enqueued it had returned)
        self.transfers = []  # the same of the calls that start transfers
        self.reference = None  # (event, host's ns when it was seen)

    def slack_ms(self, launches):
        event, seen_ns = self.reference
        return [
            (seen_ns - host_ns) / 1e6 - started.elapsed_time(event) for started, host_ns in launches
        ]

    def compute_ms(self, direction):
        return sum(first.elapsed_time(last) for first, last in self.spans[direction])


class Clock:
    def __init__(self):
        self._steps, self._ends = [], []
        self._step = _Step()

    # Around compute.
    def _begin(self, direction):
        event = _event()
        self._step.launched.append((event, time.perf_counter_ns()))
        self._step.spans[direction].append([event, None])

    def _end(self, direction):
        self._step.spans[direction][-1][1] = _event()

    def enter(self, x):
        """To be put in front of a part of the model: its kernels begin here, and those of its backward
        pass have ended when the gradient comes back here."""
        return _Mark.apply(x, lambda: self._begin("forward"), lambda: self._end("backward"))

    def leave(self, x):
        return _Mark.apply(x, lambda: self._end("forward"), lambda: self._begin("backward"))

    def transfer(self, call):
        """Runs `call`, which starts a transfer on the current stream; returns what it returns."""
        event = _event()
        result = call()
        self._step.transfers.append((event, time.perf_counter_ns()))
        return result

    def end_step(self):
        """Waits for the GPU: the step is over."""
        torch.cuda.synchronize()
        self._ends.append(time.perf_counter_ns())
        reference = _event()
        reference.synchronize()
        self._step.reference = (reference, time.perf_counter_ns())
        self._steps.append(self._step)
        self._step = _Step()

    def figures(self):
        """Medians and spreads over the steps behind the warm-up."""
        counted = self._steps[WARM_UP:]
        took = [(b - a) / 1e6 for a, b in zip(self._ends, self._ends[1:])][WARM_UP - 1 :]
        forward = [s.compute_ms("forward") for s in counted]
        backward = [s.compute_ms("backward") for s in counted]
        slack = [s.slack_ms(s.launched) for s in counted]
        transfers = [s.slack_ms(s.transfers) for s in counted if s.transfers]
        return {
            "steps": len(self._steps),
            "counted_steps": len(counted),
            "step_ms": spread(took),
            "step_ms_each": [round(t, 2) for t in took],
            "forward_ms": spread(forward),
            "backward_ms": spread(backward),
            "compute_ms": spread([f + b for f, b in zip(forward, backward)]),
            "slack_ms": spread([statistics.median(s) for s in slack]),
            "least_slack_ms": spread([min(s) for s in slack]),
            "transfer_slack_ms": spread([statistics.median(s) for s in transfers]),
            "least_transfer_slack_ms": spread([min(s) for s in transfers]),
            "transfers_a_step": len(counted[-1].transfers),
        }
