"""What the suite ran on: GPU, driver, versions, commit. Python standard library only."""

import json
import os
import platform
import subprocess
import sys

_PROBE = """
import ctypes, json
out = {"gpus": 0, "why": ""}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    code = cuda.cuInit(0)
    n, v = ctypes.c_int(0), ctypes.c_int(0)
    if code == 0: code = cuda.cuDeviceGetCount(ctypes.byref(n))
    cuda.cuDriverGetVersion(ctypes.byref(v))
    out["gpus"] = n.value if code == 0 else 0
    out["driver_cuda"] = f"{v.value // 1000}.{v.value % 1000 // 10}"
    out["why"] = f"cuInit says error {code}" if code else "" if n.value else "libcuda sees no GPU"
except OSError as e:
    out["why"] = f"no libcuda.so.1 ({e})"
print(json.dumps(out))
"""
_TORCH = """
import json, torch
v = torch.cuda.nccl.version()
print(json.dumps({"torch": torch.__version__, "torch_cuda": torch.version.cuda,
                  "nccl": ".".join(map(str, v)), "sees_gpu": torch.cuda.is_available()}))
"""


def _output(command, limit_s=20, **kw):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, **kw)
        return done.stdout.strip() if done.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        return ""


def gpus():
    """(number of usable GPUs, why there is none, what the driver says of itself). Asked in a
    process of its own: a broken driver can hang."""
    text = _output([sys.executable, "-c", _PROBE], 60)
    found = json.loads(text) if text else {"gpus": 0, "why": "libcuda did not answer within 60 s"}
    return found["gpus"], found["why"], found


def start_torch_probe():
    """Importing torch takes seconds: started early, collected by torch_versions."""
    return subprocess.Popen(
        [sys.executable, "-c", _TORCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def torch_versions(probe, limit_s=120):
    """Versions, or {"error": …}."""
    try:
        out, err = probe.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        probe.kill()
        probe.communicate()
        return {"error": f"importing torch took over {limit_s} s"}
    if probe.returncode != 0:
        return {"error": err.strip().splitlines()[-1] if err.strip() else "torch did not import"}
    return json.loads(out.strip().splitlines()[-1])


def commit(root):
    """The commit of the sources, with "+changes" where files differ from it."""
    head = _output(["git", "-C", root, "rev-parse", "HEAD"])
    if not head:
        return "unknown"
    changed = _output(["git", "-C", root, "status", "--porcelain", "--untracked-files=no"])
    return head + ("+changes" if changed else "")


def describe(driver_facts, torch_facts):
    query = _output(
        [
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version",
            "--format=csv,noheader,nounits",
        ]
    )
    names, memory, driver = [], [], ""
    for line in query.splitlines():
        fields = [f.strip() for f in line.split(",")]
        names.append(fields[0])
        memory.append(fields[1])
        driver = fields[2]
    nvcc = _output(["nvcc", "--version"]) or _output(["/usr/local/cuda/bin/nvcc", "--version"])
    release = next(
        (
            word.rstrip(",")
            for line in nvcc.splitlines()
            if "release" in line
            for word in line.split("release")[1].split()[:1]
        ),
        "",
    )
    return {
        "gpu": names[0] if names else "unknown",
        "gpus": driver_facts["gpus"],
        "memory_mib": int(memory[0]) if memory and memory[0].isdigit() else None,
        "driver": driver,
        "driver_cuda": driver_facts.get("driver_cuda", ""),
        "nvcc": release,
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "glibc": platform.libc_ver()[1],
        "torch": torch_facts.get("torch", ""),
        "torch_cuda": torch_facts.get("torch_cuda", ""),
        "nccl": torch_facts.get("nccl", ""),
    }
