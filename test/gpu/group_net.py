"""net: NCCL's own traffic over libnccl-net-hoccl.so, without steering: every byte as over NCCL's
sockets, the log naming the plugin; and the rate, against NCCL's sockets at their best setting. Then
the same with device memory through staging, and with buffers that the application has registered."""

import json
import re
import subprocess
import time

import common

CASES = ["send_recv", "all_gather", "all_reduce", "reduce_scatter", "two_communicators"]
COMPARED = CASES[:4]
LIMIT_S = 60
REGMR_GOAL_US = 10
GIB = 1 << 30
REPORT = re.compile(
    r"staging: (\d+) sends \((\d+) bytes\) and (\d+) receives \((\d+) bytes\) of device memory, by "
    r"(\d+) copies out and (\d+) in \((\d+) under 32 KiB\); (\d+) registrations, the slowest "
    r"([\d.]+) us, the largest of new memory \((\d+) bytes, (\d+) times\) ([\d.]+) us in the "
    r"median"
)
REPORT_LIMIT_S = 20
INTERFACE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
SOCKET_SETTINGS = [(1, 1), (2, 2), (4, 4), (8, 4), (8, 8)]  # threads, sockets of each


def _cases(context, prefix, names, env):
    return common.run_cases(
        context,
        "cases_net",
        [(n, LIMIT_S) for n in names],
        prefix=prefix + "_",
        env={**INTERFACE, **env},
        hoccl=(False, False),
    )


def _said(results, pattern):
    """Whether both ranks' logs have a line with the pattern."""
    outputs = next(iter(results.values())).outputs
    return all(common.lines_matching(output, pattern) for output in outputs)


def _compare(context, plugin, sockets, prefix=""):
    for case in COMPARED:
        one, other = (r[case].figures if case in r else {} for r in (plugin, sockets))
        keys = [f"rank{r}_sha256" for r in range(2)]
        if not all(k in one and k in other for k in keys):
            name = f"{prefix}{case}_as_over_sockets"
            context.reporter.record(name, "error", detail="a run is missing")
            continue
        same = all(one[k] == other[k] for k in keys)
        context.reporter.record(f"{prefix}{case}_as_over_sockets", "pass" if same else "fail")


def _reports(results):
    """The plugin's last line about staging in either rank's log, which comes when NCCL closes."""
    outputs = next(iter(results.values())).outputs
    until = time.monotonic() + REPORT_LIMIT_S
    while True:
        found = [common.lines_matching(output, REPORT.pattern) for output in outputs]
        if all(found) or time.monotonic() > until:
            return [REPORT.search(lines[-1]) for lines in found if lines]
        time.sleep(0.2)


def _staging(context, library, over_sockets):
    staged = {
        "NCCL_NET_PLUGIN": library,
        "NCCL_TUNER_PLUGIN": context.install.shim,
        "HOCCL_NET_STAGING": "1",
        "NCCL_NET_GDR_LEVEL": "SYS",
    }
    results = _cases(context, "staging", COMPARED, staged)
    for name, pattern in (
        ("staging_is_claimed", r"device memory of GPU .* goes through"),
        ("staging_nccl_offers_device_memory", r"via NET/HOCCL/\d+.*GDRDMA"),
        ("staging_without_ll128", r"no LL128 between nodes"),
    ):
        context.reporter.record(name, "pass" if _said(results, pattern) else "fail")
    _compare(context, results, over_sockets, "staging_")
    registered = _cases(context, "staging", ["registered"], staged)
    for name, run in (("staging_counters", results), ("staging_registered_counters", registered)):
        reports = _reports(run)
        figures = {}
        for i, found in enumerate(reports):
            names = ["sends", "sent_bytes", "receives", "received_bytes", "copies_out", "copies_in"]
            figures[f"log{i}"] = dict(zip(names, (int(n) for n in found.groups()[:6])))
        moved = len(reports) == 2 and all(min(int(n) for n in f.groups()[:6]) > 0 for f in reports)
        context.reporter.record(name, "pass" if moved else "fail", figures=figures)
    largest = [f for f in _reports(registered) if int(f.group(10)) >= GIB]
    _registration(context, max((float(f.group(12)) for f in largest), default=None))


def _registration(context, under_nccl):
    """regMr of 1 GiB that the plugin has not seen, one call after the other; and what it took inside
    NCCL, where a call comes once in a while and finds its code and the driver's in no cache."""
    path = context.path("regmr.json")
    done = subprocess.run(
        [context.install.tool, "bench", "regmr", "--json", path],
        env={**common.clean_environment(), **INTERFACE},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    figures = {"unit": "us", "goal": REGMR_GOAL_US}
    if done.returncode != 0:
        context.reporter.record("staging_regmr_of_1GiB", "error", detail=done.stderr[-2000:])
        return
    with open(path) as f:
        rows = {row["allocation"]: row for row in json.load(f)["rows"]}
    figures["value"] = rows["fresh"]["time_us"]
    figures["known_us"] = rows["known"]["time_us"]
    figures["fresh_inside_nccl_us"] = under_nccl
    met = rows["fresh"]["bytes"] == GIB and figures["value"] < REGMR_GOAL_US
    outcome = "pass" if met and under_nccl else "fail"
    detail = "" if under_nccl else "NCCL has not given the plugin a buffer of 1 GiB"
    context.reporter.record("staging_regmr_of_1GiB", outcome, detail=detail, figures=figures)


def _rates(context, plugin):
    """The plugin as it comes against NCCL's sockets at the setting that is best for each size."""
    ours = _cases(context, "plugin", ["rates"], plugin).get("rates")
    best = {}
    for threads, sockets in SOCKET_SETTINGS:
        env = {"NCCL_NET": "Socket", "NCCL_SOCKET_NTHREADS": str(threads)}
        env["NCCL_NSOCKS_PERTHREAD"] = str(sockets)
        name = f"sockets_{threads}x{sockets}"
        for size, rate in _cases(context, name, ["rates"], env)["rates"].figures.items():
            best[size] = max(best.get(size, (0, "")), (rate, f"{threads} x {sockets}"))
    for size, (rate, setting) in best.items():
        value = ours.figures.get(size, 0) if ours else 0
        figures = {
            "value": round(value / rate, 3),
            "unit": "of NCCL's sockets at their best",
            "goal": 1.0,
            "plugin_gbs": round(value, 3),
            "sockets_gbs": round(rate, 3),
            "sockets_threads_x_sockets": setting,
        }
        outcome = "pass" if value > rate else "fail"
        context.reporter.record(f"rate_{size[4:]}", outcome, figures=figures)


def run(context):
    library = context.install.net_plugin
    plugin = {"NCCL_NET_PLUGIN": library}
    over_plugin = _cases(context, "plugin", CASES, plugin)
    over_sockets = _cases(context, "sockets", COMPARED, {"NCCL_NET": "Socket"})
    for name, results, pattern in (
        ("log_names_the_plugin", over_plugin, r"HOCCL .*transport tcp"),
        ("nccl_uses_the_plugin", over_plugin, r"Using network HOCCL"),
        ("sockets_are_nccls", over_sockets, r"Using network Socket"),
    ):
        context.reporter.record(name, "pass" if _said(results, pattern) else "fail")
    _compare(context, over_plugin, over_sockets)
    _staging(context, library, over_sockets)
    _rates(context, plugin)
