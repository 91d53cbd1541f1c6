"""figures: what HOCCL promises, measured, each against its goal. A figure that misses its goal has
the outcome "miss" and stands in the results like any other."""

import json
import os
import random
import signal
import statistics
import subprocess
import time

import common
import procs
from common import GIB, KIB, MIB

BENCH_LIMIT_S = 170
NO_BACK_OFF = {"HOCCL_SPIN_US": "1000000"}
POLL_MAX_US = [10, 25, 50, 100, 250, 500, 1000]
DEFAULT_POLL_MAX_US = 100
START_PAIRS = 500
BOOTSTRAPS = 2000

# Goals; docs/gpu-check.md says where each comes from.
STAGED_OF_BARE = 0.97  # at these sizes and above
BARE_FROM = 256 * MIB
COLLECTIVES_OF_BARE = 0.95
COLLECTIVE_SIZES = [64 * MIB, 256 * MIB, GIB]  # the bench's steps of 4
RATES_GBS = {16 * MIB: 42.0, 2 * MIB: 25.0}
TIMES_US = {64 * KIB: 22.0}
LAUNCH_US = 2.5
LAUNCH_SIZES = (2 * MIB, GIB)
LAUNCH_ROUNDS = 3  # processes land on cores of different speed: the median of so many pairs
IDLE_CPU_PERCENT, PENDING_CPU_PERCENT = 1.0, 10.0
START_MS = 0.5
GEMM_PERCENT = 1.0


def _size(n):
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if n % unit == 0:
            return f"{n // unit}{name}"
    return str(n)


def _goal(context, test, value, limit, at_least, unit, seconds=0.0, more=None):
    met = value >= limit if at_least else value <= limit
    detail = "" if met else f"{value} {unit}, goal {'at least' if at_least else 'at most'} {limit}"
    context.reporter.record(
        test,
        "pass" if met else "miss",
        seconds,
        detail,
        {"value": value, "unit": unit, "goal": limit, **(more or {})},
    )


def _bench(context, test, sizes, operation="sendrecv", others=("bare", "nccl"), step=None):
    """Runs `hoccl bench` and reports whether it did; its rows."""
    path = context.path("bench.json")
    command = [
        context.install.tool,
        "bench",
        operation,
        "--minbytes",
        _size(sizes[0]),
        "--maxbytes",
        _size(sizes[1]),
        "--json",
        path,
    ]
    if others:
        command += ["--compare", ",".join(others)]
    if step:
        command += ["--stepfactor", str(step)]
    env = {**common.clean_environment(), **context.install.env(), "HOCCL_EMULATE": "never"}
    log = context.path("bench.log")
    began = time.monotonic()
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
        try:
            status = process.wait(BENCH_LIMIT_S)
        except subprocess.TimeoutExpired:
            procs.kill_tree(process.pid)
            process.wait(10)
            status = f"not done after {BENCH_LIMIT_S} s"
    lasted = time.monotonic() - began
    rows = []
    if os.path.exists(path):
        with open(path) as f:
            rows = json.load(f)["rows"]
    wrong = [r for r in rows if r["errors"]]
    emulated = any(r["emulated"] for r in rows)
    ok = status == 0 and rows and not wrong and not emulated
    context.reporter.record(
        test,
        "pass" if ok else "error",
        lasted,
        (
            ""
            if ok
            else f"{' '.join(command)}: status {status}, {len(rows)} rows, "
            f"{len(wrong)} with wrong bytes, emulated {emulated}\n" + common.tail(log)
        ),
        {"rows": rows},
    )
    return rows


def _row(rows, impl, size, **more):
    for r in rows:
        if r["impl"] == impl and r["bytes"] == size and all(r[k] == v for k, v in more.items()):
            return r
    return None


def _launches(context):
    """What the application's thread spends on one operation, at either end of the sizes."""
    smallest, largest = LAUNCH_SIZES
    rounds = {size: [] for size in LAUNCH_SIZES}
    for n in range(LAUNCH_ROUNDS):
        rows = _bench(
            context,
            f"bench_launch_{n}",
            LAUNCH_SIZES,
            others=(),
            step=largest // smallest,
        )
        for size, measured in rounds.items():
            row = _row(rows, "hoccl", size)
            if row and row["path"] == "staged" and row["launch_us"] is not None:
                measured.append(round(row["launch_us"], 3))
    for size, measured in rounds.items():
        test = f"launch_{_size(size)}"
        if len(measured) < LAUNCH_ROUNDS:
            detail = f"{len(measured)} of {LAUNCH_ROUNDS} runs gave a staged launch_us"
            context.reporter.record(test, "error", detail=detail)
            continue
        _goal(
            context,
            test,
            statistics.median(measured),
            LAUNCH_US,
            False,
            "us",
            more={"rounds": measured},
        )


