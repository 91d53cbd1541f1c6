"""Rank side of group collectives: PyTorch's collectives between two ranks, every byte compared."""

import cases_zerosm
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_side import GUARD, KIB, MIB, Buffer, fill
from steered import Expected, Shape, parts_problem, shapes

ODD = 3  # elements by which a buffer is off its allocation's alignment
WORLD = 2
WINDOW_BLOCK = 64 * MIB + 1
WINDOW_SKEW = [[MIB + 1, 16 * MIB + 3], [5 * MIB, 65537]]  # rank s to rank d, bytes


def _buffer(shape, blocks=1):
    unit = shape.dtype.itemsize
    return Buffer(shape.block * blocks, GUARD + ODD * unit)


def _every_shape(rank, one, largest=256 * MIB):
    """`one(rank, shape, expected)` for every shape, on the shape's stream; returns its problem."""
    expected = Expected(rank)
    for shape in shapes(rank, largest):
        with torch.cuda.stream(shape.stream):
            problem = one(rank, shape, expected)
            rank.check(not problem, f"{shape}: {problem}")
    torch.cuda.synchronize()
    expected.check("staged")
    torch.cuda.empty_cache()


def _own(rank, shape):
    """This rank's block, with its pattern."""
    own = _buffer(shape)
    fill(own.bytes, shape.seed + rank.rank)
    return own


def _of_all_ranks(shape):
    return [(shape.block, shape.seed + r) for r in range(WORLD)]


def _all_gather(rank, shape, expected, in_place=False):
    out = _buffer(shape, WORLD)
    if in_place:
        own = out.bytes[rank.rank * shape.block : (rank.rank + 1) * shape.block]
        fill(own, shape.seed + rank.rank)
    else:
        own = _own(rank, shape).bytes
    shape.run(
        lambda a: dist.all_gather_into_tensor(
            out.as_dtype(shape.dtype), own.view(shape.dtype), async_op=a
        )
    )
    expected.collective(shape.block, 2 * shape.block)
    return parts_problem(out, _of_all_ranks(shape))


def _all_gather_list(rank, shape, expected):
    own, out = _own(rank, shape), [_buffer(shape) for _ in range(WORLD)]
    into = [b.as_dtype(shape.dtype) for b in out]
    shape.run(lambda a: dist.all_gather(into, own.as_dtype(shape.dtype), async_op=a))
    expected.collective(shape.block, 2 * shape.block)
    problems = [b.problem(shape.seed + r) for r, b in enumerate(out)]
    return next((p for p in problems if p), "")


def _pair_seed(seed, source, destination):
    return seed + 2 * source + destination


def _all_to_all_equal(rank, shape, expected):
    block = shape.block
    into, out = _buffer(shape, WORLD), _buffer(shape, WORLD)
    for d in range(WORLD):
        fill(into.bytes[d * block : (d + 1) * block], _pair_seed(shape.seed, rank.rank, d))
    shape.run(
        lambda a: dist.all_to_all_single(
            out.as_dtype(shape.dtype), into.as_dtype(shape.dtype), async_op=a
        )
    )
    expected.collective(block, 2 * block)
    return parts_problem(out, [(block, _pair_seed(shape.seed, s, rank.rank)) for s in range(WORLD)])


def _skewed(rank, shape, table):
    """One all_to_all_single with table[s][d] elements from rank s to rank d; its problem."""
    unit, me = shape.dtype.itemsize, rank.rank
    give, take = table[me], [table[s][me] for s in range(WORLD)]
    into = Buffer(sum(give) * unit, GUARD + ODD * unit)
    out = Buffer(sum(take) * unit, GUARD + ODD * unit)
    at = 0
    for d, n in enumerate(give):
        fill(into.bytes[at : at + n * unit], _pair_seed(shape.seed, me, d))
        at += n * unit
    shape.run(
        lambda a: dist.all_to_all_single(
            out.as_dtype(shape.dtype), into.as_dtype(shape.dtype), take, give, async_op=a
        )
    )
    parts = [(n * unit, _pair_seed(shape.seed, s, me)) for s, n in enumerate(take)]
    return parts_problem(out, parts), [n * unit for n in give + take]


