"""hazards: calls that deadlock a job whose data a thread of the same process moves, made in the
receiver while a receive is pending. CUDA loads kernels lazily here, as it does by default."""

import common

CASES = [
    "cudaFree",
    "cudaFreeHost",
    "first_launch_of_a_lazily_loaded_kernel",
    "first_launch_with_more_shared_memory",
    "kernel_that_grows_the_stack",
    "torch_empty_cache",
]
LIMIT_S = 30


def run(context):
    common.run_cases(
        context,
        "cases_hazards",
        [(name, LIMIT_S) for name in CASES],
        env={"CUDA_MODULE_LOADING": "LAZY"},
    )
