"""Rank side of group net: what NCCL itself moves, by its own kernels, over whatever net it has."""

import ctypes
import hashlib
import statistics
import time

import torch
import torch.distributed as dist
from rank_side import GIB, GUARD, KIB, MIB, Buffer, fill, first_wrong

WORLD = 2
SIZES = [1, 8, 1023, 4 * KIB, 64 * KIB + 1, MIB + 3, 16 * MIB + 5, 256 * MIB, GIB]
LARGEST_SUM = 256 * MIB  # bytes of a reduction; its inputs and result are kept beside it
RATE_SIZES = [64 * MIB, 256 * MIB, GIB]
RATE_ROUNDS = 7


def _digest(tensor):
    """Of all bytes: read back, since the GPU's sum of something would forgive what cancels out."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy()).hexdigest()


def _count(size, dtype):
    return max(1, size // dtype.itemsize)


def _values(count, dtype, seed):
    """Numbers whose sum rounds: what an addition in another order would change."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-50, 50, (count,), generator=generator, device="cuda", dtype=dtype)
    return torch.randn(count, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def _reductions(rank, one):
    figures, all_digests = {}, hashlib.sha256()
    for size in SIZES:
        for dtype in (torch.int8, torch.bfloat16, torch.float32):
            count = _count(min(size, LARGEST_SUM), dtype)
            result, expected = one(rank, count, dtype)
            rank.check(torch.equal(result, expected), f"{count} of {dtype}: not the sum")
            all_digests.update(_digest(result).encode())
            torch.cuda.empty_cache()
    figures[f"rank{rank.rank}_sha256"] = all_digests.hexdigest()
    return figures


def _all_reduce(rank, count, dtype):
    own, other = (_values(count, dtype, seed) for seed in (rank.rank, rank.peer))
    expected = own + other
    dist.all_reduce(own)
    return own, expected


def _reduce_scatter(rank, count, dtype):
    blocks = [_values(count * WORLD, dtype, 10 + r) for r in range(WORLD)]
    expected = (blocks[0] + blocks[1])[rank.rank * count : (rank.rank + 1) * count]
    result = torch.empty(count, dtype=dtype, device="cuda")
    dist.reduce_scatter_tensor(result, blocks[rank.rank])
    return result, expected


def all_gather(rank):
    digests = hashlib.sha256()
    for size in SIZES:
        size = min(size, 512 * MIB)
        own, out = Buffer(size, GUARD + 1), Buffer(size * WORLD, GUARD + 3)
        fill(own.bytes, rank.rank)
        dist.all_gather_into_tensor(out.bytes, own.bytes)
        for r in range(WORLD):
            part = Buffer.__new__(Buffer)
            part.size, part.offset, part.whole = size, 0, own.whole[:0]
            part.bytes = out.bytes[r * size : (r + 1) * size]
            problem = part.problem(r)
            rank.check(not problem, f"{size} bytes, block {r}: {problem}")
        digests.update(_digest(out.whole).encode())
        del own, out, part
        torch.cuda.empty_cache()
    return {f"rank{rank.rank}_sha256": digests.hexdigest()}


def send_recv(rank):
    """Both ways one after the other, both ways at once, and several in one group."""
    digests = hashlib.sha256()
    for size in SIZES:
        several = 3 if size <= 16 * MIB + 5 else 1
        give = [Buffer(size, GUARD + 1) for _ in range(several)]
        take = [Buffer(size, GUARD + 5) for _ in range(several)]
        for i, b in enumerate(give):
            fill(b.bytes, 10 * i + rank.rank)
        if rank.rank == 0:
            dist.send(give[0].bytes, 1)
            dist.recv(take[0].bytes, 1)
        else:
            dist.recv(take[0].bytes, 0)
            dist.send(give[0].bytes, 0)
        problem = take[0].problem(rank.peer)
        rank.check(not problem, f"{size} bytes one way: {problem}")
        take[0].whole.fill_(0xA5)
        ops = [dist.P2POp(dist.isend, b.bytes, rank.peer) for b in give]
        ops += [dist.P2POp(dist.irecv, b.bytes, rank.peer) for b in take]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for i, b in enumerate(take):
            problem = b.problem(10 * i + rank.peer)
            rank.check(not problem, f"{size} bytes, {i} of a group: {problem}")
            digests.update(_digest(b.whole).encode())
        del give, take, ops
        torch.cuda.empty_cache()
    return {f"rank{rank.rank}_sha256": digests.hexdigest()}


def two_communicators(rank):
    """In turn and at once on two streams, made and destroyed three times."""
    for _ in range(3):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in groups]
        sums = []
        for i in range(12):
            with torch.cuda.stream(streams[i % 2]):
                x = torch.full((MIB + 7 * i,), float(rank.rank + i), device="cuda")
                sums.append((x, 2 * i + 1, dist.all_reduce(x, group=groups[i % 2], async_op=True)))
        for x, expected, work in sums:
            work.wait()
            rank.check(bool((x == expected).all()), f"a sum of {x.numel()} is not {expected}")
        torch.cuda.synchronize()
        for group in groups:
            dist.destroy_process_group(group)
    return {}


