"""first: one send/recv of 64 MiB between two ranks on one GPU; every byte, and the path it took."""

import common


def run(context):
    common.run_cases(context, "cases_first", [("send_recv_64MiB", 40)])
