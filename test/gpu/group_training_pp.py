"""training_pp: pipeline parallelism, two stages on two GPUs (group_training)."""

import group_training


def run(context):
    group_training.run(context, "cases_training_pp")
