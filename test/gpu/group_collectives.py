"""collectives: PyTorch's collectives in every form, byte by byte, all on the staged path; and no
kernel, no copy inside a device in those where PyTorch itself launches nothing."""

import os

import common
import group_zerosm

CASES = [
    "all_gather_into_tensor",
    "all_gather_into_tensor_in_place",
    "all_gather_list",
    "all_to_all_single_equal",
    "all_to_all_single_skewed",
    "broadcast",
    "gather",
    "scatter",
    "coalesced_all_gathers",
    "coalesced_broadcasts",
    "functional",
    "streams_and_groups",
]
# Those with a block of the rank's own, which with HOCCL_OWN_BLOCK=kernel its stream copies.
OWN_BLOCK_CASES = [
    "all_gather_into_tensor",
    "all_to_all_single_equal",
    "all_to_all_single_skewed",
    "gather",
    "scatter",
    "streams_and_groups",
]
OWN_BLOCK_BY_KERNEL = {"HOCCL_OWN_BLOCK": "kernel"}
LIMIT_S = 60


def run(context):
    directory = context.path("trace")
    os.makedirs(directory)
    windows = common.run_cases(
        context,
        "cases_collectives",
        [("clean_window", LIMIT_S)],
        env={
            "HOCCL_STRICT": "1",
            "GPU_CHECK_TRACE_DIR": directory,
            "CUDA_INJECTION64_PATH": os.path.join(context.gpu_dir, "libkernel_trace.so"),
        },
    )
    group_zerosm.report_window(context, windows, directory, "clean_window", "no_sm_used", {})
    common.run_cases(
        context, "cases_collectives", [(name, LIMIT_S) for name in CASES], env={"HOCCL_STRICT": "1"}
    )
    common.run_cases(
        context,
        "cases_collectives",
        [(name, LIMIT_S) for name in OWN_BLOCK_CASES],
        prefix="own_block_by_kernel_",
        env={"HOCCL_STRICT": "1", **OWN_BLOCK_BY_KERNEL},
    )
