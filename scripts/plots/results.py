"""Finds in a folder of results what a plot is made from: groups of gpu-check and files of `hoccl bench`."""

import collections
import glob
import json
import os


class Missing(Exception):
    """No result of that kind is there."""


Found = collections.namedtuple("Found", "rows date commit device")


class Results:
    def __init__(self, folder):
        self._folder = folder
        self._files = {}
        for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
            with open(path) as f:
                read = json.load(f)
            if isinstance(read, dict):
                self._files[os.path.basename(path)] = read

    def group(self, name):
        """The newest whole run of a group of gpu-check: (its entry, the machine)."""
        runs = [
            (entry["date"], entry, report["machine"])
            for report in self._files.values()
            for group, entry in report.get("groups", {}).items()
            if group == name and not entry["quick"]
        ]
        if not runs:
            raise Missing(f"no file in {self._folder} has a run of gpu-check's group {name}")
        _, entry, machine = max(runs, key=lambda run: run[0])
        return entry, machine

    def bench(self, operation, pattern=None):
        """The rows of an operation between two GPUs of one node that have the most sizes, of those the
        newest: of a file of `hoccl bench`, or of group direct_figures."""
        found = []
        for name, report in self._files.items():
            header = report.get("header")
            if header and header.get("program") == f"hoccl bench {operation}":
                words = header["command"].split()
                if "--same-node" in words and pattern in (None, *words):
                    found.append(
                        Found(
                            report["rows"], header["timestamp"], header["commit"], header["device"]
                        )
                    )
        try:
            entry, machine = self.group("direct_figures")
            test = "bench_" + (pattern or operation)
            rows = rows_of(entry, test) + rows_of(entry, f"{test}_2MiB")
            found.append(Found(rows, entry["date"], entry["commit"], machine["gpu"]))
        except Missing:
            pass
        found = [f for f in found if f.rows]
        if not found:
            raise Missing(f"no rows of {operation} between two GPUs in {self._folder}")
        return max(found, key=lambda f: (len({r["bytes"] for r in f.rows}), f.date))

    def rows(self, name):
        """The rows of one file by its name."""
        if name not in self._files:
            raise Missing(f"{name} is not in {self._folder}")
        return self._files[name]["rows"]


def test_of(entry, name):
    """A test of a group's entry; None where it was not run."""
    return next((t for t in entry["tests"] if t["test"] == name), None)


def rows_of(entry, name):
    test = test_of(entry, name)
    return test["figures"].get("rows", []) if test else []


def curve(rows, impl, **more):
    """[(bytes, GB/s)] of an implementation, by size."""
    return sorted(
        (r["bytes"], r["algbw_gbs"])
        for r in rows
        if r["impl"] == impl and all(r[k] == v for k, v in more.items())
    )
