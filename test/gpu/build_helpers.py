"""Builds the suite's CUDA helper libraries and programs with nvcc into one folder."""

import glob
import importlib.util
import os
import shutil
import subprocess
import sysconfig

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT_S = 180
LIBRARIES = {
    "hog": "hog.cu",
    "hazards": "hazards.cu",
    "gate": "gate.cu",
    "litmus": "litmus.cu",
    "memory_kinds": "memory_kinds.cu",
    "kernel_trace": "kernel_trace.cpp",
}


PROGRAMS = {"static_runtime": "static_runtime.cu"}


def nccl_wheel():
    """(folder of nccl.h, path of libnccl.so.2) of the NCCL that PyTorch brings along; (None, None)."""
    wheels = importlib.util.find_spec("nvidia")
    folders = list(wheels.submodule_search_locations) if wheels else []
    header = _first([f"{folder}/nccl/include/nccl.h" for folder in folders])
    library = _first([f"{folder}/nccl/lib/libnccl.so.2" for folder in folders])
    return (os.path.dirname(header), library) if header and library else (None, None)


def _toolkit():
    """(nvcc, the toolkit's folder), or (None, None)."""
    for folder in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if folder and os.path.exists(os.path.join(folder, "bin", "nvcc")):
            return os.path.join(folder, "bin", "nvcc"), folder
    nvcc = shutil.which("nvcc")
    return (
        (nvcc, os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))) if nvcc else (None, None)
    )


def _first(patterns):
    for pattern in patterns:
        found = sorted(glob.glob(pattern))
        if found:
            return found[0]
    return None


def _cupti(toolkit):
    """(folder of cupti.h, path of libcupti.so): the toolkit's, else those of Python's wheels, which
    PyTorch brings along."""
    site = sysconfig.get_paths()["purelib"]
    header = _first(
        [
            f"{toolkit}/include/cupti.h",
            f"{toolkit}/extras/CUPTI/include/cupti.h",
            f"{toolkit}/targets/*/include/cupti.h",
            f"{site}/nvidia/*/include/cupti.h",
        ]
    )
    library = _first(
        [
            f"{toolkit}/lib64/libcupti.so.[0-9][0-9]",
            f"{toolkit}/extras/CUPTI/lib64/libcupti.so.[0-9][0-9]",
            f"{toolkit}/targets/*/lib/libcupti.so.[0-9][0-9]",
            f"{site}/nvidia/*/lib/libcupti.so.[0-9][0-9]",
        ]
    )
    return (os.path.dirname(header) if header else None), library


def _program_command(source, out, nvcc):
    include, _ = nccl_wheel()
    if not include:
        raise RuntimeError("nccl.h was not found among Python's packages (nvidia-nccl)")
    return [
        nvcc,
        "-std=c++17",
        "-O2",
        "-arch=sm_90",
        "-cudart",
        "static",
        "-I",
        include,
        os.path.join(HERE, source),
        "-o",
        out,
        "-ldl",
    ]


def _command(name, source, out, nvcc, toolkit):
    shared = [
        nvcc,
        "-std=c++17",
        "-O2",
        "-shared",
        "-Xcompiler",
        "-fPIC,-fvisibility=hidden,-Wall,-Wextra",
        os.path.join(HERE, source),
        "-o",
        out,
    ]
    if name == "kernel_trace":
        include, library = _cupti(toolkit)
        if not include or not library:
            raise RuntimeError(
                "CUPTI was not found: neither in " + toolkit + " nor among Python's "
                "packages (cupti.h: " + str(include) + ", libcupti.so: " + str(library) + ")"
            )
        # nvcc takes no versioned library by its name; and a linker that drops what nothing before
        # it needs would drop this one.
        return shared + [
            "-cudart",
            "none",
            "-I",
            include,
            "-Xlinker",
            f"--no-as-needed,{library},-rpath={os.path.dirname(library)}",
        ]
    # The shared run-time: the one PyTorch has loaded, whose frees HOCCL can see.
    return shared + ["-arch=sm_90", "-cudart", "shared", f"-L{toolkit}/lib64/stubs", "-lcuda"]


def build(folder):
    """Brings the libraries in `folder` up to date. Raises RuntimeError with the compiler's
    words."""
    nvcc, toolkit = _toolkit()
    os.makedirs(folder, exist_ok=True)
    running = []
    for name, source in {**LIBRARIES, **PROGRAMS}.items():
        out = os.path.join(folder, name if name in PROGRAMS else f"lib{name}.so")
        newest = os.path.getmtime(os.path.join(HERE, source))
        if os.path.exists(out) and os.path.getmtime(out) > newest:
            continue
        if nvcc is None:
            raise RuntimeError("nvcc was not found: set CUDA_HOME or put it on PATH")
        temporary = out + ".new"
        if name in PROGRAMS:
            command = _program_command(source, temporary, nvcc)
        else:
            command = _command(name, source, temporary, nvcc, toolkit)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        running.append((process, temporary, out, command))
    for process, temporary, out, command in running:
        try:
            text, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{text[-3000:]}")
        os.replace(temporary, out)
