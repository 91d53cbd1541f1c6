"""One guest: its QEMU, the folder shared with it, and its links."""

import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import time

from .image import Image
from .options import Options

MANAGEMENT = "mgmt"
# An oops ends the guest. The second line shortens the boot by 1 s of 6.
KERNEL_COMMAND_LINE = (
    "console=ttyS0 quiet panic=-1 oops=panic mitigations=off "
    "tsc=reliable no_timer_check cryptomgr.notests apparmor=0 audit=0 rcupdate.rcu_expedited=1")
LAST_LINES = 20
# QEMU answers on its monitor at once; one that does not is broken.
MONITOR_SECONDS = 10


class Machine:
    """A guest. `stop` ends it; it also ends with the process that started it, however that ends."""

    def __init__(self, node: int, options: Options, image: Image, work: pathlib.Path,
                 lab_folder: pathlib.Path, working_folder: pathlib.Path):
        self.node = node
        self.killed = False  # by an order: its end is no error
        self.shared = work / f"node{node}"
        self._options = options
        self._work = work
        self._monitor: socket.socket | None = None
        self._monitor_lines = None
        self._read_offsets = {"stdout": 0, "stderr": 0}
        self.shared.mkdir()
        (self.shared / "orders").mkdir()
        for name in self._read_offsets:
            (self.shared / name).touch()
        (self.shared / "inside").write_text(f"{lab_folder}/inside\n", encoding="utf-8")
        (self.shared / "command").write_text(options.command + "\n", encoding="utf-8")
        (self.shared / "environment").write_text(self._environment(lab_folder, working_folder),
                                                 encoding="utf-8")
        log = open(self.shared / "qemu.log", "wb")  # pylint: disable=consider-using-with
        with log:
            self.qemu = subprocess.Popen(self._command_line(image), stdin=subprocess.DEVNULL,
                                         stdout=log, stderr=log)

    def _environment(self, lab_folder: pathlib.Path, working_folder: pathlib.Path) -> str:
        options, node, other = self._options, self.node, 1 - self.node
        # One guest is its own peer.
        peer = other if options.nodes == 2 else node
        values = {
            "NODE": str(node),
            "NODES": str(options.nodes),
            "RAILS": str(options.rails),
            "MTU": str(options.mtu),
            "ADDRESSES": ",".join(options.address(rail, node) for rail in range(options.rails)),
            "PEER_ADDRESSES": ",".join(options.address(rail, peer) for rail in range(options.rails)),
            "ADDRESS": options.address(0, node),
            "PEER_ADDRESS": options.address(0, peer),
            "MANAGEMENT_ADDRESS": options.management_address(node) if options.nodes == 2 else "127.0.0.1",
            "PEER_MANAGEMENT_ADDRESS":
                options.management_address(peer) if options.nodes == 2 else "127.0.0.1",
            "LAB_FOLDER": str(lab_folder),
            "HOST_WORKING_FOLDER": str(working_folder),
            **options.environment,
        }
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())

    def _command_line(self, image: Image) -> list[str]:
        options = self._options
        line = [
            # Ends with this process, even if that is killed.
            "setpriv", "--pdeathsig", "KILL", "--", "qemu-system-x86_64",
            "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max",
            "-smp", str(options.cpus), "-m", str(options.memory_mib),
            "-display", "none", "-nodefaults", "-no-reboot", "-monitor", "none",
            "-serial", f"file:{self.shared}/console.log",
            "-qmp", f"unix:{self._work}/monitor{self.node},server=on,wait=off",
            "-kernel", str(image.kernel), "-initrd", str(image.initramfs),
            "-append", KERNEL_COMMAND_LINE,
            "-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
            "-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
            "-fsdev", f"local,id=shared,path={self.shared},security_model=none",
            "-device", "virtio-9p-pci,fsdev=shared,mount_tag=shared",
            "-fsdev", f"local,id=common,path={self._work}/common,security_model=none",
            "-device", "virtio-9p-pci,fsdev=common,mount_tag=common",
        ]
        if options.nodes == 2:
            for rail in range(options.rails):
                line += self._link(f"rail{rail}", f"{rail:02x}")
                # Where the packets of a cut rail go.
                line += ["-chardev", f"null,id=void{rail}"]
            line += self._link(MANAGEMENT, "ff")
        return line

    def _link(self, name: str, mac_byte: str) -> list[str]:
        """A virtio NIC whose cable, a socket, leads to the other guest."""
        server = "on" if self.node == 0 else "off"
        return ["-netdev", f"stream,id={name},server={server},addr.type=unix,addr.path={self._work}/{name}",
                "-device", f"virtio-net-pci,id=nic-{name},netdev={name},romfile=,"
                           f"mac=52:54:00:77:{mac_byte}:{self.node:02x}"]

    def wait_for_sockets(self, deadline: float) -> bool:
        """True once a second guest can connect to this one's links."""
        names = [f"rail{rail}" for rail in range(self._options.rails)] + [MANAGEMENT]
        while not all((self._work / name).exists() for name in names):
            if self.qemu.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def is_ready(self) -> bool:
        """Its devices are up and it waits for `release`."""
        return (self.shared / "ready").exists()

    def release(self) -> None:
        """Lets it start the command."""
        (self.shared / "go").touch()

    def status(self) -> int | None:
        """The command's exit status, None before it ended."""
        try:
            return int((self.shared / "status").read_text(encoding="ascii"))
        except FileNotFoundError:
            return None

    def new_output(self, stream: str) -> bytes:
        """What the command wrote to "stdout" or "stderr" since the last call."""
        with open(self.shared / stream, "rb") as file:
            file.seek(self._read_offsets[stream])
            text = file.read()
        self._read_offsets[stream] += len(text)
        return text

    def processor_seconds(self) -> float:
        """What its QEMU has used: little says that others keep the processors busy."""
        try:
            fields = pathlib.Path(f"/proc/{self.qemu.pid}/stat").read_text(encoding="utf-8").rsplit(") ", 1)[1]
        except OSError:
            return 0.0
        # utime and stime, fields 14 and 15 of proc(5).
        return sum(map(int, fields.split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def last_words(self) -> str:
        """QEMU's own messages and its console from the kernel's crash on, else the end of it."""
        lines = []
        for name in ("qemu.log", "console.log"):
            path = self.shared / name
            if not path.exists():
                continue
            text = path.read_text(encoding="utf-8", errors="replace").splitlines()
            crash = next((i for i, line in enumerate(text) if re.search("BUG: |Oops: |Kernel panic", line)),
                         len(text))
            lines += text[min(crash, max(0, len(text) - LAST_LINES)):][:LAST_LINES]
        return "\n".join(line for line in lines if line.strip()) or "(nothing on its console)"

    def monitor(self, command: str, **arguments) -> None:
        """Has QEMU do something (its QMP reference manual); OSError where it does not."""
        if self._monitor is None:
            self._monitor = socket.socket(socket.AF_UNIX)
            self._monitor.settimeout(MONITOR_SECONDS)
            self._monitor.connect(f"{self._work}/monitor{self.node}")
            self._monitor_lines = self._monitor.makefile("r", encoding="utf-8")
            self.monitor("qmp_capabilities")
        self._monitor.sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
        for line in self._monitor_lines:
            answer = json.loads(line)
            if "error" in answer:
                raise OSError(f"QEMU of node {self.node}: {command}: {answer['error']['desc']}")
            if "return" in answer:
                return
        raise OSError(f"QEMU of node {self.node} is gone: {command}")

    def stop(self) -> None:
        """Ends the guest at once, as a power cut does."""
        self.qemu.kill()
        self.qemu.wait()
        if self._monitor is not None:
            self._monitor_lines.close()
            self._monitor.close()
            self._monitor = None
