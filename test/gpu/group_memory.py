"""memory: whatever memory a program hands to NCCL, every byte; allocators of PyTorch's; frees, an
emptied cache and failed allocations between operations, with the GPU's memory flat."""

import contextlib
import json
import os
import subprocess
import time

import build_helpers
import common
import procs

KINDS = ["device", "pinned", "registered", "managed", "pool", "mapped", "mapped_exportable"]
ALLOCATORS = [
    ("cudaMallocAsync", "backend:cudaMallocAsync", "backend"),
    ("expandable", "expandable_segments:True", "expandable_segments"),
]
CASES = [
    "odd_offsets",
    "empty_cache_between",
    "out_of_memory_retry",
    "allocate_operate_empty_cache",
]
LIMIT_S, KIND_LIMIT_S, ROUNDS_LIMIT_S = 30, 12, 120
VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
ENV = {"HOCCL_SPANS": "on"}


@contextlib.contextmanager
def ranks_with(context, name, value):
    """A context whose ranks PyTorch's allocator is set so from its loading on, when it reads it."""
    work = context.path(name)
    os.makedirs(work)
    inner = common.Context(context.install, context.gpu_dir, work, context.reporter, context.quick)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = value
    try:
        inner.server()
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
    try:
        yield inner
    finally:
        inner.close()


def _static_run_time(context):
    """Two ranks of a program whose frees nobody sees: none of its buffers is mapped by a mover."""
    program = os.path.join(context.gpu_dir, "static_runtime")
    _, nccl = build_helpers.nccl_wheel()
    folder = context.path("static_runtime")
    os.makedirs(folder)
    began, running, problems = time.monotonic(), [], []
    for rank in (0, 1):
        environment = {**common.clean_environment(), **context.install.env()}
        environment["LD_PRELOAD"] = context.install.shim
        environment["NCCL_HOSTID"] = f"gpu-check-static{rank}"
        running.append(
            subprocess.Popen(
                [program, str(rank), folder, nccl],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    counted = {}
    for rank, process in enumerate(running):
        try:
            out, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            problems.append(f"rank {rank}: not done after {LIMIT_S} s")
            procs.kill_tree(process.pid)
            out, errors = process.communicate()
        if process.returncode != 0:
            problems.append(f"rank {rank}: status {process.returncode}: {errors[-1500:]}")
            continue
        if "linked statically into" not in errors:
            problems.append(f"rank {rank}: no warning that frees are not seen: {errors[-1500:]}")
        paths = json.loads(out.splitlines()[-1])["communicators"][0]["paths"]
        counted[f"rank{rank}_paths"] = {path: c["ops"] for path, c in paths.items()}
        if paths["app-copies"]["ops"] != 40 or paths["staged"]["ops"] or paths["nccl"]["ops"]:
            problems.append(f"rank {rank}: {paths}, expected 40 application-side copies alone")
    context.reporter.record(
        "static_run_time",
        "fail" if problems else "pass",
        time.monotonic() - began,
        "\n".join(problems),
        counted,
    )


def run(context):
    _static_run_time(context)
    context.server()
    common.run_cases(context, "cases_memory", [("allocate_operate_free", ROUNDS_LIMIT_S)], env=ENV)
    common.run_cases(context, "cases_memory", [(name, LIMIT_S) for name in CASES], env=ENV)
    # Ranks of their own for each kind: one that fails does not stand in another's way.
    for kind in KINDS:
        common.run_cases(context, "cases_memory", [(f"{kind}_memory", KIND_LIMIT_S)], env=ENV)
    common.run_cases(context, "cases_memory", [("mixed_kinds", KIND_LIMIT_S)], env=ENV)
    for name, value, case in ALLOCATORS:
        with ranks_with(context, name, value) as inner:
            common.run_cases(inner, "cases_memory", [(case, LIMIT_S)], prefix=name + "_", env=ENV)
