"""deaths: movers and applications killed or stopped while a second of large transfers is under way.
An error must come, named and in bounded time; a mover that was only stopped must lose nothing."""

import os
import re
import signal
import time

import common
import procs

START_S = 90
ERROR_LIMIT_S = 10
MOVER_LIMIT_S = 5
STRIKE_AFTER_S = 0.3
STOPPED_S = 1.0


class _Strike:
    """A pair in the middle of its transfers."""

    def __init__(self, context, case):
        self.context = context
        self.began = time.monotonic()
        self.pair = common.Pair(context, "cases_deaths", [case])
        self.problems = []
        try:
            self._reach_the_middle()
        except RuntimeError:
            self.pair.kill()
            raise

    def _reach_the_middle(self):
        self.pair.wait(lambda: self._all("enqueued") or self._any_ended(), START_S)
        if not self._all("enqueued"):
            raise RuntimeError(
                "the ranks did not get as far as their transfers\n"
                + self.pair.state()
                + self.pair.logs()
            )
        self.movers = [r.event("enqueued")["movers"] for r in self.pair.ranks]
        if any(len(m) != 1 for m in self.movers):
            raise RuntimeError(f"movers by rank: {self.movers}, expected one each")
        time.sleep(STRIKE_AFTER_S)
        self.pair.poll()
        if any(r.event("released") or r.event("end") for r in self.pair.ranks):
            raise RuntimeError("the transfers had ended before the strike: nothing was tested")

    def _all(self, event):
        return all(r.event(event) for r in self.pair.ranks)

    def _any_ended(self):
        return any(r.status is not None for r in self.pair.ranks)

    def error_of(self, number, struck):
        """Seconds from the strike to rank `number`'s error, checked; a note for the figures."""
        rank = self.pair.ranks[number]
        self.pair.wait(
            lambda: rank.event("error") or rank.status is not None,
            struck + ERROR_LIMIT_S - time.monotonic(),
        )
        seen = rank.event("error")
        if seen:
            return {
                f"rank{number}_error_after_s": round(seen["t"] - struck, 2),
                f"rank{number}_error": seen["text"][:300],
            }
        if rank.status is None:
            self.problems.append(f"rank {number} had no error {ERROR_LIMIT_S} s after the strike")
            self.problems.append(self.pair.state())
        elif rank.status == 0 or rank.event("no error"):
            self.problems.append(f"rank {number} ended without an error: {rank.how_it_ended()}")
        else:
            return {
                f"rank{number}_error_after_s": round(rank.ended_at - struck, 2),
                f"rank{number}_error": rank.how_it_ended(),
            }
        return {}

    def says(self, number, pattern, what):
        if not common.lines_matching(self.pair.ranks[number].output, pattern):
            self.problems.append(f"rank {number}'s output does not name {what}")

    def finish(self, test, figures):
        self.pair.kill()
        detail = "\n".join(self.problems)
        if self.problems:
            detail += "\n" + self.pair.logs(25)
        self.context.reporter.record(
            test,
            "fail" if self.problems else "pass",
            time.monotonic() - self.began,
            detail,
            figures,
        )


def _kill_mover(context, test):
    s = _Strike(context, "until_error")
    struck = time.monotonic()
    os.kill(s.movers[1][0], signal.SIGKILL)
    figures = {**s.error_of(1, struck), **s.error_of(0, struck)}
    s.says(1, re.compile("mover", re.I), "its mover")
    s.says(0, re.compile("(rank|peer) ?1", re.I), "the rank that failed")
    s.finish(test, figures)


def _kill_application(context, test):
    s = _Strike(context, "until_error")
    mover = s.movers[1][0]
    born = procs.start_time(mover)
    struck = time.monotonic()
    os.kill(s.pair.ranks[1].pid, signal.SIGKILL)
    gone = procs.wait_until(
        lambda: not procs.alive(mover) or procs.start_time(mover) != born, MOVER_LIMIT_S
    )
    figures = {"mover_gone_after_s": round(time.monotonic() - struck, 3)}
    if not gone:
        s.problems.append(
            f"mover {mover} was alive {MOVER_LIMIT_S} s after its application died: "
            f"{procs.describe(mover)}"
        )
    figures.update(s.error_of(0, struck))
    s.says(0, re.compile("(rank|peer) ?1", re.I), "the rank that died")
    s.finish(test, figures)
    if not gone:
        procs.kill_tree(mover)


def _stop_mover(context, test):
    s = _Strike(context, "to_end")
    mover = s.movers[1][0]
    os.kill(mover, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    s.pair.poll()
    early = any(r.event("end") for r in s.pair.ranks)
    os.kill(mover, signal.SIGCONT)
    figures = {"stopped_s": STOPPED_S}
    if early:
        s.problems.append("the transfers ended while the mover was stopped")
    if not s.pair.wait_exit(30):
        s.problems.append("not done 30 s after the mover went on\n" + s.pair.state())
    for number, rank in enumerate(s.pair.ranks):
        end = rank.event("end")
        if not end or end["outcome"] != "pass" or rank.status != 0:
            s.problems.append(
                f"rank {number}: {rank.how_it_ended()} {end['detail'] if end else ''}"
            )
        elif end:
            figures.update(end["figures"])
    s.finish(test, figures)


def run(context):
    for test, function in (
        ("mover_killed", _kill_mover),
        ("application_killed", _kill_application),
        ("mover_stopped_for_1s", _stop_mover),
    ):
        try:
            function(context, test)
        except RuntimeError as e:
            context.reporter.record(test, "error", detail=str(e))
