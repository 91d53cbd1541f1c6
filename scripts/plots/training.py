"""docs/training.svg: tokens per second, step and compute time of the training groups, by configuration."""

import style
from results import Missing, test_of
from style import pyplot

GROUPS = {
    "training_pp": "Pipeline, two stages (1F1B)",
    "training_fsdp": "FSDP2, two ranks",
}
NAMES = {
    "hoccl": "HOCCL",
    "nccl_default": "NCCL",
    "nccl_8_ctas": "NCCL, 8 CTAs",
    "nccl_4_ctas": "NCCL, 4 CTAs",
    "nccl_2_ctas": "NCCL, 2 CTAs",
    "nccl_1_cta": "NCCL, 1 CTA",
}
COLORS = {
    "hoccl": style.HOCCL,
    "nccl_default": style.NCCL,
    "nccl_8_ctas": style.CTAS[8],
    "nccl_4_ctas": style.CTAS[4],
    "nccl_2_ctas": style.CTAS[2],
    "nccl_1_cta": style.CTAS[1],
}


def _configurations(read, group):
    entry, machine = read.group(group)
    test = test_of(entry, "side_by_side")
    by_name = {c["name"]: c for c in test["figures"].get("configurations", [])} if test else {}
    if not by_name:
        raise Missing(f"the newest run of {group} has no configuration")
    return [(name, by_name[name]) for name in NAMES if name in by_name], entry, machine


def _tokens(axes, configurations):
    rates = [c["tokens_per_s"] / 1e3 for _, c in configurations]
    colors = [COLORS[name] for name, _ in configurations]
    axes.barh(range(len(rates)), rates, color=colors, height=0.68)
    for n, rate in enumerate(rates):
        axes.text(rate, n, f" {rate:.1f}", va="center", color=style.LABEL, fontsize=8.5)
    axes.set_xlim(0, max(rates) * 1.14)
    axes.set_xlabel("thousand tokens per second")


def _slower(configuration, key):
    """Of the rank that takes longer."""
    return max((r[key] for r in configuration["ranks"]), key=lambda v: v["median"])


def _times(axes, configurations, key):
    values = [_slower(c, key) for _, c in configurations]
    for n, (value, (name, _)) in enumerate(zip(values, configurations)):
        color = COLORS[name]
        axes.plot([value["p10"], value["p90"]], [n, n], color=color, linewidth=2, zorder=2)
        axes.plot(value["median"], n, marker="o", markersize=7, color=color, zorder=3)
        axes.annotate(
            f"{value['median']:.1f}",
            (value["median"], n),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=style.LABEL,
        )
    least, most = min(v["p10"] for v in values), max(v["p90"] for v in values)
    margin = max(0.15 * (most - least), 0.01 * most)
    axes.set_xlim(least - margin, most + margin)
    axes.set_xlabel("ms (axis does not begin at 0)")


def draw(read, path):
    found = {}
    for group in GROUPS:
        try:
            found[group] = _configurations(read, group)
        except Missing as e:
            why = e
    if not found:
        raise why
    rows = len(found)
    height = 0.75 + 2.95 * rows
    figure, grid = pyplot.subplots(
        rows, 3, figsize=(11.5, height), squeeze=False, gridspec_kw={"width_ratios": [1.15, 1, 1]}
    )
    figure.subplots_adjust(
        left=0.105, right=0.975, top=1 - 0.5 / height, bottom=0.95 / height, wspace=0.09, hspace=0.5
    )
    notes = []
    for (tokens, compute, step), (group, (configurations, entry, machine)) in zip(
        grid, found.items()
    ):
        _tokens(tokens, configurations)
        _times(compute, configurations, "compute_ms")
        _times(step, configurations, "step_ms")
        tokens.set_title(GROUPS[group])
        compute.set_title("Kernels, forward and backward", fontweight="normal")
        step.set_title("A step", fontweight="normal")
        for axes in (tokens, compute, step):
            axes.set_ylim(len(configurations) - 0.4, -0.85)
            axes.grid(axis="x")
            axes.set_yticks([])
        tokens.set_yticks(range(len(configurations)))
        tokens.set_yticklabels([NAMES[name] for name, _ in configurations])
        tokens.tick_params(axis="y", length=0)
        notes.append(f"{group} {entry['date'][:10]}, commit {entry['commit'][:7]}")
    figure.text(
        0.02,
        0.012,
        f"Two {machine['gpu']}, one node; GPT of 1.35 billion parameters, bf16, deterministic, 32,768 tokens a "
        "step. Medians of 40 steps, lines from the 10th to the 90th percentile;\nof the two ranks the slower "
        f"one. {'; '.join(notes)}.",
        fontsize=7.5,
        color="#666666",
        va="bottom",
    )
    style.write(figure, path)
