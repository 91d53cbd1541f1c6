"""direct: two ranks of one node with a GPU each. What passes between them goes by copies from GPU to
GPU: every byte of every shape of send/recv, no kernel, transfers while every SM is occupied; and
through host memory with HOCCL_P2P=0. group_direct_more has the rest."""

import os

import common
import group_p2p
import group_zerosm
import machine

LIMIT_S = 60
NODE = "gpu-check-one-node"
# The rank's own GPU comes first, so that it is device 0; or it is the only one.
BOTH_VISIBLE = ("0,1", "1,0")
ONE_VISIBLE = ("0", "1")
DIRECT = {"GPU_CHECK_PATH": "direct", "HOCCL_STRICT": "1"}
STAGED = {"GPU_CHECK_PATH": "staged", "HOCCL_STRICT": "1", "HOCCL_P2P": "0"}
HOGS = [c for c in group_zerosm.HOG_CASES if c.startswith("every_sm_")]


def two_gpus(context):
    """Whether there are two; if not, that is reported."""
    count, why, _ = machine.gpus()
    if count >= 2:
        return True
    context.reporter.record(
        "two_gpus", "skip", detail=f"needs two GPUs of one machine, {count} there {why}".rstrip()
    )
    return False


def _node(visible):
    return [{"NCCL_HOSTID": NODE, "CUDA_VISIBLE_DEVICES": v} for v in visible]


def cases(
    context, module, names, prefix, env, visible=BOTH_VISIBLE, limit_s=LIMIT_S, hoccl=(True, True)
):
    return common.run_cases(
        context,
        module,
        [(name, limit_s) for name in names],
        prefix=prefix,
        hoccl=hoccl,
        env=env,
        each=_node(visible),
    )


def _no_sm(context):
    directory = context.path("trace")
    os.makedirs(directory)
    windows = cases(
        context,
        "cases_zerosm",
        ["clean_window"],
        "",
        {
            **DIRECT,
            "GPU_CHECK_TRACE_DIR": directory,
            "CUDA_INJECTION64_PATH": os.path.join(context.gpu_dir, "libkernel_trace.so"),
        },
    )
    group_zerosm.report_window(context, windows, directory, "clean_window", "no_sm_used", {}, True)


def run(context):
    if not two_gpus(context):
        return
    cases(context, "cases_p2p", group_p2p.CASES, "p2p_", DIRECT)
    cases(context, "cases_p2p", ["sizes_int8", "burst"], "own_gpu_visible_", DIRECT, ONE_VISIBLE)
    _no_sm(context)
    cases(context, "cases_zerosm", HOGS, "hog_", DIRECT)
    cases(context, "cases_p2p", ["sizes_int8", "both_directions_at_once"], "no_p2p_", STAGED)
