"""layer: what traffic between two GPUs costs the compute beside it. One Transformer layer (hidden 4096, batch
2 x 2048, bf16, forward and backward) with and without traffic in turn, over NCCL, over NCCL limited to
some CTAs, over HOCCL's direct path and through host memory (HOCCL_P2P=0); and beside bare copies to and from
host memory, as fast as the staged path's or faster.

The figure is how much longer the layer takes, in percent, for each GB that this GPU sends and receives
meanwhile: a faster transfer disturbs for a shorter time."""

import statistics

import group_direct
from group_figures import bootstrap
from group_training import DEFAULT, HOCCL, configurations

KINDS = ("all_gather", "send_recv_one_way", "send_recv_both_ways")
STAGED = "hoccl_staged"
BARE = {"send_recv_one_way": "bare_one_way", "send_recv_both_ways": "bare_both_ways"}
LIMIT_S = 30
# Goals: HOCCL's slow-down for each GB, of that of NCCL's default; staged, at a rate near that of a 400 Gb/s
# NIC, percent.
OF_NCCL = 0.6
STAGED_PERCENT, STAGED_GBS = 1.0, 46.0


def _pairs(figures):
    """Of each pair of segments that both ranks could compare, the mean of the ranks: (slow-down in %, GB
    moved meanwhile)."""
    found = []
    for ranks in zip(figures["rank0"]["pairs"], figures["rank1"]["pairs"]):
        if None in ranks:
            continue
        slow = [100 * (p["beside"]["layer_ms"] / p["alone"]["layer_ms"] - 1) for p in ranks]
        found.append((statistics.mean(slow), statistics.mean(p["gb_a_layer"] for p in ranks)))
    return found


def _median(figures, *keys):
    """Of a value of all pairs of both ranks."""
    values = []
    for rank in ("rank0", "rank1"):
        for value in filter(None, figures[rank]["pairs"]):
            for key in keys:
                value = value[key]
            values.append(value)
    return statistics.median(values)


def _summary(name, figures):
    """None where there is no pair that both ranks could compare."""
    pairs = _pairs(figures)
    if not pairs:
        return None
    per_gb = [slow / gb for slow, gb in pairs]
    times = {
        f"{part}_{when}_ms": round(_median(figures, when, f"{part}_ms"), 4)
        for part in ("forward", "backward", "layer")
        for when in ("alone", "beside")
    }
    return {
        "name": name,
        "percent_a_gb": round(statistics.median(per_gb), 3),
        "percent_a_gb_95": bootstrap(per_gb),
        "slow_percent": round(statistics.median(slow for slow, _ in pairs), 3),
        "slow_percent_95": bootstrap([slow for slow, _ in pairs]),
        "gb_a_layer": round(statistics.median(gb for _, gb in pairs), 4),
        "one_way_gbs": round(_median(figures, "one_way_gbs"), 2),
        "pairs": len(pairs),
        **times,
        "environment": figures["rank0"]["environment"],
    }


def _judge_direct(reporter, kind, ours, nccl):
    test = f"{kind}_of_nccl_default"
    if not ours or not nccl:
        reporter.record(test, "error", detail="one of the two was not measured")
        return
    if nccl["percent_a_gb"] <= 0:
        detail = f"NCCL's own slow-down is {nccl['slow_percent']}%: nothing to compare with"
        reporter.record(test, "error", detail=detail)
        return
    value = round(ours["percent_a_gb"] / nccl["percent_a_gb"], 3)
    reporter.record(
        test,
        "pass" if value <= OF_NCCL else "miss",
        detail="" if value <= OF_NCCL else f"{value} of NCCL's slow-down a GB, goal {OF_NCCL}",
        figures={
            "value": value,
            "unit": "of the slow-down a GB of NCCL's default",
            "goal": OF_NCCL,
            "hoccl_percent_a_gb": ours["percent_a_gb"],
            "nccl_percent_a_gb": nccl["percent_a_gb"],
        },
    )


def _judge_staged(reporter, kind, staged, bare):
    """At the rate of a NIC, which one way has. What bare copies cost is told beside it."""
    test = f"{kind}_staged"
    if not staged or not bare:
        reporter.record(test, "error", detail="not measured")
        return
    slow, rate = staged["slow_percent"], staged["one_way_gbs"]
    met = slow <= STAGED_PERCENT and rate >= STAGED_GBS
    reporter.record(
        test,
        "pass" if met else "miss",
        detail=(
            ""
            if met
            else f"{slow}% at {rate} GB/s, goal at most {STAGED_PERCENT}% at {STAGED_GBS} GB/s; "
            f"bare copies {bare['slow_percent']}% at {bare['one_way_gbs']} GB/s"
        ),
        figures={
            "value": slow,
            "unit": "%",
            "goal": STAGED_PERCENT,
            "confidence_95": staged["slow_percent_95"],
            "one_way_gbs": rate,
            "goal_gbs": STAGED_GBS,
            "bare_copies": bare["slow_percent"],
            "bare_copies_95": bare["slow_percent_95"],
            "bare_copies_gbs": bare["one_way_gbs"],
        },
    )


def run(context):
    if not group_direct.two_gpus(context):
        return
    for hoccl in (False, True):
        context.server(hoccl)
    runs = [*configurations(context.quick), (STAGED, group_direct.STAGED, True)]
    found = {kind: {} for kind in KINDS}
    for name, env, hoccl in runs:
        done = group_direct.cases(
            context, "cases_layer", KINDS, f"{name}_", env, limit_s=LIMIT_S, hoccl=(hoccl, hoccl)
        )
        for kind, result in done.items():
            if result.outcome == "pass" and (summary := _summary(name, result.figures)):
                found[kind][name] = summary
    bare = group_direct.cases(
        context, "cases_layer", BARE.values(), "", {}, limit_s=LIMIT_S, hoccl=(False, False)
    )
    for kind, name in BARE.items():
        if bare[name].outcome == "pass" and (summary := _summary(name, bare[name].figures)):
            found[kind][name] = summary
    for kind, by_name in found.items():
        missing = [name for name, _, _ in runs if name not in by_name]
        context.reporter.record(
            f"{kind}_side_by_side",
            "error" if missing else "pass",
            detail="not measured: " + ", ".join(missing) if missing else "",
            figures={
                **{f"{name}_percent_a_gb": s["percent_a_gb"] for name, s in by_name.items()},
                "configurations": list(by_name.values()),
            },
        )
        _judge_direct(context.reporter, kind, by_name.get(HOCCL), by_name.get(DEFAULT))
    kind = "send_recv_one_way"
    _judge_staged(context.reporter, kind, found[kind].get(STAGED), found[kind].get(BARE[kind]))
