"""direct_figures: rates between two GPUs of one node, against bare copies and against NCCL, its
collectives by copy engines among them, in the same run. A figure that misses its goal has the outcome "miss"."""

import json
import os
import subprocess
import time

import common
import group_collectives
import group_direct
import procs
from common import GIB, KIB, MIB

BENCH_LIMIT_S = 120
CTAS = ("1", "2", "4", "8")
# Goals: of the bare copies from 256 MiB on, at 64 MiB; of those through the host without P2P; GB/s at 2 MiB; us at 256 KiB; GB/s of
# algorithm bandwidth of the collectives at 1 GiB.
OF_BARE = {64 * MIB: 0.95, 256 * MIB: 0.98, GIB: 0.98}
OF_BARE_HOST = 0.95
RATE_2MIB_GBS, TIME_256KIB_US = 120.0, 14.0
COLLECTIVE_GBS = 760.0
LAUNCH_US = 2.5


def _size(n):
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if n % unit == 0:
            return f"{n // unit}{name}"
    return str(n)


def _run(context, command, log, env, limit_s):
    """Exit status, or what happened instead."""
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            procs.kill_tree(process.pid)
            process.wait(10)
            return f"not done after {limit_s} s"


def _bench(context, test, operation, smallest, largest, more=(), env=None):
    path, log = context.path("bench.json"), context.path("bench.log")
    command = [context.install.tool, "bench", operation, "--same-node", "-b", _size(smallest)]
    command += ["-e", _size(largest), "--json", path, *more]
    began = time.monotonic()
    status = _run(
        context,
        command,
        log,
        {
            **common.clean_environment(),
            **context.install.env(),
            "HOCCL_EMULATE": "never",
            **(env or {}),
        },
        BENCH_LIMIT_S,
    )
    rows = []
    if os.path.exists(path):
        with open(path) as f:
            rows = json.load(f)["rows"]
    wrong = [r for r in rows if r["errors"]]
    ok = status == 0 and rows and not wrong and not any(r["emulated"] for r in rows)
    detail = f"{' '.join(command)}: status {status}, {len(rows)} rows, {len(wrong)} wrong\n"
    context.reporter.record(
        test,
        "pass" if ok else "error",
        time.monotonic() - began,
        "" if ok else detail + common.tail(log),
        {"rows": rows},
    )
    return rows


def _row(rows, impl, size, **more):
    for r in rows:
        if r["impl"] == impl and r["bytes"] == size and all(r[k] == v for k, v in more.items()):
            return r
    return None


def _goal(context, test, row, value, limit, at_least, unit, more=None, path="direct"):
    if row is None or value is None:
        context.reporter.record(test, "error", detail="not measured")
        return
    if row["path"] != path:
        context.reporter.record(test, "fail", detail=f"took the path {row['path']}, not {path}")
        return
    met = value >= limit if at_least else value <= limit
    missed = f"{value} {unit}, goal {'at least' if at_least else 'at most'} {limit}"
    context.reporter.record(
        test,
        "pass" if met else "miss",
        detail="" if met else missed,
        figures={"value": round(value, 4), "unit": unit, "goal": limit, **(more or {})},
    )


def _of_bare(context, test, rows, size, goal, path="direct"):
    row, bare = _row(rows, "hoccl", size), _row(rows, "bare", size, path="steady")
    _goal(
        context,
        test,
        row,
        row and bare and bare["time_us"] / row["time_us"],
        goal,
        True,
        "of the bare copies",
        {"hoccl_us": row and row["time_us"], "bare_us": bare and bare["time_us"]},
        path,
    )


def _sendrecv(context, largest):
    for pattern in ("oneway", "bidir"):
        rows = _bench(
            context,
            f"bench_{pattern}",
            "sendrecv",
            64 * KIB,
            largest,
            ("--pattern", pattern, "--compare", "nccl,bare"),
        )
        rows += _bench(
            context,
            f"bench_{pattern}_2MiB",
            "sendrecv",
            2 * MIB,
            2 * MIB,
            ("--pattern", pattern),
        )
        for size in [s for s in OF_BARE if s <= largest]:
            _of_bare(context, f"{pattern}_of_bare_{_size(size)}", rows, size, OF_BARE[size])
        if pattern == "bidir":
            continue
        row = _row(rows, "hoccl", 2 * MIB)
        _goal(context, "rate_2MiB", row, row and row["algbw_gbs"], RATE_2MIB_GBS, True, "GB/s")
        row = _row(rows, "hoccl", 256 * KIB)
        _goal(context, "time_256KiB", row, row and row["time_us"], TIME_256KIB_US, False, "us")
        launches = [r["launch_us"] for r in rows if r["impl"] == "hoccl" and r["launch_us"]]
        worst = max(launches) if launches else None
        _goal(context, "launch", row, worst, LAUNCH_US, False, "us, the worst of all sizes")


