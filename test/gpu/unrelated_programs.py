"""Programs that have nothing to do with HOCCL and carry its preloaded library all the same: started
by group_unrelated.py, each as `python3 unrelated_programs.py NAME`. The last line a program prints
says what it found."""

import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys


def _square(n):
    return n * n


def plain_python():
    """No torch: child processes, pools of both start methods, threads."""
    found = []
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            found.append(sum(pool.map(_square, range(100))))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found.append(sum(threads.map(_square, range(100))))
    out = subprocess.run(["sh", "-c", "echo a | tr a b"], capture_output=True, text=True)
    found.append(out.stdout.strip() + out.stderr)
    print(json.dumps(found))


class Numbers:
    """A data set of 64 small tensors."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        import torch

        return torch.full((1024,), i, dtype=torch.int64)


def loaded(methods=("fork", "spawn")):
    """Sums over the data set, loaded by worker processes of both start methods."""
    from torch.utils.data import DataLoader

    found = []
    for method in methods:
        loader = DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context=method)
        found += [int(sum(batch[:, 0].sum() for batch in loader)) for _ in range(2)]
    return found


def data_loaders():
    """Without a process group and without CUDA."""
    print(json.dumps(loaded()))


def torch_on_the_gpu():
    """CUDA without torch.distributed: allocations, frees and a failed allocation."""
    import torch

    x = torch.ones(1 << 20, device="cuda")
    total = int(x.sum().item())
    del x
    torch.cuda.empty_cache()
    try:
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        total += 1
    workers = loaded(("fork",))
    print(json.dumps([total, *workers]))


def _gloo_rank(rank, port, results):
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x = torch.full((1 << 18,), rank + 1.0)
    dist.all_reduce(x)
    out = torch.empty(2 << 18)
    dist.all_gather_into_tensor(out, x + rank)
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    results.put([float(x[0]), float(out[0]), float(out[-1]), *loaded(("fork",))])
    dist.barrier()
    dist.destroy_process_group()


def gloo(port):
    """A CPU-only job of two ranks."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_gloo_rank, args=(r, port, results)) for r in range(2)]
    for r in ranks:
        r.start()
    found = [results.get(timeout=60) for _ in ranks]
    for r in ranks:
        r.join(30)
    print(json.dumps([sorted(found), [r.exitcode for r in ranks]]))


if __name__ == "__main__":
    {
        "plain_python": plain_python,
        "data_loaders": data_loaders,
        "torch_on_the_gpu": torch_on_the_gpu,
        "gloo": gloo,
    }[sys.argv[1]](*[int(a) for a in sys.argv[2:]])