def _sendrecv(context):
    largest = 64 * MIB if context.quick else GIB
    rows = _bench(context, "bench_sweep", (64 * KIB, largest))
    rows += _bench(context, "bench_2MiB", (2 * MIB, 2 * MIB))

    def judge(test, row, key, limit, at_least, unit):
        if row is None or row[key] is None:
            context.reporter.record(test, "error", detail=f"the bench gave no {key}")
        elif row["path"] != "staged":
            context.reporter.record(test, "fail", detail=f"took the path {row['path']}, not staged")
        else:
            _goal(context, test, round(row[key], 3), limit, at_least, unit)

    for size, limit in RATES_GBS.items():
        judge(f"rate_{_size(size)}", _row(rows, "hoccl", size), "algbw_gbs", limit, True, "GB/s")
    for size, limit in TIMES_US.items():
        judge(f"time_{_size(size)}", _row(rows, "hoccl", size), "time_us", limit, False, "us")
    _launches(context)
    for size in sorted({r["bytes"] for r in rows if r["bytes"] >= BARE_FROM}):
        test = f"staged_of_bare_{_size(size)}"
        ours, bare = _row(rows, "hoccl", size), _row(rows, "bare", size, path="steady")
        if not ours or not bare or not ours["algbw_gbs"] or not bare["algbw_gbs"]:
            context.reporter.record(test, "error", detail="the bench lacks one of the two rows")
            continue
        _goal(
            context,
            test,
            round(ours["algbw_gbs"] / bare["algbw_gbs"], 4),
            STAGED_OF_BARE,
            True,
            "of the two bare copies at once",
            more={
                "hoccl_gbs": round(ours["algbw_gbs"], 2),
                "bare_gbs": round(bare["algbw_gbs"], 2),
            },
        )


def _run_case(context, case, name, env=None, limit=60):
    """One case on a pair of its own; its figures."""
    results = common.run_cases(
        context, "cases_figures", [(case, limit)], prefix=f"{name}_", env=env
    )
    result = results.get(case)
    return result.figures if result and result.outcome == "pass" else {}


def _cpu_and_latency(context):
    settings = [10, 100, 1000] if context.quick else POLL_MAX_US
    base = _run_case(context, "mover_cpu_and_latency", "no_back_off", NO_BACK_OFF)
    floor = base.get("rank1", {}).get("latency_us", {}).get("median")
    curve = []
    for poll in settings:
        got = _run_case(
            context, "mover_cpu_and_latency", f"poll_max_{poll}us", {"HOCCL_POLL_MAX_US": str(poll)}
        )
        if "rank1" not in got:
            continue
        receiver, sender = got["rank1"], got["rank0"]
        latency = receiver["latency_us"]
        curve.append(
            {
                "poll_max_us": poll,
                "latency_us": latency,
                "added_us": round(latency["median"] - floor, 1) if floor else None,
                "receiver_pending_cpu_percent": receiver["pending_cpu_percent"],
                "sender_pending_cpu_percent": sender["pending_cpu_percent"],
                "idle_cpu_percent": receiver["idle_cpu_percent"],
            }
        )
        if poll == DEFAULT_POLL_MAX_US:
            for test, key, limit in (
                ("mover_idle_cpu", "idle_cpu_percent", IDLE_CPU_PERCENT),
                ("mover_pending_cpu", "pending_cpu_percent", PENDING_CPU_PERCENT),
            ):
                # [by schedstat, by utime + stime], of either mover: the higher counts.
                _goal(
                    context,
                    test,
                    max(receiver[key] + sender[key]),
                    limit,
                    False,
                    "% of a core",
                    more={"receiver": receiver[key], "sender": sender[key]},
                )
    complete = len(curve) == len(settings) and floor is not None
    context.reporter.record(
        "latency_against_poll_max",
        "pass" if complete else "error",
        detail="" if complete else "not every setting was measured",
        figures={"no_back_off_latency_us": base.get("rank1", {}).get("latency_us"), "curve": curve},
    )


def bootstrap(values):
    """95% confidence interval of the median."""
    source = random.Random(1)
    medians = sorted(
        statistics.median(source.choices(values, k=len(values))) for _ in range(BOOTSTRAPS)
    )
    return [round(medians[int(BOOTSTRAPS * q)], 3) for q in (0.025, 0.975)]


def _gemm(context):
    got = _run_case(context, "gemm_beside_transfer", "measures")
    if "beside_ms" not in got:
        context.reporter.record("gemm_slow_down", "error", detail="the measurement did not finish")
        return
    slow = [100 * (b / a - 1) for a, b in zip(got["alone_ms"], got["beside_ms"])]
    _goal(
        context,
        "gemm_slow_down",
        round(statistics.median(slow), 3),
        GEMM_PERCENT,
        False,
        "%",
        more={
            "confidence_95": bootstrap(slow),
            "pairs": len(slow),
            "alone_ms": round(statistics.median(got["alone_ms"]), 4),
            "beside_ms": round(statistics.median(got["beside_ms"]), 4),
            "transfer_gbs": got.get("transfer_gbs"),
        },
    )


