"""Starts the guests of a run, carries their output and orders, and ends them."""

import contextlib
import pathlib
import shutil
import sys
import tempfile
import time

from .image import Image
from .machine import Machine
from .options import Options
from .orders import Orders

TIME_LIMIT = 124
GUEST_FAILED = 125
KILLED = 137  # as a shell reports a process that SIGKILL ended
# A guest under emulation is ready after 3 to 6 s on two idle cores; beside two full builds after 15.
BOOT_SECONDS = 150
POLL_SECONDS = 0.03


def run(options: Options, image: Image, lab_folder: pathlib.Path) -> int:
    """Runs the command in all nodes; returns the exit status of the run (options.parser)."""
    with contextlib.ExitStack() as stack:
        # Short: paths of sockets have at most 107 characters.
        work = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hoccl-lab.")))
        (work / "common").mkdir()
        if options.keep is not None:
            stack.callback(_keep, work, options)
        machines: list[Machine] = []
        stack.callback(lambda: [machine.stop() for machine in machines])
        deadline = time.monotonic() + BOOT_SECONDS
        for node in range(options.nodes):
            if node == 1 and not machines[0].wait_for_sockets(deadline):
                return _gone(machines[0], "did not start")
            machines.append(Machine(node, options, image, work, lab_folder, pathlib.Path.cwd()))
        failure = _wait_until_ready(machines, deadline)
        if failure is not None:
            return failure
        for machine in machines:
            machine.release()
        return _follow(machines, options)


def _wait_until_ready(machines: list[Machine], deadline: float) -> int | None:
    while not all(machine.is_ready() for machine in machines):
        for machine in machines:
            if machine.qemu.poll() is not None:
                return _gone(machine, "ended before it was ready")
            if time.monotonic() > deadline and not machine.is_ready():
                return _gone(machine, f"was not ready after {BOOT_SECONDS} s, of which its QEMU had a processor for "
                                      f"{machine.processor_seconds():.1f} s (a boot takes 6)")
        time.sleep(POLL_SECONDS)
    return None


def _follow(machines: list[Machine], options: Options) -> int:
    orders = Orders(machines, options)
    output = Output(machines)
    deadline = time.monotonic() + options.timeout_s
    statuses: dict[int, int] = {}
    while len(statuses) < len(machines):
        time.sleep(POLL_SECONDS)
        orders.poll()
        for machine in machines:
            if machine.node in statuses:
                continue
            # Looked at before its status is: a guest that wrote one may end.
            ended = machine.qemu.poll() is not None
            status = machine.status()
            if status is None and machine.killed:
                _say(f"node {machine.node} was killed, as ordered")
                status = KILLED
            if status is not None:
                statuses[machine.node] = status
                orders.node_ended(machine.node)
            elif ended:
                output.carry(to_the_end=True)
                return _gone(machine, "ended under its command")
        output.carry(to_the_end=len(statuses) == len(machines))
        if time.monotonic() > deadline and len(statuses) < len(machines):
            output.carry(to_the_end=True)
            late = ", ".join(str(machine.node) for machine in machines if machine.node not in statuses)
            _say(f"time limit: no end of the command after {options.timeout_s:g} s in node {late}")
            return TIME_LIMIT
    for machine in machines:
        if not machine.killed and statuses[machine.node] != 0:
            return statuses[machine.node]
    return 0


class Output:
    """Copies the commands' output to this process's; with two nodes each line says whose it is."""

    def __init__(self, machines: list[Machine]):
        self._machines = machines
        self._parts: dict[tuple[int, str], bytes] = {}  # lines without their end yet

    def carry(self, to_the_end: bool) -> None:
        """Copies whole lines, at the end also what follows the last one."""
        for machine in self._machines:
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
                text = machine.new_output(name)
                if len(self._machines) > 1:
                    text = self._marked(machine.node, name, text, to_the_end)
                stream.buffer.write(text)
                stream.buffer.flush()

    def _marked(self, node: int, name: str, text: bytes, to_the_end: bool) -> bytes:
        *lines, part = (self._parts.get((node, name), b"") + text).split(b"\n")
        if to_the_end and part:
            lines.append(part)
            part = b""
        self._parts[node, name] = part
        return b"".join(b"[%d] %s\n" % (node, line) for line in lines)


def _keep(work: pathlib.Path, options: Options) -> None:
    for name in ["common"] + [f"node{node}" for node in range(options.nodes)]:
        if (work / name).exists():
            # A guest may have left sockets there.
            shutil.copytree(work / name, options.keep / name, dirs_exist_ok=True, ignore=_not_plain)


def _not_plain(folder: str, names: list[str]) -> list[str]:
    paths = [pathlib.Path(folder, name) for name in names]
    return [path.name for path in paths if path.is_symlink() or not (path.is_file() or path.is_dir())]


def _gone(machine: Machine, what: str) -> int:
    _say(f"node {machine.node} {what}; its last words:\n{machine.last_words()}")
    return GUEST_FAILED


def _say(text: str) -> None:
    print(f"rdma-lab: {text}", file=sys.stderr, flush=True)
