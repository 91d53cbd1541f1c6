"""direct_pull: the groups direct and direct_more with HOCCL_P2P=3: the receiver's mover copies, as it
does by itself over PCIe (docs/direct.md). What it shows over NVLink is that nothing is lost, stale or
freed too early; not that of PCIe, nor a rate of it."""

import group_collectives
import group_direct
import group_direct_more
import group_memory
import group_p2p

PULL = {**group_direct.DIRECT, "HOCCL_P2P": "3"}


def run(context):
    if not group_direct.two_gpus(context):
        return
    group_direct.cases(context, "cases_p2p", group_p2p.CASES, "p2p_", PULL)
    group_direct.cases(context, "cases_collectives", group_collectives.CASES, "", PULL)
    group_direct.cases(context, "cases_memory", group_direct_more.FREES, "", PULL)
    with group_memory.ranks_with(context, "expandable", "expandable_segments:True") as inner:
        group_direct.cases(inner, "cases_memory", ["expandable_directly"], "", PULL)
    group_direct.cases(context, "cases_zerosm", group_direct.HOGS, "hog_", PULL)
    group_direct.cases(
        context,
        "cases_litmus",
        ["last_bytes_behind_the_wait"],
        "",
        PULL,
        limit_s=group_direct_more.LITMUS_LIMIT_S,
    )
