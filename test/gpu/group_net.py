"""net: NCCL's own traffic over libnccl-net-hoccl.so, without steering: every byte as over NCCL's
sockets, the log naming the plugin; and the rate, against NCCL's sockets at their best setting."""

import common

CASES = ["send_recv", "all_gather", "all_reduce", "reduce_scatter", "two_communicators"]
COMPARED = CASES[:4]
LIMIT_S = 60
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


def _compare(context, plugin, sockets):
    for case in COMPARED:
        one, other = (r[case].figures if case in r else {} for r in (plugin, sockets))
        keys = [f"rank{r}_sha256" for r in range(2)]
        if not all(k in one and k in other for k in keys):
            context.reporter.record(f"{case}_as_over_sockets", "error", detail="a run is missing")
            continue
        same = all(one[k] == other[k] for k in keys)
        context.reporter.record(f"{case}_as_over_sockets", "pass" if same else "fail")


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
    _rates(context, plugin)