def rates(rank):
    """Send/recv from rank 0 to rank 1: GB/s, medians on the receiver's side."""
    figures = {}
    for size in RATE_SIZES:
        tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
        seconds = []
        for _ in range(RATE_ROUNDS):
            rank.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            if rank.rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        if rank.rank == 1:
            figures[f"gbs_{size // MIB}MiB"] = size / statistics.median(seconds[1:]) / 1e9
        del tensor
    return figures


def _nccl():
    """The NCCL that PyTorch has loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libnccl.so" in line}
    library = ctypes.CDLL(paths.pop())
    library.ncclCommRegister.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    library.ncclCommDeregister.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


# Each of them a kernel that its first launch loads.
FIRST_LAUNCHES = [
    torch.erfinv,
    torch.lgamma,
    torch.digamma,
    torch.sinc,
    torch.i0,
    torch.special.i1,
    torch.special.ndtri,
    torch.special.erfcx,
]


def _application(i):
    """What an application does beside: frees memory for good and launches what it has not before."""
    memory = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del memory
    torch.cuda.empty_cache()
    FIRST_LAUNCHES[i % len(FIRST_LAUNCHES)](torch.rand(1000 + i, device="cuda"))


def registered(rank):
    """Buffers registered by ncclCommRegister, while the application frees and launches."""
    dist.all_reduce(torch.ones(1, device="cuda"))  # the communicator is there
    comm = dist.group.WORLD._get_backend(torch.device("cuda"))._comm_ptr()
    nccl = _nccl()
    give = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    take = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")

    def register(buffer):
        handle = ctypes.c_void_p()
        result = nccl.ncclCommRegister(comm, buffer.data_ptr(), buffer.numel(), ctypes.byref(handle))
        rank.check(result == 0, f"ncclCommRegister gave {result}")
        return handle

    handles = [register(buffer) for buffer in (give, take)]
    fill(give, rank.rank)
    launches = 0
    for size in (64 * KIB + 1, MIB + 3, 64 * MIB, GIB):
        take.fill_(0xA5)
        ops = [
            dist.P2POp(dist.isend, give[:size], rank.peer),
            dist.P2POp(dist.irecv, take[:size], rank.peer),
        ]
        works = dist.batch_isend_irecv(ops)
        for _ in range(3):
            _application(launches)
            launches += 1
        for work in works:
            work.wait()
        wrong = first_wrong(take[:size], rank.peer)
        rank.check(wrong < 0, f"send/recv of {size} bytes: byte {wrong} is wrong")
        rank.check(bool((take[size:] == 0xA5).all()), f"bytes behind {size} received were written")

        take.fill_(0xA5)
        work = dist.all_gather_into_tensor(take[: 2 * size], give[:size], async_op=True)
        for _ in range(3):
            _application(launches)
            launches += 1
        work.wait()
        for r in range(WORLD):
            wrong = first_wrong(take[r * size : (r + 1) * size], r)
            rank.check(wrong < 0, f"all-gather of {size} bytes, block {r}: byte {wrong} is wrong")

        count = size // 4
        sums = take[: 4 * count].view(torch.int32)
        sums.copy_(torch.arange(count, dtype=torch.int32, device="cuda") + 7 * rank.rank)
        work = dist.all_reduce(sums, async_op=True)
        for _ in range(2):
            _application(launches)
            launches += 1
        work.wait()
        expected = 2 * torch.arange(count, dtype=torch.int32, device="cuda") + 7
        rank.check(torch.equal(sums, expected), f"all-reduce of {size} bytes: not the sum")
        del expected
    # Further allocations, whose registration is timed: NCCL gives a buffer to the plugin at its use.
    further = [torch.empty(2 * GIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    for buffer in further:
        handles.append(register(buffer))
        fill(buffer[:MIB], rank.rank)
        ops = [
            dist.P2POp(dist.isend, buffer[:MIB], rank.peer),
            dist.P2POp(dist.irecv, take[:MIB], rank.peer),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        wrong = first_wrong(take[:MIB], rank.peer)
        rank.check(wrong < 0, f"send/recv from further memory: byte {wrong} is wrong")
    torch.cuda.synchronize()
    rank.barrier()
    for handle in handles:
        result = nccl.ncclCommDeregister(comm, handle)
        rank.check(result == 0, f"ncclCommDeregister gave {result}")
    return {}


RANK_CASES = {
    "registered": registered,
    "all_reduce": lambda rank: _reductions(rank, _all_reduce),
    "reduce_scatter": lambda rank: _reductions(rank, _reduce_scatter),
    "all_gather": all_gather,
    "send_recv": send_recv,
    "two_communicators": two_communicators,
    "rates": rates,
}
