"""docs/bandwidth.svg: bandwidth by size between two GPUs of one node, of send/recv and AllGather."""

import math

import style
from results import Missing, curve, rows_of
from style import pyplot

NCCL_TESTS = "2026-11-29-nccl-tests.json"
NCCL_TESTS_DATE = NCCL_TESTS[:10]
TOP_GBS = {"sendrecv": 420, "allgather": 840}

def _ctas(entry):
    for ctas in style.CTAS:
        points = curve(rows_of(entry, f"bench_nccl_{ctas}_ctas"), "nccl")
        yield f"NCCL, {ctas} CTA{'s' if ctas > 1 else ''}", points, style.CTAS[ctas], 1.4, "-"


def _sendrecv(read):
    """[(label, points, color, width, dashes)], and what they are."""
    found = read.bench("sendrecv", "oneway")
    lines = [
        ("HOCCL", curve(found.rows, "hoccl"), style.HOCCL, 2.6, "-"),
        ("NCCL", curve(found.rows, "nccl"), style.NCCL, 2.0, "-"),
        ("bare copy", curve(found.rows, "bare", path="steady"), style.BARE, 1.2, (0, (4, 2))),
    ]
    try:
        entry, _ = read.group("direct_figures")
        lines += _ctas(entry)
    except Missing:
        pass
    return lines, found


def _allgather(read):
    found = read.bench("allgather")
    lines = [
        ("HOCCL", curve(found.rows, "hoccl", in_place=True), style.HOCCL, 2.6, "-"),
        ("NCCL", curve(found.rows, "nccl", in_place=True), style.NCCL, 2.0, "-"),
    ]
    engines = curve(found.rows, "nccl-ce", in_place=True, path="copy-engine")
    if engines:
        lines.append(("NCCL, copy engines", engines, style.COPY_ENGINE, 1.8, "-"))
    try:
        others = read.rows(NCCL_TESTS)
        if not engines:
            engines = curve(others, "nccl-ce", op="allgather")
            lines.append(("NCCL, copy engines*", engines, style.COPY_ENGINE, 1.8, "-"))
        limited = curve(others, "nccl", op="allgather", ctas=8)
        lines.append(("NCCL, 8 CTAs*", limited, style.CTAS[8], 1.4, "-"))
    except Missing:
        pass
    return lines, found


def _panel(axes, title, what, lines, top):
    lines = [line for line in lines if line[1]]
    ends = [points[-1][1] for _, points, _, _, _ in lines]
    places = style.spaced(ends, top / 19)
    for n, (label, points, color, width, dashes) in enumerate(lines):
        sizes, rates = zip(*points)
        axes.plot(
            sizes,
            rates,
            color=color,
            linewidth=width,
            linestyle=dashes,
            marker="o" if dashes == "-" else None,
            markersize=width + 1.2,
            zorder=10 - n,
        )
        axes.annotate(
            f"{label}  {rates[-1]:.0f}",
            (sizes[-1], ends[n]),
            xytext=(sizes[-1] * 1.5, places[n]),
            va="center",
            color=style.LABEL if color in style.CTAS.values() else color,
            fontsize=8.5,
            fontweight="bold" if label == "HOCCL" else "normal",
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 1},
        )
    smallest = min(points[0][0] for _, points, _, _, _ in lines)
    largest = max(points[-1][0] for _, points, _, _, _ in lines)
    axes.set_xscale("log", base=2)
    first, last = int(math.log2(smallest)), int(math.log2(largest))
    axes.set_xticks([2**n for n in range(first, last + 1, 2)])
    axes.set_xticklabels([style.size_name(2**n) for n in range(first, last + 1, 2)], rotation=35)
    axes.minorticks_off()
    axes.set_xlim(smallest / 1.3, largest * 1.3)
    axes.set_ylim(0, top)
    axes.set_title(title)
    axes.set_xlabel(what)
    axes.set_ylabel("GB/s (algorithm bandwidth)")
    axes.grid(axis="y")


def draw(read, path):
    panels = (
        ("send/recv, one way", "bytes sent", "sendrecv", _sendrecv(read)),
        ("AllGather, in place", "bytes a rank has afterwards", "allgather", _allgather(read)),
    )
    figure, both = pyplot.subplots(1, 2, figsize=(11.5, 4.7))
    figure.subplots_adjust(left=0.055, right=0.85, bottom=0.265, top=0.91, wspace=0.6)
    notes = []
    for axes, (title, what, operation, (lines, found)) in zip(both, panels):
        _panel(axes, title, what, lines, TOP_GBS[operation])
        commit = f", commit {found.commit[:7]}" if found.commit else ""
        notes.append(f"{title.split(',')[0]} of {found.date[:10]}{commit}")
    device = panels[0][3][1].device
    note = f"Two {device} of one node, NVLink. Figures at the lines: GB/s at the largest size. "
    note += "; ".join(notes) + "."
    if any(label.endswith("*") for *_, (lines, _) in panels for label, *_ in lines):
        note += (
            f"\n* nccl-tests on such a machine, {NCCL_TESTS_DATE}; copy engines: symmetric windows."
        )
    figure.text(0.055, 0.02, note, fontsize=7.5, color="#666666", va="bottom")
    style.write(figure, path)