def _all_to_all_skewed(rank, shape, expected):
    n = shape.count
    tables = [
        [[n, 3 * n + 2], [n // 2 + 1, 5]],
        [[0, n], [n, 0]],  # nothing for itself
        [[0, n], [0, 0]],  # one direction
        [[n, 0], [0, n]],  # nothing for others
    ]
    for i, table in enumerate(tables):
        problem, sizes = _skewed(rank, shape, table)
        expected.sends(*sizes)
        if problem:
            return f"table {i}: {problem}"
    return ""


def _broadcast(rank, shape, expected):
    for root in range(WORLD):
        buffer = _buffer(shape)
        if rank.rank == root:
            fill(buffer.bytes, shape.seed + root)
        tensor = buffer.as_dtype(shape.dtype)
        shape.run(lambda a, r=root, t=tensor: dist.broadcast(t, r, async_op=a))
        expected.collective(shape.block, shape.block)
        problem = buffer.problem(shape.seed + root)
        if problem:
            return f"root {root}: {problem}"
    return ""


def _gather(rank, shape, expected):
    for root in range(WORLD):
        own, out = _own(rank, shape), [_buffer(shape) for _ in range(WORLD)]
        into = [b.as_dtype(shape.dtype) for b in out] if rank.rank == root else None
        tensor = own.as_dtype(shape.dtype)
        shape.run(lambda a, r=root, t=tensor, i=into: dist.gather(t, i, dst=r, async_op=a))
        expected.sends(shape.block)  # PyTorch copies the root's own block itself
        for r, b in enumerate(out if into else []):
            problem = b.problem(shape.seed + r)
            if problem:
                return f"root {root}, from {r}: {problem}"
    return ""


def _scatter(rank, shape, expected):
    for root in range(WORLD):
        own, out = [_buffer(shape) for _ in range(WORLD)], _buffer(shape)
        for d, b in enumerate(own):
            fill(b.bytes, _pair_seed(shape.seed, root, d))
        give = [b.as_dtype(shape.dtype) for b in own] if rank.rank == root else None
        tensor = out.as_dtype(shape.dtype)
        shape.run(lambda a, r=root, t=tensor, g=give: dist.scatter(t, g, src=r, async_op=a))
        expected.sends(shape.block)
        problem = out.problem(_pair_seed(shape.seed, root, rank.rank))
        if problem:
            return f"root {root}: {problem}"
    return ""


def _coalesced_gathers(rank, shape, expected):
    """Several all_gather_into_tensor of one _coalescing_manager: one group of NCCL's."""
    parts = [
        shape._replace(count=max(1, shape.count // k), seed=shape.seed + 2 * k) for k in (1, 2, 5)
    ]
    own = [_own(rank, p) for p in parts]
    out = [_buffer(p, WORLD) for p in parts]
    with dist._coalescing_manager(async_ops=shape.asynchronous) as manager:
        for a, b in zip(out, own):
            dist.all_gather_into_tensor(a.as_dtype(shape.dtype), b.as_dtype(shape.dtype))
    if shape.asynchronous:
        manager.wait()
    for p in parts:
        expected.collective(p.block, 2 * p.block)
    problems = [parts_problem(b, _of_all_ranks(p)) for p, b in zip(parts, out)]
    return next((p for p in problems if p), "")


def _coalesced_broadcasts(rank, shape, expected):
    """Broadcasts with different roots in one group."""
    buffers = [_buffer(shape) for _ in range(WORLD)]
    fill(buffers[rank.rank].bytes, shape.seed + rank.rank)
    device = torch.device("cuda", 0)
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        for root, b in enumerate(buffers):
            dist.broadcast(b.as_dtype(shape.dtype), root, async_op=True)
    manager.wait()
    for _ in buffers:
        expected.collective(shape.block, shape.block)
    problems = [b.problem(shape.seed + root) for root, b in enumerate(buffers)]
    return next((p for p in problems if p), "")


class _Bytes:
    """The bytes of a tensor that a collective has made, to look at like a Buffer without guards."""

    def __init__(self, tensor):
        self.bytes = self.whole = tensor.contiguous().view(torch.uint8)
        self.size, self.offset = self.bytes.numel(), 0

    def problem(self, parts):
        self.whole = self.bytes[:0]
        return parts_problem(self, parts)


def _functional(rank, shape, expected):
    world, block, me = dist.group.WORLD, shape.block, rank.rank
    own = _own(rank, shape).as_dtype(shape.dtype)
    # What the collectives allocate comes from memory that was poisoned.
    _buffer(shape, WORLD)
    gathered = functional.wait_tensor(functional.all_gather_tensor(own, 0, world))
    problem = _Bytes(gathered).problem(_of_all_ranks(shape))
    expected.collective(block, 2 * block)
    if problem:
        return f"all_gather_tensor: {problem}"

    n = shape.count
    table = [[n, 2 * n + 1], [n + 2, n]]
    give, take = table[me], [table[s][me] for s in range(WORLD)]
    unit = shape.dtype.itemsize
    into = Buffer(sum(give) * unit)
    at = 0
    for d, k in enumerate(give):
        fill(into.bytes[at : at + k * unit], _pair_seed(shape.seed, me, d))
        at += k * unit
    out = functional.all_to_all_single(into.as_dtype(shape.dtype), take, give, world)
    parts = [(k * unit, _pair_seed(shape.seed, s, me)) for s, k in enumerate(take)]
    problem = _Bytes(functional.wait_tensor(out)).problem(parts)
    expected.sends(*[k * unit for k in give + take])
    if problem:
        return f"all_to_all_single: {problem}"

    for root in range(WORLD):
        out = functional.wait_tensor(functional.broadcast(own, root, world))
        problem = _Bytes(out).problem([(block, shape.seed + root)])
        expected.collective(block, block)
        if problem:
            return f"broadcast from {root}: {problem}"

    several = functional.all_gather_into_tensor_coalesced([own, own[: n // 2 + 1]], world)
    half = (n // 2 + 1) * unit
    for out, size in zip(several, (block, half)):
        parts = [(size, shape.seed + r) for r in range(WORLD)]
        problem = _Bytes(functional.wait_tensor(out)).problem(parts)
        expected.collective(size, 2 * size)
        if problem:
            return f"all_gather_into_tensor_coalesced: {problem}"
    return ""


def streams_and_groups(rank):
    """Different collectives of two communicators under way on four streams at once, a reduction of
    NCCL's among them."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    streams = [torch.cuda.Stream(priority=-(i % 2)) for i in range(4)]
    total = torch.ones(MIB, device="cuda")
    for g in groups:
        dist.all_reduce(total, group=g)
    torch.cuda.synchronize()
    expected, pending = Expected(rank), []
    for i in range(8 if rank.quick else 32):
        group, stream, seed = groups[i % 2], streams[i // 2 % 4], 3000 + 16 * i
        count = (64 * KIB + 1, MIB + 3, 16 * MIB + 5, 3 * MIB + 1)[i % 4]
        shape = Shape(torch.uint8, count, True, stream, seed)
        with torch.cuda.stream(stream):
            if i % 3 == 0:
                own, out = _own(rank, shape), _buffer(shape, WORLD)
                work = dist.all_gather_into_tensor(out.bytes, own.bytes, group=group, async_op=True)
                parts = _of_all_ranks(shape)
                expected.collective(count, 2 * count)
            elif i % 3 == 1:
                own, out = _buffer(shape, WORLD), _buffer(shape, WORLD)
                for d in range(WORLD):
                    fill(own.bytes[d * count : (d + 1) * count], _pair_seed(seed, rank.rank, d))
                work = dist.all_to_all_single(out.bytes, own.bytes, group=group, async_op=True)
                parts = [(count, _pair_seed(seed, s, rank.rank)) for s in range(WORLD)]
                expected.collective(count, 2 * count)
            else:
                own = out = _buffer(shape)
                root = i // 3 % WORLD
                if rank.rank == root:
                    fill(own.bytes, seed + root)
                work = dist.broadcast(out.bytes, root, group=group, async_op=True)
                parts = [(count, seed + root)]
                expected.collective(count, count)
            if i % 5 == 0:
                reduced = torch.full((64 * KIB,), float(rank.rank + 1), device="cuda")
                pending.append((stream, dist.all_reduce(reduced, async_op=True), reduced, None, i))
        pending.append((stream, work, out, parts, i))
    for stream, work, out, parts, i in pending:
        with torch.cuda.stream(stream):
            work.wait()
            if parts is None:
                rank.check(bool((out == 3).all()), f"operation {i}: the reduction is wrong")
            else:
                problem = parts_problem(out, parts)
                rank.check(not problem, f"operation {i}: {problem}")
    torch.cuda.synchronize()
    expected.check("staged")


class _Window:
    """The collectives in which PyTorch itself launches nothing, with the bytes that each mover has
    to copy out and in; a rank's own block passes its mover, too, in an all-gather out of the
    slots from which the other rank gets it."""

    def __init__(self, rank):
        self.rank = rank
        self.shape = Shape(torch.uint8, WINDOW_BLOCK, False, None, 5000)
        self.own, self.out = _own(rank, self.shape), _buffer(self.shape, WORLD)
        self.kept, self.into = _buffer(self.shape, WORLD), _buffer(self.shape, WORLD)
        self.exchanged = _buffer(self.shape, WORLD)
        me, block = rank.rank, WINDOW_BLOCK
        self.in_place = self.kept.bytes[me * block : (me + 1) * block]
        fill(self.in_place, 5000 + me)
        for d in range(WORLD):
            fill(self.into.bytes[d * block : (d + 1) * block], _pair_seed(5100, me, d))
        self.give, self.take = WINDOW_SKEW[me], [WINDOW_SKEW[s][me] for s in range(WORLD)]
        self.skew_in, self.skew_out = Buffer(sum(self.give)), Buffer(sum(self.take))
        at = 0
        for d, n in enumerate(self.give):
            fill(self.skew_in.bytes[at : at + n], _pair_seed(5200, me, d))
            at += n
        self.shared = _buffer(self.shape)
        if me == 0:
            fill(self.shared.bytes, 5300)

    def run(self):
        """Returns (bytes sent, bytes received)."""
        dist.all_gather_into_tensor(self.out.bytes, self.own.bytes)
        dist.all_gather_into_tensor(self.kept.bytes, self.in_place)
        dist.all_to_all_single(self.exchanged.bytes, self.into.bytes)
        dist.all_to_all_single(self.skew_out.bytes, self.skew_in.bytes, self.take, self.give)
        dist.broadcast(self.shared.bytes, 0)
        sent = 4 * WINDOW_BLOCK + sum(self.give)
        received = 5 * WINDOW_BLOCK + sum(self.take)
        if self.rank.rank == 0:
            return sent + WINDOW_BLOCK, received
        return sent, received + WINDOW_BLOCK

    def expect(self, expected):
        for _ in range(3):
            expected.collective(WINDOW_BLOCK, 2 * WINDOW_BLOCK)
        expected.sends(*self.give, *self.take)
        expected.collective(WINDOW_BLOCK, WINDOW_BLOCK)

    def check(self):
        me, block = self.rank.rank, WINDOW_BLOCK
        skew = [(n, _pair_seed(5200, s, me)) for s, n in enumerate(self.take)]
        for what, buffer, parts in (
            ("all_gather_into_tensor", self.out, _of_all_ranks(self.shape)),
            ("all_gather_into_tensor in place", self.kept, _of_all_ranks(self.shape)),
            (
                "all_to_all_single",
                self.exchanged,
                [(block, _pair_seed(5100, s, me)) for s in range(WORLD)],
            ),
            ("all_to_all_single with splits", self.skew_out, skew),
            ("broadcast", self.shared, [(block, 5300)]),
        ):
            problem = parts_problem(buffer, parts)
            self.rank.check(not problem, f"{what}: {problem}")


def clean_window(rank):
    window = _Window(rank)
    window.run()  # communicator, movers, imports
    expected = Expected(rank)
    begin = cases_zerosm.open_window(rank)
    sent, received = window.run()
    figures = cases_zerosm.close_window(rank, begin, {"sent": sent, "received": received})
    window.expect(expected)
    expected.check("staged")
    window.check()
    return figures


def _case(one, largest=256 * MIB):
    return lambda rank: _every_shape(rank, one, largest)


RANK_CASES = {
    "all_gather_into_tensor": _case(_all_gather),
    "all_gather_into_tensor_in_place": _case(lambda *a: _all_gather(*a, in_place=True)),
    "all_gather_list": _case(_all_gather_list),
    "all_to_all_single_equal": _case(_all_to_all_equal),
    "all_to_all_single_skewed": _case(_all_to_all_skewed, 64 * MIB),
    "broadcast": _case(_broadcast),
    "gather": _case(_gather),
    "scatter": _case(_scatter),
    "coalesced_all_gathers": _case(_coalesced_gathers),
    "coalesced_broadcasts": _case(_coalesced_broadcasts, 64 * MIB),
    "functional": _case(_functional, 64 * MIB),
    "streams_and_groups": streams_and_groups,
    "clean_window": clean_window,
}
