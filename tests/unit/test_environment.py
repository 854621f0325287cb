"""ci/environment.py: which torch `make` installs, reuses, or refuses to guess."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("ferryman_ci_environment", ROOT / "ci" / "environment.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


environment = _load()
CPU = environment.Torch("2.13.0+cpu")
CUDA = environment.Torch("2.13.0", cuda="13.0", device=True)
BLIND = environment.Torch("2.13.0", cuda="13.0")
ROCM = environment.Torch("2.13.0+rocm7.2", hip="7.2.1", device=True)


@pytest.mark.parametrize(
    ("seen", "torch", "asked", "action"),
    [
        ("none", None, False, "install"),
        ("none", CPU, False, "install"),  # the tested set, unless another torch is asked for
        ("none", CPU, True, "reuse"),
        ("none", None, True, "install"),
        ("nvidia", None, False, "install"),
        ("nvidia", CUDA, True, "reuse"),
        ("amd", None, False, "stop"),
        ("amd", None, True, "stop"),
        ("amd", CUDA, True, "stop"),
        ("amd", ROCM, True, "reuse"),
        ("amd", ROCM, False, "reuse"),
        ("jetson", None, False, "stop"),
        ("jetson", CPU, True, "stop"),
        ("jetson", BLIND, True, "stop"),
        ("jetson", CUDA, True, "reuse"),
    ],
)
def test_decisions(seen: str, torch: Any, asked: bool, action: str) -> None:
    plan = environment.decide(seen, torch, asked)
    assert plan.action == action
    if action == "stop":
        assert "make check PYTHON=" in plan.why and "https://" in plan.why


@pytest.mark.parametrize(
    ("files", "seen"),
    [
        ((), "none"),
        (("dev/kfd",), "amd"),
        (("dev/nvidiactl",), "nvidia"),
        (("proc/driver/nvidia/version",), "nvidia"),
        (("etc/nv_tegra_release", "dev/nvidiactl"), "jetson"),
    ],
)
def test_the_machine_is_seen_without_torch(tmp_path: Path, files: tuple[str, ...], seen: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert environment.machine(tmp_path) == seen


def test_what_torch_brought_stays() -> None:
    text = "# a comment\ntriton==3.6.0\nnumpy==2.3.5 ; python_version >= '3.11'\nPyYAML==6.0.3\ntriton-extra==1\n"
    assert environment.pins(text, ["Triton", "pyyaml"]) == (
        "# a comment\nnumpy==2.3.5 ; python_version >= '3.11'\ntriton-extra==1\n"
    )
    assert environment.pins(text, []) == text


def test_extras_follow_from_torch() -> None:
    cupy = {"cuda13"} if sys.platform == "linux" else set()
    assert {"triton"} | cupy == set(environment.extras(CPU, False, False)) - set(environment.EXTRAS)
    assert set(environment.extras(CUDA, True, False)) - set(environment.EXTRAS) == {"cuda13"}
    assert set(environment.extras(CUDA, True, True)) == set(environment.EXTRAS)
    assert set(environment.extras(ROCM, True, False)) == set(environment.EXTRAS)
    assert "cuda12" in environment.extras(environment.Torch("2.11.0+cu126", cuda="12.6", device=True), True, False)


def test_every_tool_that_is_named_is_pinned_and_every_extra_exists() -> None:
    """constraints.txt pins what pyproject.toml asks for, exactly."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {environment._canonical(line.split("==")[0]) for line in lines if "==" in line and line[0] != "#"}
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    assert {*environment.EXTRAS, *environment._CUDA_EXTRA.values(), "triton", "rocm7"} <= set(extras)
    needed = [r for name, group in extras.items() if name != "cuda12" for r in group] + project["dependencies"]
    names = {environment._canonical(environment.re.split(r"[<>=! \[]", r)[0]) for r in needed}
    assert names <= pinned
    assert not {"torch"} & names, "a torch wheel selects the vendor"


def test_make_prints_what_it_would_do_and_does_nothing(tmp_path: Path) -> None:
    for target in ("check", "test"):
        done = subprocess.run(
            ["make", "-n", "-C", str(ROOT), target, f"VENV={tmp_path / 'venv'}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "ci/environment.py" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_an_interpreter_that_would_replace_itself_is_refused() -> None:
    with pytest.raises(SystemExit, match="own interpreter"):
        environment.main([environment.sys.prefix])
