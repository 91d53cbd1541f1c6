"""unrelated: the preloaded library in processes that are no business of HOCCL's. They do what they
did, say nothing new, and leave no process."""

import json
import os
import re
import subprocess
import sys
import time

import common
import procs

PROGRAM = os.path.join(common.HERE, "unrelated_programs.py")
LIMIT_S, CASE_LIMIT_S, GONE_S = 90, 45, 5
OURS = re.compile(r"hoccl|libnccl-tuner|ld\.so", re.I)
LOADED = [2016, 2016]  # the sum of 0..63, in each of two epochs

SHELL = """
seq 1 20000 | sort -rn | sed -n 1p
printf 'a b c' | tr ' ' '\\n' | wc -l | tr -d ' '
(exit 3) || echo failed with $?
x=$(echo nested $(echo twice)); echo "$x"
cat /dev/null | grep -c nothing || true
sleep 0.05 & wait $! && echo waited
"""
SHELL_SAYS = "20000\n2\nfailed with 3\nnested twice\n0\nwaited\n"
PYTHON_SAYS = [328350, 328350, 328350, "b"]
GPU_SAYS = [(1 << 20) + 1, *LOADED]
GLOO_SAYS = [[[3.0, 3.0, 4.0, *LOADED]] * 2, [0, 0]]


def _program(context, test, command, says, env=None):
    """Runs `command` with the library preloaded. `says`: its whole output where that is text, else
    what its last line says as JSON (gloo prints lines of its own); nothing of it may come from
    HOCCL."""
    own = os.getpid()
    before = set(procs.descendants(own))
    environment = {**common.clean_environment(), **context.install.env(), **(env or {})}
    environment["LD_PRELOAD"] = context.install.shim
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    problems, outcome = [], "fail"
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        problems.append(f"not done after {LIMIT_S} s: {procs.describe(process.pid)}")
        outcome = "timeout"
        procs.kill_tree(process.pid)
        out, errors = process.communicate()
    if process.returncode != 0:
        problems.append(f"status {process.returncode}")
    ours = [line for line in (out + errors).splitlines() if OURS.search(line)]
    if ours or (errors and isinstance(says, str)):
        problems.append(f"standard error: {errors[-2000:]}; of HOCCL's: {ours[:5]}")
    try:
        same = out == says if isinstance(says, str) else json.loads(out.splitlines()[-1]) == says
    except (ValueError, IndexError):
        same = False
    if not same:
        problems.append(f"said {out[-2000:]!r}, not {says!r}")

    def left():
        return set(procs.descendants(own)) - before - {process.pid}

    procs.wait_until(lambda: not left(), GONE_S, 0.05)
    if left():
        problems.append("left: " + "; ".join(procs.describe(p) for p in left()))
    context.reporter.record(
        test, outcome if problems else "pass", time.monotonic() - began, "\n".join(problems)
    )


def run(context):
    context.server()  # starts while the programs run
    python = [sys.executable, PROGRAM]
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    _program(context, "shell_pipelines", ["/bin/sh", "-c", SHELL], SHELL_SAYS)
    _program(context, "python_without_torch", [*python, "plain_python"], PYTHON_SAYS)
    _program(context, "data_loaders_without_group", [*python, "data_loaders"], LOADED * 2)
    _program(context, "gloo_on_cpu", [*python, "gloo", str(common.free_port())], GLOO_SAYS, no_gpu)
    _program(context, "torch_without_distributed", [*python, "torch_on_the_gpu"], GPU_SAYS)
    common.run_cases(
        context,
        "cases_unrelated",
        [
            (name, CASE_LIMIT_S)
            for name in (
                "subprocesses",
                "forked_children",
                "forked_data_loaders",
                "spawned_data_loaders",
            )
        ],
    )
