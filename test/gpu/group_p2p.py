"""p2p: every shape of send/recv a training job makes, compared byte by byte on the GPU."""

import common

CASES = [
    "sizes_int8",
    "sizes_bf16",
    "sizes_fp32",
    "several_streams",
    "both_directions_at_once",
    "one_f_one_b",
    "small_and_large_in_one_group",
    "two_communicators_opposite_order",
    "stream_order",
    "buffer_reuse",
    "burst",
]
LIMIT_S = 30


def run(context):
    common.run_cases(context, "cases_p2p", [(name, LIMIT_S) for name in CASES])
