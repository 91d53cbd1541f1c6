"""badinput: what a person gets wrong. The job must run as plain NCCL on all ranks, in bounded time,
with one clear line that names the cause."""

import re

import common

LIMIT_S = 45
NOWHERE = "/nonexistent/hoccl-mover"

# name, environment of rank 0, of rank 1, rank preloaded?, what some rank's log line must name
CASES = [
    (
        "unknown_variable",
        {"HOCCL_MIN_BYTE": "1MiB"},
        {"HOCCL_MIN_BYTE": "1MiB"},
        (True, True),
        r"HOCCL_MIN_BYTE\b",
    ),
    (
        "value_out_of_range_on_one_rank",
        {},
        {"HOCCL_SLOTS": "9999"},
        (True, True),
        r"HOCCL_SLOTS.*9999|9999.*HOCCL_SLOTS",
    ),
    ("policies_that_differ", {}, {"HOCCL_MIN_BYTES": "2MiB"}, (True, True), r"HOCCL_MIN_BYTES"),
    (
        "missing_mover",
        {"HOCCL_MOVER_PATH": NOWHERE},
        {"HOCCL_MOVER_PATH": NOWHERE},
        (True, True),
        re.escape(NOWHERE),
    ),
    ("rank_1_without_preload", {"HOCCL_AGREE_TIMEOUT_MS": "2000"}, {}, (True, False), r"rank 1"),
    (
        "rank_0_without_preload",
        {},
        {"HOCCL_AGREE_TIMEOUT_MS": "2000"},
        (False, True),
        r"rank 0|unique id",
    ),
]


def _explained(context, test, outputs, pattern):
    """One line of HOCCL's names the cause, and no rank says the same thing twice."""
    problems, shown = [], []
    for number, output in enumerate(outputs):
        lines = [
            line for line in common.lines_matching(output, r"hoccl \[") if re.search(pattern, line)
        ]
        shown += [f"rank {number}: {line}" for line in lines]
        if len(lines) != len(set(lines)):
            problems.append(f"rank {number} repeats a line")
    if not shown:
        problems.append(
            f"no line of HOCCL's names the cause (looked for {pattern})\n"
            + "\n".join(common.tail(o, 15) for o in outputs)
        )
    context.reporter.record(
        test,
        "fail" if problems else "pass",
        detail="\n".join(problems + (shown if problems else [])),
        figures={"line": shown[0][:400] if shown else "", "lines": len(shown)},
    )


def run(context):
    for hoccl in (False, True):
        context.server(hoccl)
    for name, first, second, hoccl, pattern in CASES:
        results = common.run_cases(
            context,
            "cases_badinput",
            [("plain_nccl", LIMIT_S)],
            prefix=name + "_runs_as_",
            hoccl=hoccl,
            each=(first, second),
        )
        if "plain_nccl" in results:
            _explained(context, name + "_is_explained", results["plain_nccl"].outputs, pattern)
