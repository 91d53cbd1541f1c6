"""Process trees from /proc: finding, measuring and ending them. Python standard library only."""

import ctypes
import os
import signal
import time

MOVER = "hoccl-mover"
_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")


def become_subreaper():
    """Orphans among this process's descendants become its children, so that none escapes."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stat(pid):
    """The fields of /proc/<pid>/stat after the name, or None when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            text = f.read().decode("utf-8", "replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def name_of(pid):
    try:
        with open(f"/proc/{pid}/comm") as f:
            return f.read().strip()
    except OSError:
        return ""


def alive(pid):
    """A zombie counts as gone: it holds no memory and no descriptor."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in ("Z", "X")


def start_time(pid):
    """With the pid, names a process beyond reuse of pids; None when it is gone."""
    fields = _stat(pid)
    return fields[19] if fields else None


def descendants(root):
    """All living descendants of `root`, parents before children."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = _stat(entry)
            if fields and fields[0] not in ("Z", "X"):
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [root]
    while queue:
        for child in children.get(queue.pop(0), []):
            found.append(child)
            queue.append(child)
    return found


def movers(root):
    """The mover processes below `root`."""
    return [pid for pid in descendants(root) if name_of(pid) == MOVER]


def kill_tree(root, itself=True):
    """SIGKILLs `root` and everything below it, and again for what was born meanwhile."""
    for _ in range(3):
        pids = descendants(root)
        if itself:
            pids.insert(0, root)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not pids:
            return
        time.sleep(0.05)


def wait_until(condition, seconds, step=0.01):
    """Polls until `condition()` is true; returns its last value."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value or time.monotonic() > end:
            return value
        time.sleep(step)


def cpu_seconds(pid):
    """(scheduler's time on a CPU, utime + stime) of all threads; the first has ns, the second 10 ms
    resolution."""
    on_cpu = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat") as f:
                on_cpu += int(f.read().split()[0])
    except OSError:
        pass
    fields = _stat(pid)
    ticks = int(fields[11]) + int(fields[12]) if fields else 0
    return on_cpu / 1e9, ticks / _TICKS


def cpu_share(pids, seconds):
    """The share of one core (0..1) each pid uses over the next `seconds`: {pid: (by schedstat, by
    utime + stime)}."""
    before = {pid: cpu_seconds(pid) for pid in pids}
    begin = time.monotonic()
    time.sleep(seconds)
    lasted = time.monotonic() - begin
    shares = {}
    for pid in pids:
        after = cpu_seconds(pid)
        shares[pid] = tuple((b - a) / lasted for a, b in zip(before[pid], after))
    return shares


def describe(pid):
    """One line on what a process is doing, for a report on a hang."""
    tasks = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{task}/wchan") as f:
                    wait = f.read().strip()
                with open(f"/proc/{pid}/task/{task}/stat") as f:
                    state = f.read().rsplit(")", 1)[1].split()[0]
                tasks.append(f"{state}:{wait or '-'}")
            except OSError:
                pass
    except OSError:
        return f"{pid} gone"
    return f"{pid} {name_of(pid)} threads {len(tasks)} [{' '.join(tasks[:12])}]"
