"""What a guest boots: Debian's kernel and an initramfs, made once and kept in a cache folder.

The initramfs holds busybox, the modules and `init`; everything else comes from the host's root over 9p.
"""

import fcntl
import gzip
import hashlib
import json
import lzma
import os
import pathlib
import platform
import shutil
import struct
import subprocess
import tarfile
import tempfile

# What init inserts; dependencies are added. A module that the kernel has built in is left out.
MODULES = [
    "virtio_pci", "virtio_net", "dummy", "crc32_generic", "rdma_rxe", "rdma_ucm",
    "9pnet_virtio", "9p", "overlay",
]
# Newer kernels have the generic CRC32 inside crc32 itself.
OPTIONAL_MODULES = {"crc32_generic"}
# Folders of kernel/ in which those and their dependencies live: a fraction of the whole.
MODULE_FOLDERS = ("arch/x86/crypto/", "crypto/", "drivers/infiniband/", "drivers/net/",
                  "drivers/virtio/", "fs/", "lib/", "net/")
# Counts up when what is made from the same packages changes.
LAYOUT = 2
APT_SECONDS = 120
APT_OPTIONS = ["-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1",
               "-o", "Acquire::http::Timeout=20"]


class Unavailable(Exception):
    """The lab cannot run on this machine; the text says why."""


class Image:
    """Paths of a bootable kernel and initramfs."""

    def __init__(self, kernel: pathlib.Path, initramfs: pathlib.Path, version: str):
        self.kernel = kernel
        self.initramfs = initramfs
        self.version = version


def check_host() -> None:
    """Raises Unavailable where no guest can be started at all."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Unavailable(f"guests are x86-64 Linux, this is {platform.system()} on {platform.machine()}")
    if os.geteuid() != 0:
        raise Unavailable("needs root: the guest reads the whole root file system")
    for program, package in (("qemu-system-x86_64", "qemu-system-x86"), ("rdma", "iproute2"),
                             ("ibv_devinfo", "ibverbs-utils"), ("ib_write_bw", "perftest"), ("setpriv", "util-linux")):
        if shutil.which(program) is None:
            raise Unavailable(f"no {program}: install Debian's {package}")


def prepare(cache: pathlib.Path, init: pathlib.Path, download: bool) -> Image:
    """Returns the image in `cache`, made first where it is missing or out of date.

    Without `download` only what was downloaded before is used. Safe to call from several processes.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kernel = _kernel(cache, download)
        initramfs = _initramfs(cache, init, kernel)
    return Image(cache / "kernel", initramfs, kernel["package"])


def _kernel(cache: pathlib.Path, download: bool) -> dict:
    key = hashlib.sha256(repr((LAYOUT, MODULES, MODULE_FOLDERS)).encode()).hexdigest()
    description = cache / "kernel.json"
    if description.exists():
        kernel = json.loads(description.read_text(encoding="utf-8"))
        if kernel.get("key") == key:
            return kernel
    if not download:
        raise Unavailable(f"no guest kernel in {cache}: run test/rdma-lab/guest --prepare")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        kernel = _fetch_kernel(cache, pathlib.Path(folder))
    kernel["key"] = key
    # Last: it is what says that the rest is whole.
    scratch = cache / "kernel.json.new"
    scratch.write_text(json.dumps(kernel, indent=1) + "\n", encoding="utf-8")
    scratch.rename(description)
    return kernel


def _fetch_kernel(cache: pathlib.Path, folder: pathlib.Path) -> dict:
    package = _kernel_package()
    if package is None:
        _apt(["apt-get", *APT_OPTIONS, "update"], folder)
        package = _kernel_package()
    if package is None:
        raise Unavailable("apt knows no linux-image-amd64, from which the guest's kernel is taken")
    wanted = [package, "busybox-static"]
    try:
        _apt(["apt-get", *APT_OPTIONS, "download", *wanted], folder)
    except Unavailable:
        # The versioned name ages out: an old list names a package that is gone.
        _apt(["apt-get", *APT_OPTIONS, "update"], folder)
        wanted[0] = package = _kernel_package() or package
        _apt(["apt-get", *APT_OPTIONS, "download", *wanted], folder)

    modules: dict[str, bytes] = {}
    builtin: set[str] = set()
    vmlinuz = None
    for path, read in _files_of(next(folder.glob(package + "_*.deb"))):
        if path.startswith("boot/vmlinuz-"):
            vmlinuz = _unpacked(read())
        elif path.endswith("/modules.builtin"):
            builtin = {_module_name(line) for line in read().decode().split()}
        elif "/kernel/" in path and path.split("/kernel/", 1)[1].startswith(MODULE_FOLDERS):
            if path.endswith(".ko"):
                modules[_module_name(path)] = read()
            elif path.endswith(".ko.xz"):
                modules[_module_name(path)] = lzma.decompress(read())
    busybox = None
    for path, read in _files_of(next(folder.glob("busybox-static_*.deb"))):
        if path in ("bin/busybox", "usr/bin/busybox"):
            busybox = read()
    if vmlinuz is None or busybox is None:
        raise Unavailable(f"{package} or busybox-static does not hold what it did: no kernel or busybox")

    order: list[str] = []
    for name in MODULES:
        if name in modules or name in builtin or name not in OPTIONAL_MODULES:
            _add_with_dependencies(name, modules, builtin, order)
    shutil.rmtree(cache / "modules", ignore_errors=True)
    (cache / "modules").mkdir()
    for name in order:
        (cache / "modules" / (name + ".ko")).write_bytes(modules[name])
    (cache / "kernel").write_bytes(vmlinuz)
    (cache / "busybox").write_bytes(busybox)
    return {"package": package, "modules": order}


