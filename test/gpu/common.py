"""What every group of the GPU suite shares on the parent's side: the build under test, reporting,
and pairs of ranks that run a list of cases in step. Python standard library only; torch lives in
the rank processes (rank_side.py)."""

import collections
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import procs

HERE = os.path.dirname(os.path.abspath(__file__))
WORLD = 2
START_LIMIT_S = 60  # import torch on a cold machine, CUDA context, store
EXIT_LIMIT_S = 20  # destroy_process_group and exit handlers
MAX_RESTARTS = 3
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# From good to bad; a test's outcome is the worst of its parts. "miss": measured right, short of
# goal.
OUTCOMES = ["pass", "skip", "miss", "fail", "error", "timeout"]


def worst(outcomes):
    return max(outcomes, key=OUTCOMES.index, default="pass")


class Install:
    """Where the files under test are: a build tree or an install prefix."""

    def __init__(self, root):
        root = os.path.abspath(root)
        self.root = root
        self.build_tree = os.path.isdir(os.path.join(root, "plugin-tuner"))
        lib = "plugin-tuner" if self.build_tree else self._lib_folder(root)
        self.shim = os.path.join(root, lib, "libnccl-tuner-hoccl.so")
        self.core = os.path.join(root, lib, "libhoccl.so")
        net = "plugin-net" if self.build_tree else lib
        self.net_plugin = os.path.join(root, net, "libnccl-net-hoccl.so")
        self.mover = os.path.join(root, "mover" if self.build_tree else "bin", "hoccl-mover")
        if not self.build_tree and not os.path.exists(self.mover):
            self.mover = os.path.join(root, "libexec", "hoccl-mover")
        self.tool = os.path.join(root, "tools" if self.build_tree else "bin", "hoccl")

    @staticmethod
    def _lib_folder(root):
        for name in ("lib", "lib64", "lib/x86_64-linux-gnu"):
            if os.path.exists(os.path.join(root, name, "libnccl-tuner-hoccl.so")):
                return name
        return "lib"

    def missing(self):
        return [p for p in (self.shim, self.core, self.mover) if not os.path.exists(p)]

    def env(self):
        """What a user exports, besides LD_PRELOAD. A build tree keeps the mover elsewhere than an
        installation does, so it has to be told; an installation must find it by itself."""
        return {"HOCCL_MOVER_PATH": self.mover} if self.build_tree else {}


def clean_environment():
    """The caller's environment without anything that would change what is tested."""
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("HOCCL_") and k not in ("LD_PRELOAD", "CUDA_INJECTION64_PATH")
    }
    env["PYTHONUNBUFFERED"] = "1"
    return env


def free_port():
    """A port that is free and that no outgoing connection gets before the ranks listen on it."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
        first_ephemeral = int(f.read().split()[0])
    while True:
        port = random.randrange(10000, first_ephemeral)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def tail(path, lines=40, limit=6000):
    """The last lines of a log, without a warning repeated over and over."""
    try:
        with open(path, errors="replace") as f:
            text = f.read()[-200000:]
    except OSError:
        return ""
    kept = []
    for line in text.splitlines():
        if not kept or line != kept[-1]:
            kept.append(line)
    return "\n".join(kept[-lines:])[-limit:]


def without_paths(text):
    """Results outlive the machine: where the sources and Python lay there says nothing."""
    for path, name in ((ROOT, "."), (sys.prefix, "<python>"), (sys.base_prefix, "<python>")):
        text = text.replace(path + os.sep, name + os.sep)
    return text


class Reporter:
    """One JSON line a test, written at once: what is done stays even if the group is killed."""

    def __init__(self, path, group):
        self._path, self._group = path, group
        self.outcomes = []

    def record(self, test, outcome, seconds=0.0, detail="", figures=None):
        assert outcome in OUTCOMES, outcome
        detail = without_paths(detail)
        self.outcomes.append(outcome)
        line = {
            "group": self._group,
            "test": test,
            "outcome": outcome,
            "seconds": round(seconds, 3),
            "detail": detail,
            "figures": figures or {},
        }
        with open(self._path, "a") as f:
            f.write(json.dumps(line) + "\n")
        shown = "  ".join(
            f"{k}={v}" for k, v in (figures or {}).items() if not isinstance(v, (dict, list))
        )
        print(f"{outcome:7} {self._group}/{test} {seconds:.1f}s  {shown[:240]}", flush=True)
        if outcome not in ("pass",) and detail:
            print("        " + detail[-3000:].replace("\n", "\n        "), flush=True)


class Context:
    """Handed to a group's run(): what it tests, where it may write, where it reports."""

    def __init__(self, install, gpu_dir, work, reporter, quick):
        self.install, self.gpu_dir, self.work = install, gpu_dir, work
        self.reporter, self.quick = reporter, quick
        self._servers = {}
        self._sequence = 0

    def path(self, name):
        self._sequence += 1
        return os.path.join(self.work, f"{self._sequence:03d}-{name}")

    def server(self, hoccl=True):
        """The rank server with the shim preloaded, or the one without; started on first use, which
        does not wait for it: a group that needs both asks for both at its beginning."""
        if hoccl not in self._servers:
            self._servers[hoccl] = RankServer(self, hoccl)
        return self._servers[hoccl]

    def close(self):
        for server in self._servers.values():
            server.close()

    def rank_env(self, hoccl, extra=None):
        env = {"GPU_CHECK_DIR": self.gpu_dir, "GPU_CHECK_QUICK": "1" if self.quick else "0"}
        if hoccl:
            env.update(self.install.env())
        env.update(extra or {})
        return env


