"""apps: FSDP2, PyTorch's 1F1B pipeline and DDP over two ranks, 20 steps each: NCCL twice, then
HOCCL; losses and parameters equal bit for bit."""

import common

APPS = ["fsdp2", "pipeline_1f1b", "ddp"]
LIMIT_S = 60
COMPARED = ("losses", "sha256")


def compare(reporter, test, first, second):
    keys = {k for k in (*first, *second) if k.endswith(COMPARED)}
    if not first or not second or not any(k.endswith("losses") for k in keys):
        reporter.record(test, "error", detail="a run it compares did not finish")
        return
    differing = sorted(k for k in keys if first.get(k) != second.get(k))
    detail = "different: " + ", ".join(differing) if differing else ""
    for k in (k for k in differing if k.endswith("losses") and k in first and k in second):
        pairs = list(zip(first[k], second[k]))
        step = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if step is not None:
            one, other = (float.fromhex(x) for x in pairs[step])
            detail += f"; {k}: first at step {step}, {one} and {other}"
    reporter.record(test, "fail" if differing else "pass", detail=detail)


def run(context):
    for hoccl in (False, True):
        context.server(hoccl)
    plain = common.run_cases(
        context,
        "cases_apps",
        [(name + end, LIMIT_S) for name in APPS for end in ("", "_again")],
        prefix="nccl_",
        hoccl=(False, False),
    )
    steered = common.run_cases(
        context,
        "cases_apps",
        [(name, LIMIT_S) for name in APPS],
        prefix="hoccl_strict_",
        env={"HOCCL_STRICT": "1"},
    )

    def figures(results, case):
        return results[case].figures if case in results else {}

    for name in APPS:
        first = figures(plain, name)
        again = figures(plain, name + "_again")
        compare(context.reporter, name + "_nccl_repeats_itself", first, again)
        compare(context.reporter, name + "_hoccl_equals_nccl", first, figures(steered, name))
