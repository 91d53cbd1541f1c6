"""Rank side of group p2p: every shape of send/recv a training job makes, every byte compared."""

import time

import torch
import torch.distributed as dist
from rank_side import GIB, GUARD, KIB, MIB, MIN_STEERED, POISON, Buffer, fill, first_wrong

SIZES = [1, 4095, 65535, 65536, 65537, MIB + 3, 16 * MIB, 64 * MIB - 1, GIB]
ODD = 3  # elements by which a buffer is off its allocation's alignment
SLEEP_CYCLES = 20_000_000  # about 10 ms of GPU time
BURST_BUFFERS = 256


def _sizes(rank):
    return SIZES[:-1] if rank.quick else SIZES


def _verify(rank, buffer, seed, what):
    problem = buffer.problem(seed)
    rank.check(not problem, f"{what}: {problem}")


def _one_way(rank, sender, tensor, group=None):
    """Starts the transfer `sender` → its peer of this rank's `tensor`."""
    if rank.rank == sender:
        return dist.isend(tensor, rank.peer, group=group)
    return dist.irecv(tensor, rank.peer, group=group)


def _all_sizes(rank, dtype):
    done = []
    before = rank.totals()
    unit = dtype.itemsize
    seed = 100
    for sender in (0, 1):
        for size in _sizes(rank):
            size = max(unit, size // unit * unit)
            seed += 1
            buffer = Buffer(size, GUARD + ODD * unit)
            if rank.rank == sender:
                fill(buffer.bytes, seed)
                dist.send(buffer.as_dtype(dtype), rank.peer)
            else:
                dist.recv(buffer.as_dtype(dtype), rank.peer)
                _verify(rank, buffer, seed, f"{size} bytes {sender}→{1 - sender}")
            done.append(size)
    rank.check_steered(before, done)
    torch.cuda.empty_cache()
    return {}


def _streams(rank):
    streams = [torch.cuda.Stream(priority=-(i % 2)) for i in range(4)]
    sizes = [65536, MIB + 3, 4095, 16 * MIB, 65537, 3 * MIB + 1]
    before = rank.totals()
    pending, done = [], []
    for i in range(24):
        stream, size, sender, seed = streams[i % 4], sizes[i % 6], i // 3 % 2, 200 + i
        with torch.cuda.stream(stream):
            buffer = Buffer(size, GUARD + i)
            if rank.rank == sender:
                fill(buffer.bytes, seed)
            work = _one_way(rank, sender, buffer.bytes)
        pending.append((stream, work, buffer, sender, seed))
        done.append(size)
    for stream, work, _, _, _ in pending:
        with torch.cuda.stream(stream):
            work.wait()
    torch.cuda.synchronize()
    for i, (_, _, buffer, sender, seed) in enumerate(pending):
        if rank.rank != sender:
            _verify(rank, buffer, seed, f"transfer {i}")
    rank.check_steered(before, done)


def _exchange(rank, sizes, seed, order=None):
    """One batch that sends and receives a buffer of each size. `order` is a list of ("send" |
    "recv", index into sizes): both ranks must use the same order of sends as of receives."""
    out = [Buffer(n, GUARD + 2 * i + 1) for i, n in enumerate(sizes)]
    into = [Buffer(n, GUARD + 2 * i + 5) for i, n in enumerate(sizes)]
    for i, b in enumerate(out):
        fill(b.bytes, seed + 2 * i + rank.rank)
    order = order or [(k, i) for i in range(len(sizes)) for k in ("send", "recv")]
    ops = [
        (
            dist.P2POp(dist.isend, out[i].bytes, rank.peer)
            if kind == "send"
            else dist.P2POp(dist.irecv, into[i].bytes, rank.peer)
        )
        for kind, i in order
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for i, b in enumerate(into):
        _verify(rank, b, seed + 2 * i + rank.peer, f"batch of {sizes}, number {i}")
    return list(sizes) * 2


def _both_directions(rank):
    before, done = rank.totals(), []
    for i, size in enumerate(_sizes(rank)):
        done += _exchange(rank, [size], 300 + 10 * i)
    rank.check_steered(before, done)
    torch.cuda.empty_cache()


def _one_f_one_b(rank):
    # A middle stage: receive the activation, send the gradient, send the activation, receive the
    # gradient, all in one group. With two ranks both neighbours are the peer.
    order = [("recv", 0), ("send", 0), ("send", 1), ("recv", 1)]
    before, done = rank.totals(), []
    for step in range(8):
        sizes = [4 * MIB + step, 8 * MIB - step] if step % 2 else [64 * KIB, 2 * MIB + step]
        done += _exchange(rank, sizes, 500 + 10 * step, order)
    rank.check_steered(before, done)


def _mixed_groups(rank):
    before, done = rank.totals(), []
    for step, sizes in enumerate(
        (
            [4095, MIB + 3],
            [16 * MIB, 1, 65537],
            [65535, 65536, 7, 3 * MIB],
            [12, 34],
            [5 * MIB, 9 * MIB],
        )
    ):
        done += _exchange(rank, sizes, 700 + 20 * step)
    rank.check_steered(before, done)


def _two_communicators(rank):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for g in groups:  # created in one order on both ranks, as NCCL asks
        _one_way(rank, 0, torch.zeros(MIB, dtype=torch.uint8, device="cuda"), g).wait()
    torch.cuda.synchronize()
    before, done = rank.totals(), []
    for step in range(20):
        # Rank 1 takes the communicators in the other order. In odd steps they also run in opposite
        # directions, so that each rank's first operation waits for the other's second.
        senders = (0, step % 2)
        sizes = (8 * MIB + step, 2 * MIB + 3 * step)
        buffers = [Buffer(n) for n in sizes]
        for g in (0, 1):
            if rank.rank == senders[g]:
                fill(buffers[g].bytes, 900 + 2 * step + g)
        torch.cuda.synchronize()
        works = {}
        for g in ((0, 1) if rank.rank == 0 else (1, 0)):
            with torch.cuda.stream(streams[g]):
                works[g] = _one_way(rank, senders[g], buffers[g].bytes, groups[g])
        for g in (0, 1):
            with torch.cuda.stream(streams[g]):
                works[g].wait()
        torch.cuda.synchronize()
        for g in (0, 1):
            if rank.rank != senders[g]:
                _verify(rank, buffers[g], 900 + 2 * step + g, f"step {step}, communicator {g}")
        done += sizes
    rank.check_steered(before, done)


def _order_on(rank, stream, seed, rounds=6):
    """On one stream: the transfer comes after the kernel that fills its buffer and before the
    kernels that overwrite or read it."""
    done = []
    with torch.cuda.stream(stream):
        for i in range(rounds):
            size = (MIB + 3, 64 * KIB, 16 * MIB)[i % 3]
            buffer = Buffer(size)
            if rank.rank == i % 2:
                torch.cuda._sleep(SLEEP_CYCLES)
                fill(buffer.bytes, seed + i)
                dist.send(buffer.bytes, rank.peer)
                buffer.bytes.fill_(POISON)
            else:
                dist.recv(buffer.bytes, rank.peer)
                copy = buffer.bytes.clone()
                buffer.bytes.fill_(POISON)
                wrong = first_wrong(copy, seed + i)
                rank.check(wrong < 0, f"round {i}: byte {wrong} of {size} is {int(copy[wrong])}")
            done.append(size)
    torch.cuda.synchronize()
    return done


def _stream_order(rank):
    before, done = rank.totals(), []
    kinds = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    for k, stream in enumerate(kinds):
        done += _order_on(rank, stream, 1000 + 50 * k)
    rank.check_steered(before, done)


def _buffer_reuse(rank):
    before, done = rank.totals(), []
    for i in range(12):
        size = (64 * KIB, 16 * MIB + 1, 2 * MIB)[i % 3]
        buffer = Buffer(size)
        torch.cuda.synchronize()
        if rank.rank == 0:
            fill(buffer.bytes, 1300 + i)
            dist.send(buffer.bytes, 1)
            buffer.bytes.fill_(POISON)  # in stream order: the receiver must not see it
        else:
            time.sleep(0.01)  # the overwrite has long been enqueued when this arrives
            dist.recv(buffer.bytes, 0)
            _verify(rank, buffer, 1300 + i, f"round {i}, {size} bytes")
        done.append(size)
    rank.check_steered(before, done)


def _burst(rank):
    # More than HOCCL_FLAG_POOL's default of 4096 can be pending at once: the launch must throttle.
    count = 1000 if rank.quick else 5000
    buffers = [Buffer(MIN_STEERED) for _ in range(BURST_BUFFERS)]
    if rank.rank == 0:
        for i, b in enumerate(buffers):
            fill(b.bytes, 1500 + i)
    torch.cuda.synchronize()
    before = rank.totals()
    began = time.monotonic()
    works = [_one_way(rank, 0, buffers[i % BURST_BUFFERS].bytes) for i in range(count)]
    launched = time.monotonic()
    works[-1].wait()
    torch.cuda.synchronize()
    ended = time.monotonic()
    if rank.rank == 1:
        for i, b in enumerate(buffers):
            _verify(rank, b, 1500 + i, f"buffer {i}")
    rank.check_steered(before, [MIN_STEERED] * count)
    return {
        f"rank{rank.rank}_launch_us_each": round((launched - began) / count * 1e6, 2),
        f"rank{rank.rank}_total_us_each": round((ended - began) / count * 1e6, 2),
    }


RANK_CASES = {
    "sizes_int8": lambda rank: _all_sizes(rank, torch.int8),
    "sizes_bf16": lambda rank: _all_sizes(rank, torch.bfloat16),
    "sizes_fp32": lambda rank: _all_sizes(rank, torch.float32),
    "several_streams": _streams,
    "both_directions_at_once": _both_directions,
    "one_f_one_b": _one_f_one_b,
    "small_and_large_in_one_group": _mixed_groups,
    "two_communicators_opposite_order": _two_communicators,
    "stream_order": _stream_order,
    "buffer_reuse": _buffer_reuse,
    "burst": _burst,
}