class Rank:
    """A rank process as its parent sees it."""

    def __init__(self, pid, results, output):
        self.pid, self.output = pid, output
        self.status = None  # wait status once it has ended
        self.ended_at = None
        self.events = []
        self._results, self._read = results, 0

    def poll(self):
        """Reads what the rank has reported since the last call."""
        try:
            with open(self._results) as f:
                f.seek(self._read)
                text = f.read()
        except OSError:
            return
        whole = text.rfind("\n") + 1
        self._read += len(text[:whole].encode())
        self.events += [json.loads(line) for line in text[:whole].splitlines()]

    def event(self, kind, case=None):
        for e in self.events:
            if e["event"] == kind and (case is None or e.get("case") == case):
                return e
        return None

    def how_it_ended(self):
        if self.status is None:
            return "still running"
        if os.WIFSIGNALED(self.status):
            return f"killed by signal {os.WTERMSIG(self.status)}"
        return f"exit {os.WEXITSTATUS(self.status)}"

    def log(self, lines=40):
        return tail(self.output, lines)


class RankServer:
    """rank_server.py, seen from its client."""

    def __init__(self, context, hoccl):
        self.hoccl, self._context = hoccl, context
        env = clean_environment()
        if hoccl:
            env["LD_PRELOAD"] = context.install.shim
        self._errors = context.path("rank-server.log")
        with open(self._errors, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, os.path.join(HERE, "rank_server.py")],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._pending = b""
        self._ranks = {}
        self._ready = False

    def _poll(self, seconds):
        """Takes in one batch of messages; returns them."""
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            return []
        data = os.read(self._process.stdout.fileno(), 65536)
        if not data:
            raise RuntimeError("the rank server ended:\n" + tail(self._errors))
        self._pending += data
        messages = []
        while b"\n" in self._pending:
            line, self._pending = self._pending.split(b"\n", 1)
            messages.append(json.loads(line))
        for m in messages:
            if m.get("exited") in self._ranks:
                rank = self._ranks[m["exited"]]
                rank.status, rank.ended_at = m["status"], time.monotonic()
        return messages

    def _message(self, key, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for m in self._poll(0.2):
                if key in m:
                    return m
        return None

    def spawn(self, env, module, cases, name):
        if not self._ready and not self._message("ready", START_LIMIT_S):
            raise RuntimeError("the rank server did not start:\n" + tail(self._errors))
        self._ready = True
        results = self._context.path(name + ".jsonl")
        output = self._context.path(name + ".log")
        job = {"env": env, "module": module, "cases": cases, "results": results, "output": output}
        self._process.stdin.write((json.dumps(job) + "\n").encode())
        self._process.stdin.flush()
        answer = self._message("pid", 10)
        if not answer:
            raise RuntimeError("the rank server did not answer:\n" + tail(self._errors))
        rank = Rank(answer["pid"], results, output)
        self._ranks[rank.pid] = rank
        return rank

    def poll(self):
        self._poll(0)

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            procs.kill_tree(self._process.pid)
            self._process.wait(10)


class Pair:
    """Two ranks on one GPU that NCCL takes for two nodes."""

    def __init__(self, context, module, cases, hoccl=(True, True), env=None, each=({}, {})):
        port = free_port()
        self.servers = [context.server(h) for h in hoccl]
        self.ranks = []
        for r in range(WORLD):
            e = context.rank_env(hoccl[r], env)
            e.update(
                {
                    "RANK": str(r),
                    "WORLD_SIZE": str(WORLD),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "NCCL_HOSTID": f"gpu-check-node{r}",
                }
            )
            e.update(each[r])
            self.ranks.append(self.servers[r].spawn(e, module, cases, f"{module}-rank{r}"))

    def poll(self):
        for server in set(self.servers):
            server.poll()
        for rank in self.ranks:
            rank.poll()

    def wait(self, condition, seconds):
        """Polls until `condition()`; returns its last value."""

        def step():
            self.poll()
            return condition()

        return procs.wait_until(step, seconds, 0.02)

    def wait_exit(self, seconds):
        return self.wait(lambda: all(r.status is not None for r in self.ranks), seconds)

    def state(self):
        """What hangs where, for a report: Python stacks into the ranks' logs, one line a
        process."""
        lines = []
        for rank in self.ranks:
            if rank.status is None:
                try:
                    os.kill(rank.pid, signal.SIGUSR1)  # rank_side.py: faulthandler
                except ProcessLookupError:
                    pass
                lines += [procs.describe(p) for p in [rank.pid] + procs.movers(rank.pid)]
        time.sleep(0.3)
        return "\n".join(lines)

    def kill(self):
        for rank in self.ranks:
            if rank.status is None:
                procs.kill_tree(rank.pid)
        self.wait_exit(10)

    def logs(self, lines=40):
        return "\n".join(
            f"--- rank {r} ({rank.how_it_ended()})\n{rank.log(lines)}"
            for r, rank in enumerate(self.ranks)
        )


def lines_matching(path, pattern):
    try:
        with open(path, errors="replace") as f:
            return [line.rstrip("\n") for line in f if re.search(pattern, line)]
    except OSError:
        return []


Result = collections.namedtuple("Result", "outcome figures outputs")


def _merge(pair, case):
    """One result from both ranks' "end" events of a case."""
    outcomes, details, figures, seconds = [], [], {}, 0.0
    for r, rank in enumerate(pair.ranks):
        e = rank.event("end", case)
        outcomes.append(e["outcome"])
        seconds = max(seconds, e["seconds"])
        if e["detail"]:
            details.append(f"rank {r}: {e['detail']}")
        for key, value in e["figures"].items():
            figures[key if key not in figures else f"{key} (rank {r})"] = value
    return worst(outcomes), seconds, "\n".join(details), figures


def _run_until_trouble(pair, left, limits, report):
    """Takes cases off `left` as they end, until none is left or the ranks have to be started
    anew."""
    began, ready = time.monotonic(), False
    while left:
        case = left[0]
        if pair.wait(lambda: all(r.event("end", case) for r in pair.ranks), 0.1):
            outcome, seconds, detail, figures = _merge(pair, case)
            if outcome == "error":
                pair.wait_exit(5)  # a rank that raised ends by itself
            if outcome != "pass":
                detail += "\n" + pair.logs(15)
            report(case, outcome, seconds, detail, figures)
            left.pop(0)
            if outcome == "error":
                pair.kill()
                return
            began = time.monotonic()
            continue
        if not ready and all(r.event("ready") for r in pair.ranks):
            ready, began = True, time.monotonic()
        limit = limits[case] if ready else START_LIMIT_S
        why = ""
        if any(r.status is not None for r in pair.ranks):
            why = "both ranks ended" if pair.wait_exit(5) else "one rank ended, the other went on"
            pair.poll()
            if all(r.event("end", case) for r in pair.ranks):
                continue  # they ended after this case
        elif time.monotonic() - began > limit:
            why = f"not done after {limit} s"
        if why:
            lasted = time.monotonic() - began
            state = pair.state()
            pair.kill()
            report(
                case,
                "timeout" if why.startswith("not done") else "error",
                lasted,
                f"{why}\n{state}\n{pair.logs()}",
            )
            left.pop(0)
            return
    in_time = pair.wait_exit(EXIT_LIMIT_S)
    if in_time and all(r.status == 0 for r in pair.ranks):
        return
    state = "" if in_time else pair.state()
    pair.kill()
    report("teardown", "error" if in_time else "timeout", EXIT_LIMIT_S, f"{state}\n{pair.logs()}")


def run_cases(context, module, cases, prefix="", **pair_options):
    """Runs `cases`, a list of (name, limit in s), on a pair of ranks and reports each. After a case
    that raised or hung the ranks are started anew for the cases left. Returns {case: Result}."""
    limits = dict(cases)
    left = [name for name, _ in cases]
    results = {}

    def report(case, outcome, seconds, detail, figures=None):
        results[case] = Result(outcome, figures or {}, [r.output for r in pair.ranks])
        context.reporter.record(prefix + case, outcome, seconds, detail, figures)

    for _ in range(MAX_RESTARTS + 1):
        pair = Pair(context, module, left, **pair_options)
        _run_until_trouble(pair, left, limits, report)
        if not left:
            return results
    for case in left:
        report(case, "error", 0, f"not run: the ranks had failed {MAX_RESTARTS + 1} times before")
    return results
