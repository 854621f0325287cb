"""Sets up the virtual environment of `make check` and `make test`: torch first, then the tested set.

    python3 ci/environment.py VENV [--reuse]

torch is never pulled in as a dependency, because its wheel selects the vendor. This script installs the tested torch
where the plain wheel is right (no accelerator, or an NVIDIA GPU in a PC or server), reuses the torch of the running
interpreter where asked to (``--reuse``, make's PYTHON=), and stops with the remedy where the plain wheel would be wrong
(AMD, Jetson). Needs the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 10)
# hip-python is bindings only, and is tested against hipRTC
EXTRAS = ("models", "diffusion", "report", "dev", "offline", "rocm7")
_CUDA_EXTRA = {"12": "cuda12", "13": "cuda13"}
# What a module of this name is called by pip; ROCm's torch brings triton under another distribution's name.
_PROBE = """
import importlib.util as u, json, sys, sysconfig
from importlib import metadata
found = {"python": list(sys.version_info[:2]), "torch": None, "triton": u.find_spec("triton") is not None}
found["cupy"] = u.find_spec("cupy") is not None
found["installed"] = sorted({d.metadata["Name"] for d in metadata.distributions()})
if u.find_spec("torch") is not None:
    import torch
    found["torch"] = torch.__version__
    found["cuda"], found["hip"] = torch.version.cuda, torch.version.hip
    found["device"] = torch.cuda.is_available()
paths = sysconfig.get_paths()
found["site"] = [p for p in dict.fromkeys([paths["purelib"], paths["platlib"], *sys.path]) if p.endswith("-packages")]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Torch:
    """The torch of an interpreter: its version, what it was built for, and whether it sees a device."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    device: bool = False


@dataclass(frozen=True)
class Plan:
    """What to do about torch: "install", "reuse" or "stop", and why (for "stop": the remedy)."""

    action: str
    why: str


def machine(root: Path = Path("/")) -> str:
    """The accelerator that the operating system shows: "jetson", "amd", "nvidia" or "none". Needs no torch."""
    if (root / "etc/nv_tegra_release").exists():
        return "jetson"
    if (root / "dev/nvidiactl").exists() or (root / "proc/driver/nvidia/version").exists():
        return "nvidia"
    if (root / "dev/kfd").exists():
        return "amd"
    return "none"


def decide(seen: str, torch: Torch | None, asked: bool) -> Plan:
    """Install or reuse torch, or stop with the exact remedy. ``asked``: the caller named the interpreter."""
    suits = {
        "amd": torch is not None and torch.hip is not None,
        "jetson": torch is not None and torch.cuda is not None and torch.device,
    }
    if seen in suits:
        if torch is not None and suits[seen]:
            return Plan("reuse", f"torch {torch.version} of this interpreter serves this {_TITLE[seen]}")
        have = "has no torch" if torch is None else f"has torch {torch.version}, which does not drive it"
        return Plan("stop", f"this is an {_TITLE[seen]}, and {sys.executable} {have}.\n{_REMEDY[seen]}")
    if asked and torch is not None:
        return Plan("reuse", f"torch {torch.version} of the interpreter that PYTHON= names")
    return Plan("install", "the tested torch, from the package index")


_TITLE = {"amd": "AMD device (/dev/kfd)", "jetson": "NVIDIA Jetson (/etc/nv_tegra_release)"}
_REMEDY = {
    "amd": "The plain torch wheel is a CUDA build. Install the ROCm build of torch for your ROCm release into a\n"
    "Python of your choice, as https://pytorch.org/get-started/locally (Compute Platform: ROCm) says, or start AMD's\n"
    "rocm/pytorch container; then run\n\n    make check PYTHON=/path/to/that/python\n",
    "jetson": "The plain torch wheel does not drive an integrated GPU. Install NVIDIA's torch wheel for your JetPack,\n"
    "as https://docs.nvidia.com/deeplearning/frameworks/install-pytorch-jetson-platform says, or start NVIDIA's\n"
    "PyTorch container; then run\n\n    make check PYTHON=/path/to/that/python\n",
}


def pins(text: str, without: Sequence[str]) -> str:
    """constraints.txt without the lines of some distributions, however their names are written."""
    left = {_canonical(name) for name in without}
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if _canonical(line.split("==")[0]) not in left)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def extras(torch: Torch, have_triton: bool, have_cupy: bool) -> tuple[str, ...]:
    """The project's extras for this torch. A Triton that torch brought stays: ours would be written over it."""
    names = list(EXTRAS)
    if not have_triton:
        names.append("triton")
    if torch.device and torch.cuda and not have_cupy and torch.cuda.split(".")[0] in _CUDA_EXTRA:
        names.append(_CUDA_EXTRA[torch.cuda.split(".")[0]])
    if torch.cuda is None and torch.hip is None and not have_cupy and sys.platform == "linux":
        names.append("cuda13")  # compiles without a driver, so its binding of NVRTC is tested
    return tuple(names)


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def run(*command: str | Path) -> None:
    say("$ " + shlex.join(map(str, command)))
    start = time.monotonic()
    done = subprocess.run([str(c) for c in command], cwd=ROOT, check=False)
    if done.returncode != 0:
        say(f"failed with exit code {done.returncode}: the command is above")
        raise SystemExit(done.returncode)
    say(f"{time.monotonic() - start:.0f} s")


