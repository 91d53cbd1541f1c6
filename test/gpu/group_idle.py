"""idle: what HOCCL costs while it moves nothing, against its goals."""

import group_figures


def run(context):
    group_figures.run_idle(context)
