"""connections: a pending wait must not hold back the kernel or the copy that the program needs to
go on, with one hardware connection and with the default number, with every kind of wait."""

import subprocess

import common

CASES = ["copies_and_kernels_beside", "item_gates_the_send", "item_gates_one_of_two"]
MANY = "more_pending_receives_than_connections"
LIMIT_S, MANY_LIMIT_S = 15, 30
ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
WAIT = "HOCCL_WAIT"
CONFIG_LIMIT_S = 20


def _knows_wait(context):
    """Whether this build's `hoccl config` lists HOCCL_WAIT; a reason where it cannot be asked."""
    try:
        out = subprocess.run(
            [context.install.tool, "config"],
            env=common.clean_environment(),
            capture_output=True,
            text=True,
            timeout=CONFIG_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return False, f"hoccl config: {e}"
    return WAIT in out.stdout, f"hoccl config (status {out.returncode}) lists no {WAIT}"


def run(context):
    for hoccl in (False, True):
        context.server(hoccl)

    def cases(prefix, names, env, hoccl=True):
        limits = [(n, MANY_LIMIT_S if n == MANY else LIMIT_S) for n in names]
        common.run_cases(
            context,
            "cases_connections",
            limits,
            prefix=prefix + "_",
            env=env,
            hoccl=(hoccl, hoccl),
        )

    # The programs themselves are right. NCCL stops in the third: its kernel that waits has nothing
    # behind it get through the one channel.
    cases("nccl_one_connection", CASES[:2], ONE, hoccl=False)
    cases("nccl", [MANY], {}, hoccl=False)
    cases("one_connection", CASES, ONE)
    cases("default", CASES + [MANY], {})
    known, why = _knows_wait(context)
    # A memory-op or parked wait with one connection stops such a program: that is why there is
    # "auto".
    for value, env, names in (
        ("memop", {}, CASES),
        ("parked", {}, CASES),
        ("kernel", {}, CASES + [MANY]),
        ("kernel", ONE, CASES),
    ):
        prefix = f"{value}{'_one_connection' if env else ''}"
        if known:
            cases(prefix, names, {WAIT: value, **env})
        else:
            context.reporter.record(prefix, "skip", detail=f"not run, so not passed: {why}")
