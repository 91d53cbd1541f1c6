"""Runs one group of the GPU suite; scripts/gpu-check starts it, in a process tree of its own."""

import argparse
import importlib
import os
import time
import traceback

import common
import procs

MOVER_GRACE_S = 5  # a mover never outlives its application by more


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("group")
    parser.add_argument("--build", required=True)
    parser.add_argument("--gpu-dir", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--results", required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    procs.become_subreaper()
    reporter = common.Reporter(options.results, options.group)
    context = common.Context(
        common.Install(options.build),
        os.path.abspath(options.gpu_dir),
        options.work,
        reporter,
        options.quick,
    )
    try:
        importlib.import_module("group_" + options.group).run(context)
    except Exception:  # whatever stopped the group is a result
        reporter.record("group", "error", detail=traceback.format_exc())
    began = time.monotonic()
    try:
        context.close()
    finally:
        own = os.getpid()
        procs.wait_until(lambda: not procs.movers(own), MOVER_GRACE_S, 0.05)
        left = [procs.describe(p) for p in procs.descendants(own)]
        procs.kill_tree(own, itself=False)
    reporter.record(
        "no_process_is_left", "fail" if left else "pass", time.monotonic() - began, "\n".join(left)
    )


if __name__ == "__main__":
    main()
