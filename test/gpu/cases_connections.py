"""Rank side of group connections: programs that stop for ever where a pending wait holds back what
the program needs in order to go on (facts.md, pending waits and connections). NCCL runs all of
them."""

import torch
import torch.distributed as dist
from rank_side import KIB, MIB, Buffer, fill, pattern
from steered import Expected

ROUNDS = 10
GATED_SIZES = [64 * KIB, 16 * MIB + 1, MIB + 3]
MANY = 12  # pending receives, more than the 8 connections CUDA makes by default


def _in_use(rank, groups):
    """Makes PyTorch create the communicator it uses for single sends and receives in each group;
    later that would wait for the peer."""
    one = torch.zeros(KIB, dtype=torch.uint8, device="cuda")
    for g in groups:
        (dist.send if rank.rank == 0 else dist.recv)(one, rank.peer, group=g)
    # The first launch of a kernel waits for whatever is pending, with NCCL as well (facts.md): every
    # kernel of these cases has to have run before.
    for size in GATED_SIZES:
        buffer = Buffer(size)
        fill(buffer.bytes, 1)
        buffer.problem(1)
        int(buffer.bytes[0].item())
    int(torch.full((4096,), 3, device="cuda").max().item())
    torch.cuda.synchronize()
    rank.barrier()


def _directions(rank):
    """(group this rank sends in, the one it receives in)."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    _in_use(rank, groups)
    return groups[rank.rank], groups[rank.peer]


def copies_and_kernels_beside(rank):
    """Exchanges under way while other streams copy both ways and run kernels."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    size = 16 * MIB
    host_in = torch.full((size,), 7, dtype=torch.uint8).pin_memory()
    host_out = torch.empty(size, dtype=torch.uint8).pin_memory()
    a = torch.ones((1024, 1024), device="cuda")
    expected = Expected(rank)
    for step in range(ROUNDS):
        out, into = Buffer(size + 1), Buffer(size + 1)
        fill(out.bytes, 400 + 2 * step + rank.rank)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, out.bytes, rank.peer),
                    dist.P2POp(dist.irecv, into.bytes, rank.peer),
                ]
            )
        with torch.cuda.stream(streams[1]):
            device = host_in.to("cuda", non_blocking=True)
            added = device + step
        with torch.cuda.stream(streams[2]):
            total = (a @ a).sum()
        with torch.cuda.stream(streams[3]):
            streams[3].wait_stream(streams[1])
            host_out.copy_(added, non_blocking=True)
        with torch.cuda.stream(streams[2]):
            if rank.rank == step % 2:
                rank.check(int(total.item()) == 1024**3, f"step {step}: the sum is wrong")
        with torch.cuda.stream(streams[0]):
            for work in works:
                work.wait()
        torch.cuda.synchronize()
        rank.check(bool((host_out == 7 + step).all()), f"step {step}: the copies beside are wrong")
        problem = into.problem(400 + 2 * step + rank.peer)
        rank.check(not problem, f"step {step}: {problem}")
        expected.sends(size + 1, size + 1)
    expected.check("staged")


def item_gates_the_send(rank):
    """Both ranks have a receive pending; what each sends is known only from an .item(), which takes
    a kernel and a copy to the host past the pending wait."""
    give, take = _directions(rank)
    expected = Expected(rank)
    for step in range(ROUNDS):
        size = GATED_SIZES[step % len(GATED_SIZES)]
        out, into = Buffer(size), Buffer(size)
        torch.cuda.synchronize()
        receive = dist.irecv(into.bytes, rank.peer, group=take)
        value = int(torch.full((4096,), step + rank.rank, device="cuda").max().item())
        fill(out.bytes, 600 + value)
        send = dist.isend(out.bytes, rank.peer, group=give)
        send.wait()
        receive.wait()
        problem = into.problem(600 + step + rank.peer)
        rank.check(not problem, f"round {step}: {problem}")
        expected.sends(size, size)
    torch.cuda.synchronize()
    expected.check("staged")


def _first_byte(seed):
    return int(pattern(0, 1, seed)[0])


def item_gates_one_of_two(rank):
    """Rank 0 receives what rank 1 sends only after it has had something from rank 0, which rank 0
    knows only from an .item()."""
    give, take = _directions(rank)
    expected = Expected(rank)
    for step in range(ROUNDS):
        size = GATED_SIZES[step % len(GATED_SIZES)]
        out, into = Buffer(size), Buffer(size)
        torch.cuda.synchronize()
        receive = dist.irecv(into.bytes, rank.peer, group=take)
        if rank.rank == 0:
            value = int(torch.full((4096,), step, device="cuda").max().item())
        else:
            receive.wait()
            value = int(into.bytes[0].item()) % 50
        fill(out.bytes, 700 + value)
        dist.isend(out.bytes, rank.peer, group=give).wait()
        if rank.rank == 0:
            receive.wait()
            seed = 700 + _first_byte(700 + step) % 50
        else:
            seed = 700 + step
        problem = into.problem(seed)
        rank.check(not problem, f"round {step}: {problem}")
        expected.sends(size, size)
    torch.cuda.synchronize()
    expected.check("staged")


def more_pending_receives_than_connections(rank):
    """Rank 1 has MANY receives pending, each on a stream of its own, when it needs an .item() to
    let rank 0 go on."""
    groups = [dist.new_group([0, 1]) for _ in range(MANY)]
    gate = dist.new_group([0, 1])
    size = MIB + 3
    _in_use(rank, (*groups, gate))
    expected = Expected(rank)
    for step in range(3):
        buffers, token = [Buffer(size) for _ in groups], Buffer(64 * KIB)
        if rank.rank == 0:
            for i, b in enumerate(buffers):
                fill(b.bytes, 800 + 20 * step + i)
        torch.cuda.synchronize()
        if rank.rank == 1:
            works = [dist.irecv(b.bytes, 0, group=g) for b, g in zip(buffers, groups)]
            value = int(torch.full((4096,), step, device="cuda").max().item())
            fill(token.bytes, 900 + value)
            dist.isend(token.bytes, 0, group=gate).wait()
        else:
            dist.irecv(token.bytes, 1, group=gate).wait()
            problem = token.problem(900 + step)
            rank.check(not problem, f"step {step}, token: {problem}")
            works = [dist.isend(b.bytes, 1, group=g) for b, g in zip(buffers, groups)]
        for work in works:
            work.wait()
        for i, b in enumerate(buffers):
            problem = b.problem(800 + 20 * step + i)
            rank.check(not problem, f"step {step}, buffer {i}: {problem}")
        expected.sends(*[size] * MANY, 64 * KIB)
    torch.cuda.synchronize()
    expected.check("staged")


RANK_CASES = {
    "copies_and_kernels_beside": copies_and_kernels_beside,
    "item_gates_the_send": item_gates_the_send,
    "item_gates_one_of_two": item_gates_one_of_two,
    "more_pending_receives_than_connections": more_pending_receives_than_connections,
}
