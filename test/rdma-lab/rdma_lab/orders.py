"""What guests ask of the runner (bin/lab): files in the folder shared with them."""

from .machine import Machine
from .options import Options


class Orders:
    """Reads and carries out the orders of all guests."""

    def __init__(self, machines: list[Machine], options: Options):
        self._machines = machines
        self._options = options
        self._met: dict[str, dict[int, list]] = {}  # name -> node -> files to reply in
        self._muted: set[tuple[int, int]] = set()  # (node, rail)
        self._ended: set[int] = set()

    def poll(self) -> None:
        """Carries out what was asked since the last call."""
        for machine in self._machines:
            for path in sorted((machine.shared / "orders").glob("*.order")):
                reply = path.with_suffix(".reply")
                words = path.read_text(encoding="utf-8").split()
                path.unlink()
                if words[:1] == ["meet"] and len(words) == 2:
                    self._meet(words[1], machine.node, reply)
                    continue
                try:
                    self._carry_out(words)
                    _answer(reply, "done")
                except (OSError, ValueError) as error:
                    _answer(reply, str(error))

    def node_ended(self, node: int) -> None:
        """Nobody is to wait for this node any more: `meet` fails without it."""
        self._ended.add(node)
        for name in list(self._met):
            self._settle(name)

    def _meet(self, name: str, node: int, reply) -> None:
        waiting = self._met.setdefault(name, {})
        waiting.setdefault(node, []).append(reply)
        self._settle(name)

    def _settle(self, name: str) -> None:
        waiting = self._met[name]
        missing = set(range(self._options.nodes)) - set(waiting)
        if missing and not missing & self._ended:
            return
        answer = f"meet {name}: node {min(missing & self._ended)} has ended" if missing else "done"
        for path in [path for paths in waiting.values() for path in paths]:
            _answer(path, answer)
        del self._met[name]

    def _carry_out(self, words: list[str]) -> None:
        verb, arguments = words[0] if words else "", words[1:]
        if verb == "kill" and len(arguments) == 1:
            for node in self._nodes(arguments):
                self._machines[node].killed = True
                self._machines[node].stop()
        elif verb in ("cut", "heal") and len(arguments) == 1:
            for rail in self._rails(arguments[0]):
                for machine in self._living(range(self._options.nodes)):
                    self._mute(machine, rail, verb == "cut")
                    if verb == "heal":
                        machine.monitor("set_link", name=f"nic-rail{rail}", up=True)
        elif verb == "unplug" and len(arguments) in (1, 2):
            for rail in self._rails(arguments[0]):
                for machine in self._living(self._nodes(arguments[1:])):
                    machine.monitor("set_link", name=f"nic-rail{rail}", up=False)
        else:
            raise ValueError(f"no such order: {' '.join(words)}")

    def _mute(self, machine: Machine, rail: int, mute: bool) -> None:
        """Lets what this guest sends on the rail vanish: a redirector into the null device."""
        key = (machine.node, rail)
        if mute == (key in self._muted):
            return
        if mute:
            machine.monitor("object-add", **{
                "qom-type": "filter-redirector", "id": f"mute{rail}", "netdev": f"rail{rail}",
                "queue": "tx", "outdev": f"void{rail}"})
            self._muted.add(key)
        else:
            machine.monitor("object-del", id=f"mute{rail}")
            self._muted.remove(key)

    def _living(self, nodes) -> list[Machine]:
        return [self._machines[node] for node in nodes if not self._machines[node].killed]

    def _nodes(self, words: list[str]) -> list[int]:
        if not words:
            return list(range(self._options.nodes))
        if words[0] not in map(str, range(self._options.nodes)):
            raise ValueError(f"no node {words[0]}: this run has {self._options.nodes}")
        return [int(words[0])]

    def _rails(self, word: str) -> list[int]:
        if self._options.nodes != 2:
            raise ValueError("one guest alone has no links: use --nodes 2")
        if word == "all":
            return list(range(self._options.rails))
        if word not in map(str, range(self._options.rails)):
            raise ValueError(f"no rail {word}: this run has {self._options.rails}")
        return [int(word)]


def _answer(path, text: str) -> None:
    scratch = path.with_suffix(".answer")
    scratch.write_text(text.replace("\n", " ") + "\n", encoding="utf-8")
    scratch.rename(path)