def _doorbell(context):
    """What the mover's ring behind the end of a launch is worth, in turns with and without it."""
    times = {"0": [], "1": []}
    for turn in range(2):
        for doorbell in times:
            rows = _bench(
                context,
                f"bench_doorbell_{doorbell}_turn_{turn}",
                "sendrecv",
                256 * KIB,
                2 * MIB,
                ("--pattern", "oneway", "-f", "8"),
                {"HOCCL_DOORBELL": doorbell},
            )
            times[doorbell].append({r["bytes"]: r["time_us"] for r in rows})
    figures = {
        _size(size): [
            round(on[size] / off[size], 3)
            for on, off in zip(times["1"], times["0"])
            if size in on and size in off
        ]
        for size in times["0"][0]
    }
    context.reporter.record(
        "doorbell_time_of_without",
        "pass" if figures else "error",
        detail="" if figures else "not measured",
        figures=figures,
    )


def run(context):
    if not group_direct.two_gpus(context):
        return
    largest = 64 * MIB if context.quick else GIB
    _sendrecv(context, largest)
    if not context.quick:
        _doorbell(context)
    for operation, in_place in (("allgather", True), ("alltoall", False)):
        rows = _bench(
            context,
            f"bench_{operation}",
            operation,
            4 * MIB,
            largest,
            ("--compare", "nccl,nccl-ce"),
        )
        row, other, engines = (
            _row(rows, impl, largest, in_place=in_place) for impl in ("hoccl", "nccl", "nccl-ce")
        )
        # It takes its kernels without a word where it cannot take them.
        taken = bool(engines) and engines["path"] == "copy-engine"
        context.reporter.record(
            f"{operation}_nccl_copy_engines",
            "pass" if taken else "fail",
            detail="" if taken else "NCCL took its kernels, or was not measured",
        )
        if context.quick:
            continue
        _goal(
            context,
            f"{operation}_1GiB",
            row,
            row and row["algbw_gbs"],
            COLLECTIVE_GBS,
            True,
            "GB/s",
            {
                "nccl_gbs": other and other["algbw_gbs"],
                "nccl_copy_engines_gbs": engines and taken and engines["algbw_gbs"],
                "in_place": in_place,
            },
        )
    if not context.quick:
        for operation in ("allgather", "alltoall"):
            name = f"{operation}_1GiB_out_of_place_own_block_by_kernel"
            rows = _bench(
                context,
                f"bench_{name}",
                operation,
                GIB,
                GIB,
                env=group_collectives.OWN_BLOCK_BY_KERNEL,
            )
            row = _row(rows, "hoccl", GIB, in_place=False)
            _goal(context, name, row, row and row["algbw_gbs"], COLLECTIVE_GBS, True, "GB/s")
    for ctas in CTAS:
        _bench(
            context,
            f"bench_nccl_{ctas}_ctas",
            "sendrecv",
            256 * KIB,
            largest,
            ("--impl", "nccl", "-f", "16"),
            {"NCCL_MIN_CTAS": ctas, "NCCL_MAX_CTAS": ctas},
        )
    rows = _bench(
        context,
        "bench_without_p2p",
        "sendrecv",
        128 * MIB,
        max(largest, 128 * MIB),
        ("--pattern", "oneway", "--compare", "nccl,bare"),
        {"HOCCL_P2P": "0", "NCCL_P2P_DISABLE": "1"},
    )
    for size in sorted({r["bytes"] for r in rows}) or [128 * MIB]:
        _of_bare(context, f"without_p2p_of_bare_{_size(size)}", rows, size, OF_BARE_HOST, "staged")
