"""train: a pipeline of two stages over NCCL twice and over HOCCL once; all three equal bit for
bit."""

import common

LIMIT_S = 60
KEYS = ("losses", "stage0_parameters_sha256", "stage1_parameters_sha256")


def _compare(reporter, test, first, second):
    if not all(k in first and k in second for k in KEYS):
        reporter.record(test, "error", detail="a run it compares did not finish")
        return
    differing = [k for k in KEYS if first[k] != second[k]]
    detail = "different: " + ", ".join(differing) if differing else ""
    if "losses" in differing:
        pairs = list(zip(first["losses"], second["losses"]))
        step = next(i for i, (a, b) in enumerate(pairs) if a != b)
        one, other = (float.fromhex(x) for x in pairs[step])
        detail += f"; the first differing loss, step {step}, is {one} and {other}"
    reporter.record(test, "fail" if differing else "pass", detail=detail)


def run(context):
    for hoccl in (False, True):
        context.server(hoccl)
    runs = common.run_cases(
        context,
        "cases_train",
        [("first_run", LIMIT_S), ("second_run", LIMIT_S)],
        prefix="nccl_",
        hoccl=(False, False),
    )
    steered = common.run_cases(
        context,
        "cases_train",
        [("first_run", LIMIT_S)],
        prefix="hoccl_strict_",
        env={"HOCCL_STRICT": "1"},
    )

    def figures(results, case):
        return results[case].figures if case in results else {}

    first = figures(runs, "first_run")
    _compare(context.reporter, "nccl_repeats_itself", first, figures(runs, "second_run"))
    _compare(context.reporter, "hoccl_equals_nccl", first, figures(steered, "first_run"))
