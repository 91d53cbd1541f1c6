"""Rank side of group memory: every kind of memory, and frees and failures between operations."""

import os
import time

import torch
import torch.distributed as dist
from foreign_memory import ForeignBuffer, kinds_library
from rank_side import GIB, GUARD, KIB, MIB, Buffer, fill
from steered import Expected, parts_problem

SIZES = [64 * KIB, MIB + 3, 16 * MIB + 5]
ROUNDS, ROUNDS_WARM, ROUNDS_STEP = 10_000, 500, 250
ROUNDS_TIME_S = 100  # past it the rest is not run, which fails
FLAT_BYTES = 64 * MIB  # what the GPU's free memory may vary by, of both ranks together
CACHED_ROUNDS = 300
TOO_MUCH = 1 << 42
# The path of memory of which it is settled: what a mover can map, and what it cannot.
PATH_OF = {"device": "staged", "mapped_exportable": "staged", "mapped": "app-copies"}


def _operations(rank, make, seed, expected, sizes=SIZES):
    """Send/recv both ways, an all-gather, a broadcast, on buffers from `make(size)`; every byte.
    Returns the buffers, whose operations are over."""
    used = []
    me, peer = rank.rank, rank.peer
    for n, size in enumerate(sizes):
        seed += 16 * n
        out, into, gathered, shared = (make(k * size) for k in (1, 1, 2, 1))
        used += [out, into, gathered, shared]
        fill(out.bytes, seed + me)
        if me == n % 2:
            fill(shared.bytes, seed + 8)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out.bytes, peer), dist.P2POp(dist.irecv, into.bytes, peer)]
        )
        for work in works:
            work.wait()
        dist.all_gather_into_tensor(gathered.bytes, out.bytes)
        dist.broadcast(shared.bytes, n % 2)
        problem = (
            into.problem(seed + peer)
            or parts_problem(gathered, [(size, seed), (size, seed + 1)])
            or shared.problem(seed + 8)
        )
        rank.check(not problem, f"{size} bytes: {problem}")
        expected.sends(size, size)
        expected.collective(size, 2 * size)
        expected.collective(size, size)
    torch.cuda.synchronize()
    return used


def _paths(rank, expected, path=None):
    """Checks that all of it took `path`. Without one that nothing went to NCCL; which of HOCCL's paths
    it took is a figure."""
    return {f"rank{rank.rank}_paths": expected.check(path)}


def odd_offsets(rank):
    expected = Expected(rank)
    for offset in (1, 3, 7, 513, 4097):
        _operations(rank, lambda n, o=offset: Buffer(n, GUARD + o), 100, expected)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        unit = dtype.itemsize
        for elements in (1, 3, 129):
            size = MIB + unit
            out, gathered = Buffer(size, GUARD + elements * unit), Buffer(2 * size, GUARD + unit)
            fill(out.bytes, 300 + rank.rank)
            dist.all_gather_into_tensor(gathered.as_dtype(dtype), out.as_dtype(dtype))
            problem = parts_problem(gathered, [(size, 300), (size, 301)])
            rank.check(not problem, f"{dtype} at element {elements}: {problem}")
            expected.collective(size, 2 * size)
    torch.cuda.synchronize()
    expected.check("staged")


def _kind(rank, kind):
    expected = Expected(rank)
    for repeat in range(3):
        for offset in (GUARD, GUARD + 1):
            made = []

            def make(size, o=offset):
                made.append(ForeignBuffer(kind, size, o))
                return made[-1]

            _operations(rank, make, 400 + 100 * repeat, expected)
            for buffer in made:
                buffer.free()
    return _paths(rank, expected, PATH_OF.get(kind))


def mixed_kinds(rank):
    """One rank's memory can be mapped by its mover, the other's cannot: both have to agree."""
    kinds = ("device", "managed", "pinned", "mapped", "mapped_exportable", "pool")
    expected = Expected(rank)
    for n, kind in enumerate(kinds * 2):
        made = []

        def make(size, k=kind if rank.rank == n % 2 else "device"):
            made.append(ForeignBuffer(k, size))
            return made[-1]

        _operations(rank, make, 500 + 100 * n, expected)
        for buffer in made:
            buffer.free()
    return _paths(rank, expected)


