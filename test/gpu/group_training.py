"""What training_pp and training_fsdp share: a model of 1.35 billion parameters trained for 50 steps on two
GPUs of one node over NCCL, over NCCL limited to some CTAs, and over HOCCL's direct path. All runs are
deterministic, and all are timed: what determinism costs, mostly in the backward of the attention, it
costs everywhere alike."""

import time

import group_apps
import group_direct

CASE, LIMIT_S = "train", 70
LAST_START_S = 230  # no run is begun later: what has been measured is to be compared
HOCCL = "hoccl"
DEFAULT = "nccl_default"
CTAS = (8, 4, 2, 1)


def limited(ctas):
    return {"NCCL_MIN_CTAS": str(ctas), "NCCL_MAX_CTAS": str(ctas)}


def configurations(quick):
    """(name, variables, with HOCCL), those first that are compared bit for bit."""
    yield DEFAULT, {}, False
    yield HOCCL, group_direct.DIRECT, True
    for ctas in CTAS[:1] if quick else CTAS:
        yield f"nccl_{ctas}_cta{'s' if ctas > 1 else ''}", limited(ctas), False


def _summary(name, figures, reference):
    """One configuration's line of the comparison. A step takes as long as its slower rank."""
    ranks = [figures["rank0"], figures["rank1"]]
    slower = max(ranks, key=lambda r: r["step_ms"]["median"])
    exact = [k for k in figures if k.endswith(group_apps.COMPARED)]
    return {
        "name": name,
        "tokens_per_s": round(figures["tokens_a_step"] / slower["step_ms"]["median"] * 1e3),
        "step_ms": slower["step_ms"],
        "equals_nccl_default": all(figures[k] == reference.get(k) for k in exact),
        "environment": ranks[0]["environment"],
        "ranks": [
            {k: v for k, v in r.items() if k not in ("step_ms_each", "environment")} for r in ranks
        ],
    }


def _speed(summaries):
    """The figures a person looks for, one a configuration."""
    return {f"{s['name']}_tokens_per_s": s["tokens_per_s"] for s in summaries}


def run(context, module):
    if not group_direct.two_gpus(context):
        return
    for hoccl in (False, True):
        context.server(hoccl)
    runs, began = {}, time.monotonic()
    for name, env, hoccl in configurations(context.quick):
        if time.monotonic() - began > LAST_START_S:
            runs[name] = {}
            continue
        done = group_direct.cases(
            context, module, [CASE], f"{name}_", env, limit_s=LIMIT_S, hoccl=(hoccl, hoccl)
        )
        result = done.get(CASE)
        runs[name] = result.figures if result and result.outcome == "pass" else {}
    default = runs[DEFAULT]
    group_apps.compare(context.reporter, "hoccl_equals_nccl", default, runs[HOCCL])
    missing = [name for name, figures in runs.items() if not figures]
    summaries = [_summary(name, f, default) for name, f in runs.items() if f]
    context.reporter.record(
        "side_by_side",
        "error" if missing else "pass",
        detail="not measured: " + ", ".join(missing) if missing else "",
        figures={**_speed(summaries), "configurations": summaries},
    )