def _memory_used_mib():
    out = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    return int(out.stdout.split()[0])


def _mover_memory(context):
    """Device memory that comes back when one mover is killed while both applications are stopped,
    so that none of them can free anything meanwhile."""
    began = time.monotonic()
    pair = common.Pair(context, "cases_figures", ["hold"])
    try:
        if not pair.wait(lambda: all(r.event("holding") for r in pair.ranks), 60):
            raise RuntimeError("the ranks did not get ready\n" + pair.logs())
        mover = pair.ranks[1].event("holding")["movers"][0]
        for rank in pair.ranks:
            os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(0.5)
        before = _memory_used_mib()
        os.kill(mover, signal.SIGKILL)
        procs.wait_until(lambda: not procs.alive(mover), 5)
        after = procs.wait_until(lambda: (u := _memory_used_mib()) < before and u, 5, 0.2)
        if not after:
            raise RuntimeError(f"{before} MiB in use before and after the mover was killed")
        context.reporter.record(
            "mover_device_memory",
            "pass",
            time.monotonic() - began,
            figures={"value": before - after, "unit": "MiB"},
        )
    except (RuntimeError, subprocess.SubprocessError, ValueError, IndexError) as e:
        context.reporter.record("mover_device_memory", "error", time.monotonic() - began, str(e))
    finally:
        pair.kill()


def _start_up(context):
    """What the preloaded library adds to the start of a program that has nothing to do with it."""
    plain = common.clean_environment()
    loaded = {**plain, **context.install.env(), "LD_PRELOAD": context.install.shim}

    def start(env):
        began = time.perf_counter()
        _, status = os.waitpid(os.posix_spawn("/bin/true", ["true"], env), 0)
        if status != 0:
            raise RuntimeError(f"/bin/true ended with wait status {status}")
        return (time.perf_counter() - began) * 1e3

    began = time.monotonic()
    pairs = []
    for i in range(50 if context.quick else START_PAIRS):
        first, second = (plain, loaded) if i % 2 else (loaded, plain)
        a, b = start(first), start(second)
        pairs.append((a, b) if i % 2 else (b, a))  # plain, loaded
    added = [b - a for a, b in pairs]
    _goal(
        context,
        "start_up_of_an_unrelated_program",
        round(statistics.median(added), 4),
        START_MS,
        False,
        "ms",
        time.monotonic() - began,
        more={
            "confidence_95": bootstrap(added),
            "pairs": len(pairs),
            "plain_ms": round(statistics.median(a for a, _ in pairs), 4),
        },
    )


def _collectives(context):
    """AllGather and AlltoAll between the two ranks beside the bare copies they consist of, each as
    often in as out of place as the bench runs it."""
    sizes = COLLECTIVE_SIZES[:1] if context.quick else COLLECTIVE_SIZES
    for operation in ("allgather", "alltoall"):
        rows = _bench(context, f"bench_{operation}", (sizes[0], sizes[-1]), operation, ("bare",))
        for ours in (r for r in rows if r["impl"] == "hoccl"):
            in_place = bool(ours["in_place"])
            test = f"{operation}_of_bare_{_size(ours['bytes'])}{'_in_place' if in_place else ''}"
            bare = _row(rows, "bare", ours["bytes"], path="steady", in_place=ours["in_place"])
            if ours["path"] != "staged":
                detail = f"took the path {ours['path']}, not staged"
                context.reporter.record(test, "fail", detail=detail)
            elif not bare or not bare["algbw_gbs"] or not ours["algbw_gbs"]:
                context.reporter.record(test, "error", detail="the bench lacks one of the two rows")
            else:
                _goal(
                    context,
                    test,
                    round(ours["algbw_gbs"] / bare["algbw_gbs"], 4),
                    COLLECTIVES_OF_BARE,
                    True,
                    "of the bare copies",
                    more={
                        "hoccl_gbs": round(ours["algbw_gbs"], 2),
                        "bare_gbs": round(bare["algbw_gbs"], 2),
                        "launch_us": ours["launch_us"],
                    },
                )
        for size in sizes:
            if rows and not _row(rows, "hoccl", size):
                test = f"{operation}_of_bare_{_size(size)}"
                context.reporter.record(test, "error", detail="the bench gave no row of that size")


def run(context):
    _sendrecv(context)
    _gemm(context)
    _collectives(context)


def run_idle(context):
    """Group idle."""
    _start_up(context)
    _cpu_and_latency(context)
    _mover_memory(context)