def backend(rank):
    """PyTorch's memory, from the allocator that the environment chose."""
    chosen = torch.cuda.get_allocator_backend()
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "cudaMallocAsync" in conf:
        rank.check(chosen == "cudaMallocAsync", f"the backend is {chosen}, asked for was {conf}")
    expected = Expected(rank)
    for repeat in range(6):
        _operations(rank, Buffer, 600 + 100 * repeat, expected)
        if repeat % 2:
            torch.cuda.empty_cache()
    return {"backend": chosen, **_paths(rank, expected)}


def expandable_segments(rank):
    """Segments that grow in one range of addresses, by parts of 20 MiB: buffers reach from one part
    into the next. Every other time the cache is emptied, which unmaps parts that the movers have
    mapped: the same addresses come back as other memory, and the GPU's free memory as it was."""
    expected, levels = Expected(rank), []
    for repeat in range(6):
        used = _operations(rank, Buffer, 1400 + 200 * repeat, expected, [*SIZES, 70 * MIB + 1])
        expandable = {s["is_expandable"] for s in torch.cuda.memory_snapshot()}
        rank.check(True in expandable, f"no segment is expandable: {expandable}")
        del used
        if repeat % 2:
            torch.cuda.empty_cache()
            rank.barrier()  # both ranks have freed
            levels.append(_free_memory())
            rank.barrier()
    rank.check(
        levels[0] - levels[-1] <= FLAT_BYTES, f"the GPU's free memory went through {levels}"
    )
    return {
        **_paths(rank, expected, "staged"),
        f"rank{rank.rank}_free_memory_mib": [level >> 20 for level in levels],
    }


def expandable_directly(rank):
    """Two GPUs of one node: the movers hand each other the segments once, and from then on every
    transfer in them is one copy from GPU to GPU, until the cache is emptied."""
    figures = {}
    for repeat in range(3):
        out, into = Buffer(256 * MIB + 5), Buffer(256 * MIB + 5)
        expandable = {s["is_expandable"] for s in torch.cuda.memory_snapshot()}
        rank.check(True in expandable, f"no segment is expandable: {expandable}")
        for n in range(12):
            if n == 2:
                time.sleep(1)  # by then they have been handed over
                rank.barrier()
                expected = Expected(rank)
            seed = 3000 + 100 * repeat + 2 * n
            fill(out.bytes, seed + rank.rank)
            torch.cuda.synchronize()
            rank.barrier()
            began = time.monotonic()
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, out.bytes, rank.peer),
                    dist.P2POp(dist.irecv, into.bytes, rank.peer),
                ]
            ):
                work.wait()
            torch.cuda.synchronize()
            took = time.monotonic() - began
            problem = into.problem(seed + rank.peer)
            rank.check(not problem, f"round {repeat}.{n}: {problem}")
            if n >= 2:
                expected.sends(256 * MIB + 5, 256 * MIB + 5)
        expected.check("direct")
        figures[f"rank{rank.rank}_last_gbs_{repeat}"] = round((256 * MIB + 5) / took / 1e9, 1)
        del out, into
        torch.cuda.empty_cache()
    return figures


def empty_cache_between(rank):
    expected = Expected(rank)
    for n in range(20):
        kept = _operations(rank, Buffer, 2000 + 100 * n, expected)
        if n % 2:
            kept.clear()
        torch.cuda.empty_cache()  # frees what the movers had mapped, every other time
    expected.check("staged")


def out_of_memory_retry(rank):
    """PyTorch frees its cache when an allocation fails, and tries again; then one that fails for
    good."""
    expected = Expected(rank)
    total = torch.cuda.get_device_properties(0).total_memory
    for n in range(4):
        _operations(rank, Buffer, 4200 + 100 * n, expected)
        reserved = torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((reserved + 64 * MIB) / total)
        before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        try:
            # Fits only when the cache, blocks of the operations just over among it, is freed.
            large = torch.empty(reserved, dtype=torch.uint8, device="cuda")
            del large
            retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) - before
            rank.check(retries > 0, f"round {n}: the allocation did not have to be retried")
            try:
                torch.empty(reserved + GIB, dtype=torch.uint8, device="cuda")
                rank.check(False, f"round {n}: an allocation past the limit did not fail")
            except torch.cuda.OutOfMemoryError:
                pass
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        refused = kinds_library().refusedAllocation(TOO_MUCH)
        rank.check(refused == 1, f"round {n}: cudaMalloc of {TOO_MUCH} bytes was not refused")
        _operations(rank, Buffer, 4260 + 100 * n, expected)
        torch.cuda.empty_cache()
    expected.check("staged")