def probe(python: Path | str) -> tuple[Torch | None, dict[str, object]]:
    """(the torch of an interpreter or None, everything that was asked)."""
    done = subprocess.run([str(python), "-c", _PROBE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{python} cannot be used: {done.stderr.strip()}")
    answers = json.loads(done.stdout.splitlines()[-1])
    torch = None
    if answers["torch"] is not None:
        torch = Torch(answers["torch"], answers["cuda"], answers["hip"], answers["device"])
    return torch, answers


def fingerprint() -> str:
    """Changes when the environment has to be set up again."""
    digest = hashlib.sha256()
    # of pyproject.toml only what is installed: the tools' settings follow [project]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("\n[tool.ruff")[0]
    digest.update(project.encode())
    for name in ("constraints.txt", "ci/environment.py"):
        digest.update((ROOT / name).read_bytes())
    digest.update(sys.executable.encode())
    return digest.hexdigest()


def set_up(venv: Path, asked: bool) -> None:
    torch, answers = probe(sys.executable)
    plan = decide(machine(), torch, asked)
    if plan.action == "stop":
        raise SystemExit(f"make: {plan.why}")
    say(f"Python {sys.version.split()[0]}, machine: {machine()}; {plan.action} torch: {plan.why}")
    run(sys.executable, "-m", "venv", "--clear", venv)
    python = venv / "bin" / "python"
    if plan.action == "reuse":
        # not --system-site-packages: from inside a virtual environment that would name the wrong packages
        inside = probe(python)[1]["site"]
        assert isinstance(inside, list) and isinstance(answers["site"], list)
        (Path(inside[0]) / "ferryman_reuse.pth").write_text("\n".join(answers["site"]) + "\n", encoding="utf-8")
    # Python compiles a module when it is imported; of these 13,000 files most never are.
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "-q", "--no-compile")
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if plan.action == "install":
        # by itself: on an NVIDIA machine the wheel brings its own Triton and NVRTC, which win over ours
        version = re.search(r"^torch==(\S+)", text, re.MULTILINE)
        assert version is not None, "constraints.txt pins torch"
        run(*pip, f"torch=={version[1]}")
    torch, answers = probe(python)
    if torch is None:
        raise SystemExit(f"torch cannot be imported from {python}")
    installed = answers["installed"]
    assert isinstance(installed, list)
    constraints = venv / "constraints.txt"
    constraints.write_text(pins(text, ["torch", *installed]), encoding="utf-8")  # what torch brought stays
    wanted = ",".join(extras(torch, bool(answers["triton"]), bool(answers["cupy"])))
    run(*pip, "-c", constraints, "-e", f".[{wanted}]")
    run(
        python,
        "-c",
        "import ferryman, torch; print('[setup] ferryman', ferryman.__version__, 'on torch', torch.__version__)",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("--reuse", action="store_true", help="reuse the torch of this interpreter where it has one")
    options = parser.parse_args(arguments)
    if sys.version_info[:2] < OLDEST:
        raise SystemExit(
            f"make: {sys.executable} is Python {sys.version.split()[0]}; required: 3.10 or newer (make PYTHON=..)"
        )
    if sysconfig.get_platform().startswith("win"):
        raise SystemExit("make: Windows is not supported; use WSL 2")
    venv: Path = options.venv.absolute()
    if Path(sys.prefix) == venv:
        raise SystemExit(f"make: PYTHON is {venv}'s own interpreter, which would be replaced; name another one")
    stamp = venv / "ready"
    mark = f"{fingerprint()} {options.reuse}\n"
    if not (stamp.exists() and stamp.read_text(encoding="utf-8") == mark):
        set_up(venv, options.reuse)
        stamp.write_text(mark, encoding="utf-8")
    os.utime(stamp)


if __name__ == "__main__":
    main()
