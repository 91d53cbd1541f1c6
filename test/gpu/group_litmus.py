"""litmus: a kernel on the receiving stream, right behind the wait, reads the last bytes of the
payload: more than a million times, and never stale ones."""

import common


def run(context):
    common.run_cases(
        context,
        "cases_litmus",
        [("planted_early_reads_are_seen", 40), ("last_bytes_behind_the_wait", 190)],
    )
