"""direct_more: two GPUs of one node: PyTorch's collectives, every byte; memory that is freed between,
which the peer's mover has mapped; the last bytes right behind the wait, never stale."""

import group_collectives
import group_direct
import group_memory

FREES = ["empty_cache_between", "allocate_operate_free", "allocate_operate_empty_cache"]
LITMUS_LIMIT_S = 190


def run(context):
    if not group_direct.two_gpus(context):
        return
    env = group_direct.DIRECT
    group_direct.cases(context, "cases_collectives", group_collectives.CASES, "", env)
    group_direct.cases(
        context,
        "cases_collectives",
        group_collectives.OWN_BLOCK_CASES,
        "own_block_by_kernel_",
        {**env, **group_collectives.OWN_BLOCK_BY_KERNEL},
    )
    group_direct.cases(context, "cases_memory", FREES, "", env)
    with group_memory.ranks_with(context, "expandable", "expandable_segments:True") as inner:
        group_direct.cases(inner, "cases_memory", ["expandable_directly"], "", env)
    group_direct.cases(
        context, "cases_litmus", ["last_bytes_behind_the_wait"], "", env, limit_s=LITMUS_LIMIT_S
    )
