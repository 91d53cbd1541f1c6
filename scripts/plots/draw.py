"""scripts/plot's Python: which plots there are, and where results and plots lie."""

import argparse
import os
import sys

import bandwidth
import results
import training

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PLOTS = {"bandwidth": bandwidth.draw, "training": training.draw}


def main():
    parser = argparse.ArgumentParser(
        prog="plot", description="Draws docs/bandwidth.svg and docs/training.svg."
    )
    parser.add_argument("plots", nargs="*", metavar="PLOT", help=f"{' or '.join(PLOTS)} (both)")
    parser.add_argument(
        "--results",
        metavar="DIR",
        default=os.path.join(ROOT, "docs", "results"),
        help="JSON to read (docs/results)",
    )
    parser.add_argument(
        "--out", metavar="DIR", default=os.path.join(ROOT, "docs"), help="for the SVG files (docs)"
    )
    options = parser.parse_args()
    unknown = [name for name in options.plots if name not in PLOTS]
    if unknown:
        parser.error(f"no plot {', '.join(unknown)}: there are {', '.join(PLOTS)}")
    read = results.Results(options.results)
    status = 0
    for name in options.plots or PLOTS:
        path = os.path.join(options.out, name + ".svg")
        try:
            PLOTS[name](read, path)
            print(f"plot: {os.path.relpath(path)}")
        except results.Missing as e:
            print(f"plot: {name}.svg not drawn: {e}", file=sys.stderr)
            status = 1 if name in options.plots else status
    return status


if __name__ == "__main__":
    sys.exit(main())
