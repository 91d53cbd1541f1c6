"""zerosm: no kernel, no copy inside a device, no large memset, in the application or in the mover;
and steered transfers end while every SM is occupied. Planted violations must be caught."""

import os

import common
import trace_check

LIMIT_S = 40
HOG_CASES = [
    "every_sm_occupied_in_the_sender",
    "every_sm_occupied_in_the_receiver",
    "every_sm_occupied_in_both",
    "planted_nccl_under_hog_is_blocked",
    "planted_copy_under_hog_is_blocked",
]
# What cases_zerosm.planted_window does; kernel names are compared by this part.
PLANTED = ["DtoD 1048576", "kernel …plantedKernel…", "memset 4194304"]


def _plain(violation):
    return (
        PLANTED[1]
        if violation.startswith("kernel ") and "plantedKernel" in violation
        else violation
    )


def _judge(directory, ranks, expected, direct):
    """Compares the traces of a window with `expected` {role: violations}; what is not named must be
    clean. `direct`: the movers copy from GPU to GPU. Returns (problems, figures)."""
    problems, figures = [], {}
    everywhere = (min(r["begin_ns"] for r in ranks), max(r["end_ns"] for r in ranks))
    for number, r in enumerate(ranks):
        if len(r["movers"]) != 1:
            problems.append(f"rank {number} has {len(r['movers'])} movers, not 1")
        roles = [(f"app{number}", r["pid"], (r["begin_ns"], r["end_ns"]))]
        roles += [(f"mover{number}", pid, everywhere) for pid in r["movers"]]
        for role, pid, window in roles:
            trace = trace_check.load(directory, pid)
            if trace is None:
                problems.append(f"{role} ({pid}) left no trace: CUPTI did not get into it")
                continue
            unusable = trace.usable(window[1])
            if unusable:
                problems.append(f"{role}: {unusable}")
            found = [_plain(v) for v in trace.violations(*window)]
            wanted = sorted(expected.get(role, []))
            if sorted(found) != wanted:
                problems.append(
                    f"{role}: in the window {found[:12]} ({len(found)} in all), "
                    f"expected {wanted or 'nothing'}"
                )
            figures[role] = trace.counts(*window)
            if role.startswith("app") and not trace.before(window[0]):
                problems.append(f"{role}: nothing traced before the window, where kernels ran")
            if role.startswith("mover"):
                moved = (trace.bytes("DtoH", *window), trace.bytes("HtoD", *window))
                if direct:
                    moved += (trace.bytes("PtoP", *window),)
                    if moved != (0, 0, r["sent"]):
                        problems.append(
                            f"{role}: copied {moved} bytes (to the host, from there, to the peer), "
                            f"expected {(0, 0, r['sent'])}"
                        )
                elif moved != (r["sent"], r["received"]):
                    problems.append(
                        f"{role}: copied {moved} bytes (out, in), expected "
                        f"{(r['sent'], r['received'])}"
                    )
                small = trace.small_copies_in(*window)
                if small:
                    problems.append(f"{role}: {small} host-to-device copies under 32 KiB")
    return problems, figures


def report_window(context, windows, directory, case, test, expected, direct=False):
    """Reports as `test` what the traces say of the window of `case`, one of run_cases' results."""
    figures = windows[case].figures if case in windows else {}
    if not all(f"rank{r}" in figures for r in range(common.WORLD)):
        context.reporter.record(test, "error", detail=f"{case} did not finish")
        return
    ranks = [figures[f"rank{r}"] for r in range(common.WORLD)]
    problems, counts = _judge(directory, ranks, expected, direct)
    context.reporter.record(
        test, "fail" if problems else "pass", detail="\n".join(problems), figures=counts
    )


def run(context):
    directory = context.path("trace")
    os.makedirs(directory)
    windows = common.run_cases(
        context,
        "cases_zerosm",
        [("clean_window", LIMIT_S), ("planted_window", LIMIT_S)],
        env={
            "GPU_CHECK_TRACE_DIR": directory,
            "CUDA_INJECTION64_PATH": os.path.join(context.gpu_dir, "libkernel_trace.so"),
        },
    )
    for case, test, expected in (
        ("clean_window", "no_sm_used", {}),
        ("planted_window", "planted_violations_caught", {"app0": PLANTED}),
    ):
        report_window(context, windows, directory, case, test, expected)
    common.run_cases(context, "cases_zerosm", [(name, LIMIT_S) for name in HOG_CASES])