def _free_memory():
    return torch.cuda.mem_get_info()[0]


def allocate_operate_free(rank):
    """A fresh cudaMalloc for every operation, freed behind it: the driver gives the same addresses
    again and again, and each time it is other memory. The GPU's free memory stays what it was."""
    expected = Expected(rank)
    wanted = ROUNDS // 20 if rank.quick else ROUNDS
    deadline, done, levels = time.monotonic() + ROUNDS_TIME_S, 0, []
    began = time.monotonic()
    while done < wanted:
        if done % ROUNDS_STEP == 0:
            # Rank 0's clock decides for both; both have freed everything here.
            rank.barrier()
            if done >= min(ROUNDS_WARM, wanted // 2):
                levels.append(_free_memory())
            rank.barrier()
            if rank.rank == 0:
                on = time.monotonic() < deadline
                rank.tell(f"on{done}", "1" if on else "")
            else:
                on = rank.hear(f"on{done}") == "1"
            if not on:
                break
        size = MIB + (done * 4099) % (3 * MIB)
        sender, seed = done % 2, 5000 + done % 40_000
        buffer = ForeignBuffer("device", size)
        if rank.rank == sender:
            fill(buffer.bytes, seed)
            dist.send(buffer.bytes, rank.peer)
            torch.cuda.synchronize()
        else:
            dist.recv(buffer.bytes, rank.peer)
            problem = buffer.problem(seed)
            rank.check(not problem, f"round {done}, {size} bytes: {problem}")
        buffer.free()
        expected.sends(size)
        done += 1
    lasted = time.monotonic() - began
    rank.barrier()
    levels.append(_free_memory())
    rank.check(done == wanted, f"{done} of {wanted} rounds in {ROUNDS_TIME_S} s")
    rank.check(
        levels[0] - levels[-1] <= FLAT_BYTES,
        f"the GPU's free memory went from {levels[0]} to {levels[-1]}: {levels}",
    )
    expected.check("staged")
    return {
        f"rank{rank.rank}_rounds": done,
        f"rank{rank.rank}_ms_each": round(lasted / max(1, done) * 1e3, 3),
        f"rank{rank.rank}_free_memory_mib": [levels[0] >> 20, min(levels) >> 20, levels[-1] >> 20],
    }


def allocate_operate_empty_cache(rank):
    """The same through PyTorch's allocator, whose cache is emptied behind every operation."""
    expected = Expected(rank)
    for n in range(CACHED_ROUNDS // 10 if rank.quick else CACHED_ROUNDS):
        size = MIB + (n * 65539) % (20 * MIB)
        buffer = Buffer(size)
        if rank.rank == n % 2:
            fill(buffer.bytes, 5000 + n)
            dist.send(buffer.bytes, rank.peer)
        else:
            dist.recv(buffer.bytes, rank.peer)
            problem = buffer.problem(5000 + n)
            rank.check(not problem, f"round {n}, {size} bytes: {problem}")
        torch.cuda.synchronize()
        del buffer
        torch.cuda.empty_cache()
        expected.sends(size)
    expected.check("staged")


KINDS = ("device", "pinned", "registered", "managed", "pool", "mapped", "mapped_exportable")
RANK_CASES = {
    "odd_offsets": odd_offsets,
    **{f"{kind}_memory": (lambda rank, k=kind: _kind(rank, k)) for kind in KINDS},
    "mixed_kinds": mixed_kinds,
    "backend": backend,
    "expandable_segments": expandable_segments,
    "expandable_directly": expandable_directly,
    "empty_cache_between": empty_cache_between,
    "out_of_memory_retry": out_of_memory_retry,
    "allocate_operate_free": allocate_operate_free,
    "allocate_operate_empty_cache": allocate_operate_empty_cache,
}
