"""What a run of the lab is asked for."""

import argparse
import dataclasses
import pathlib
import shlex


@dataclasses.dataclass(frozen=True)
class Options:
    """One run: the guests, their networks, and the command."""

    command: str  # for bash; run in every node
    nodes: int
    rails: int
    cpus: int
    memory_mib: int
    mtu: int
    timeout_s: float
    environment: dict[str, str]
    keep: pathlib.Path | None  # where the nodes' shared folders stay after the run

    def address(self, rail: int, node: int) -> str:
        """IPv4 address of a node on a rail."""
        return f"10.77.{rail}.{node + 1}"

    def management_address(self, node: int) -> str:
        """IPv4 address of a node on the network that no order cuts."""
        return f"10.78.0.{node + 1}"


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(
        prog="guest", usage="guest [option ...] --run COMMAND | -- PROGRAM [ARG ...]",
        description="Runs a command in virtual machines with soft-RoCE devices (rxe0, rxe1, ...). The host's "
        "files are there at their paths, what the command writes is lost with the guest.",
        epilog="Exit status: the command's (with two nodes the first that is not 0); 124 time limit; "
        "125 a guest ended or did not start; 77 no guest can be had on this machine. See docs/rdma-lab.md.")
    parse.add_argument("--run", metavar="COMMAND", help="a command line for bash")
    parse.add_argument("argv", nargs="*", metavar="ARG", help="or a program and its arguments, after --")
    parse.add_argument("--nodes", type=int, choices=(1, 2), default=1,
                       help="guests; the command runs in each, NODE is 0 or 1 (1)")
    parse.add_argument("--rails", type=int, choices=range(1, 5), default=1,
                       help="RDMA devices per guest (1)")
    parse.add_argument("--cpus", type=int, help="processors per guest (2, with two nodes 1)")
    parse.add_argument("--memory", type=int, default=512, metavar="MIB",
                       help="memory per guest; 2048 for sanitizer builds (512)")
    parse.add_argument("--mtu", type=int, default=9000, help="of the rails, bytes (9000)")
    parse.add_argument("--timeout", type=float, default=120, metavar="S",
                       help="for the command, from when all guests are ready (120)")
    parse.add_argument("--env", action="append", default=[], metavar="NAME=VALUE",
                       help="set in the command's environment; may be repeated")
    parse.add_argument("--keep", type=pathlib.Path, metavar="FOLDER",
                       help="keep what guests left in /mnt/lab (node0, node1; their consoles too) and /mnt/common here")
    parse.add_argument("--cache", type=pathlib.Path, metavar="FOLDER",
                       help="where kernel and initramfs are kept (build/rdma-lab)")
    parse.add_argument("--prepare", action="store_true", help="only make kernel and initramfs")
    parse.add_argument("--offline", action="store_true",
                       help="download nothing: without a kernel in the cache, end with 77")
    return parse


def parse(arguments: list[str]) -> tuple[argparse.Namespace, Options]:
    """Exits with status 2 and one line where the arguments make no sense."""
    parse_ = parser()
    given = parse_.parse_args(arguments)
    if given.argv and given.run is not None:
        parse_.error("either --run or a program after --, not both")
    command = given.run if given.run is not None else shlex.join(given.argv)
    if not command and not given.prepare:
        parse_.error("nothing to run: --run COMMAND, or a program after --")
    environment = {}
    for setting in given.env:
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            parse_.error(f"--env {setting}: not NAME=VALUE")
        environment[name] = value
    if not 576 <= given.mtu <= 9000:
        parse_.error(f"--mtu {given.mtu}: 576 to 9000 bytes")
    if given.memory < 256:
        parse_.error(f"--memory {given.memory}: a guest needs 256 MiB")
    if given.timeout <= 0:
        parse_.error(f"--timeout {given.timeout}: not more than 0 s")
    cpus = given.cpus if given.cpus is not None else (2 if given.nodes == 1 else 1)
    if not 1 <= cpus <= 16:
        parse_.error(f"--cpus {cpus}: 1 to 16")
    return given, Options(command, given.nodes, given.rails, cpus, given.memory, given.mtu, given.timeout,
                          environment, given.keep)
