"""Starts rank processes fast: imports torch once, then forks for each rank.

Reads one JSON object a line on standard input, {"env": {...}, "module": ..., "cases": [...],
"results": path, "output": path}, forks a rank for it and answers {"pid": n}; when a rank ends it
writes {"exited": n, "status": wait status}. CUDA is not touched before the fork. LD_PRELOAD is
fixed when this server starts, so a group has one server with HOCCL and one without.
"""

import json
import os
import select
import signal
import sys

POLL_S = 0.02


def _answer(message):
    os.write(1, (json.dumps(message) + "\n").encode())


def _become_rank(job):
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.close(nothing)
    os.environ.update(job["env"])


def serve():
    """Runs until standard input ends; in a forked child returns the child's job."""
    pending = b""
    living = set()
    open_input = True
    while open_input or living:
        ready, _, _ = select.select([0] if open_input else [], [], [], POLL_S)
        if ready:
            data = os.read(0, 65536)
            open_input = bool(data)
            pending += data
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            job = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _become_rank(job)
                return job
            living.add(pid)
            _answer({"pid": pid})
        for pid in list(living):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                living.discard(pid)
                _answer({"exited": pid, "status": status})
        if not open_input:
            for pid in living:
                os.kill(pid, signal.SIGKILL)
    return None


def main():
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import rank_side  # imports torch

    _answer({"ready": os.getpid()})
    job = serve()
    if job is not None:
        # The rank leaves through a normal interpreter exit, so that exit handlers run.
        sys.exit(rank_side.run_job(job))


if __name__ == "__main__":
    main()
