"""training_fsdp: FSDP2 over two GPUs (group_training)."""

import group_training


def run(context):
    group_training.run(context, "cases_training_fsdp")