def _kernel_package() -> str | None:
    """The versioned package that linux-image-amd64 stands for now."""
    if shutil.which("apt-cache") is None:
        raise Unavailable("no apt-cache here: the guest's kernel is a Debian package")
    listing = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], capture_output=True,
                             text=True, check=False).stdout
    for line in listing.splitlines():
        words = line.split()
        if words[:1] == ["Depends:"] and words[1].startswith("linux-image-"):
            return words[1]
    return None


def _apt(command: list[str], folder: pathlib.Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=APT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"no answer in {APT_SECONDS} s: {' '.join(_plain(command))}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{' '.join(_plain(command))}: {last}")


def _plain(command: list[str]) -> list[str]:
    return [word for word in command if word not in APT_OPTIONS]


def _files_of(package: pathlib.Path):
    """Yields (path, read) of each plain file of a .deb; read() is for right away only."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as unpack:
        with tarfile.open(fileobj=unpack.stdout, mode="r|") as archive:
            for member in archive:
                if member.isfile():
                    yield member.name.removeprefix("./"), lambda m=member: archive.extractfile(m).read()


def _unpacked(bzimage: bytes) -> bytes:
    """The ELF kernel inside, which QEMU starts right away: to unpack it under emulation takes seconds.

    Offsets from the kernel's Documentation/x86/boot.rst. Returns what it got where that is packed by
    something else than xz.
    """
    setup_sectors = bzimage[0x1F1] or 4
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = bzimage[start:start + length]
    if not payload.startswith(b"\xfd7zXZ\0"):
        return bzimage
    # The unpacked size follows the xz stream.
    return lzma.LZMADecompressor().decompress(payload)


def _module_name(path: str) -> str:
    return path.rsplit("/", 1)[-1].split(".ko", 1)[0].replace("-", "_")


def _add_with_dependencies(name: str, modules: dict[str, bytes], builtin: set[str],
                           order: list[str]) -> None:
    if name in order or (name in builtin and name not in modules):
        return
    if name not in modules:
        raise Unavailable(f"this kernel package has no module {name} where it is looked for")
    # .modinfo holds NUL-ended strings, among them depends=a,b.
    for field in modules[name].split(b"\0depends=")[1:2]:
        for dependency in filter(None, field.split(b"\0", 1)[0].decode().split(",")):
            _add_with_dependencies(dependency.replace("-", "_"), modules, builtin, order)
    order.append(name)


def _initramfs(cache: pathlib.Path, init: pathlib.Path, kernel: dict) -> pathlib.Path:
    script = init.read_bytes()
    key = hashlib.sha256(script + kernel["key"].encode() + kernel["package"].encode()).hexdigest()[:16]
    path = cache / f"initramfs-{key}.gz"
    if path.exists():
        return path
    for old in cache.glob("initramfs-*"):
        old.unlink()
    entries = [(folder, 0o040755, b"") for folder in ("bin", "dev", "host", "modules", "new", "overlay",
                                                     "proc", "sys")]
    entries.append(("bin/busybox", 0o100755, (cache / "busybox").read_bytes()))
    entries.append(("bin/sh", 0o120777, b"busybox"))
    entries.append(("init", 0o100755, script))
    for name in kernel["modules"]:
        entries.append((f"modules/{name}.ko", 0o100644, (cache / "modules" / f"{name}.ko").read_bytes()))
    entries.append(("modules/order", 0o100644, "".join(f"{m}\n" for m in kernel["modules"]).encode()))
    scratch = path.with_suffix(".new")
    with gzip.open(scratch, "wb", compresslevel=1) as archive:
        for number, (name, mode, content) in enumerate(entries, start=1):
            archive.write(_newc(number, name, mode, content))
        archive.write(_newc(0, "TRAILER!!!", 0, b""))
    scratch.rename(path)
    return path


def _newc(inode: int, name: str, mode: int, content: bytes) -> bytes:
    """One entry of a cpio archive, "newc" format (the kernel's buffer-format.rst)."""
    encoded = name.encode() + b"\0"
    fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    header += b"\0" * (-len(header) % 4)
    return header + content + b"\0" * (-len(content) % 4)
