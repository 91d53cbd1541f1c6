"""memory: whatever memory a program hands to NCCL, every byte; allocators of PyTorch's; frees, an
emptied cache and failed allocations between operations, with the GPU's memory flat."""

import contextlib
import os

import common

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


@contextlib.contextmanager
def _ranks_with(context, name, value):
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


def run(context):
    context.server()
    common.run_cases(context, "cases_memory", [("allocate_operate_free", ROUNDS_LIMIT_S)])
    common.run_cases(context, "cases_memory", [(name, LIMIT_S) for name in CASES])
    # Ranks of their own for each kind: one that fails does not stand in another's way.
    for kind in KINDS:
        common.run_cases(context, "cases_memory", [(f"{kind}_memory", KIND_LIMIT_S)])
    common.run_cases(context, "cases_memory", [("mixed_kinds", KIND_LIMIT_S)])
    for name, value, case in ALLOCATORS:
        with _ranks_with(context, name, value) as inner:
            common.run_cases(inner, "cases_memory", [(case, LIMIT_S)], prefix=name + "_")
