"""How the plots look, and how they are written so that the same figures give the same file."""

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "hoccl",  # else the ids of elements are random
        "font.family": "DejaVu Sans",  # comes with matplotlib
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#888888",
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.labelcolor": "#333333",
        "xtick.color": "#333333",
        "ytick.color": "#333333",
        "grid.color": "#e6e6e6",
        "grid.linewidth": 0.8,
        "axes.axisbelow": True,
    }
)

from matplotlib import pyplot  # noqa: E402  after use()

HOCCL, NCCL, COPY_ENGINE, BARE = "#0b62a4", "#c4511d", "#7b4ba0", "#333333"
CTAS = {8: "#cf7a45", 4: "#dc9668", 2: "#e5ae88", 1: "#ecc4a6"}  # paler the fewer
LABEL = "#444444"


def size_name(n):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n >= unit:
            return f"{n // unit} {name}"
    return str(n)


def write(figure, path):
    """Without date and version."""
    figure.savefig(path, metadata={"Date": None, "Creator": "scripts/plot"}, facecolor="white")
    pyplot.close(figure)


def spaced(positions, gap):
    """Positions of labels that keep their order, lie at least `gap` apart and as near as that allows to
    where they belong."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    clusters = []  # (labels in order, centre)
    for i in order:
        clusters.append([[i], positions[i]])
        while len(clusters) > 1:
            (below, at_below), (above, at_above) = clusters[-2:]
            if at_above - at_below >= gap * (len(below) + len(above)) / 2:
                break
            merged = below + above
            clusters[-2:] = [[merged, sum(positions[k] for k in merged) / len(merged)]]
    placed = list(positions)
    for members, centre in clusters:
        for n, i in enumerate(members):
            placed[i] = centre + gap * (n - (len(members) - 1) / 2)
    return placed
