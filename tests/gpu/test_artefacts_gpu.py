"""On a real device: a fresh process with artefacts and empty caches runs ops, and compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman.dispatch import registry
from ferryman.dispatch.select import profile_for
from ferryman.porting import aot

pytestmark = pytest.mark.gpu

# What a deployment does. Triton says what it compiles; the SIMT compilers may not be called at all.
DEPLOYMENT = """
import json, sys, warnings
import torch, triton
import ferryman
from ferryman import ops
from ferryman.backends import cuda, hip

def forbidden(*args, **more):
    raise AssertionError("a SIMT kernel would be compiled")

cuda.CudaBackend.compile = hip.HipBackend.compile = forbidden
compiled = []
triton.knobs.compilation.listener = lambda **facts: compiled.append(facts["src"].name)
torch.manual_seed(0)
x, w, g = (torch.randn(*s, dtype=torch.bfloat16, device="cuda") for s in ((8192, 4096), (4096,), (8192, 4096)))
wide = x.double()
want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w.double()
found = {}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for name in sys.argv[1:]:
        with ferryman.use(name), ferryman.strict(), ferryman.trace() as calls:
            y = ops.rms_norm(x, w)
        error = ((y.double() - want).abs() / want.abs().clamp(min=1e-3)).max().item()
        found[name] = {"ran": sorted({ran for _, ran in calls.calls}), "error": error}
    xs = x.clone().requires_grad_(True)
    with ferryman.use("triton"):
        ops.rms_norm(xs, w).backward(g)
    torch.cuda.synchronize()
print(json.dumps({"found": found, "compiled": compiled, "gradient": xs.grad.isfinite().all().item(),
                  "warnings": [str(s.message) for s in said if "artefact" in str(s.message)]}))
"""


NO_COMPILER = "/no/such/compiler"  # for what Triton builds in C


def compiled(factory: pytest.TempPathFactory, ops: list[str] | None) -> Path:
    """In bfloat16, what serves the bench's shapes."""
    serving, profiles = aot.Shapes((), ()), [profile_for(torch.device("cuda", 0))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FERRYMAN_CACHE_DIR", str(factory.mktemp("cache")))
        compilation = aot.compile_all(profiles, ops=ops, dtypes=["bfloat16"], serving=serving, jobs=os.cpu_count())
        out = factory.mktemp("artefacts")
        aot.write(compilation, out)
    assert compilation.manifest.counts()["QUARANTINED"] == 0
    assert [m.reason for m in compilation.manifest.modules if m.file is None] == []
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, ["rms_norm"])


def fresh(tmp_path: Path, *command: str, **environment: str) -> dict[str, Any]:
    """What a process with empty caches prints."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton"), "FERRYMAN_CACHE_DIR": str(tmp_path / "ours")}
    done = subprocess.run(
        [sys.executable, *command], env={**env, **environment}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def deploy(tmp_path: Path, *names: str, **environment: str) -> dict[str, Any]:
    return fresh(tmp_path, "-c", DEPLOYMENT, *names, **environment)


def test_a_fresh_process_with_artefacts_compiles_nothing(folder: Path, tmp_path: Path) -> None:
    vendor = profile_for(torch.device("cuda", 0)).vendor
    simt = "cuda" if vendor == "nvidia" else "hip"
    names = [name for name in ("triton", simt) if not registry.probe(name, vendor)]
    assert "triton" in names
    done = deploy(tmp_path, *names, FERRYMAN_ARTEFACTS=str(folder), CC=NO_COMPILER)
    assert done["compiled"] == [] and done["warnings"] == []
    assert done["gradient"]
    for name in names:
        assert {ran.partition(".")[0] for ran in done["found"][name]["ran"]} == {name}
        assert done["found"][name]["error"] < 2**-7
    assert not (tmp_path / "ours" / "simt").exists()  # nothing was compiled, so nothing was kept


@pytest.mark.timeout(900)
def test_first_calls_of_every_op_compile_nothing(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """All kernels in one dtype, on every shape of the bench, in the configurations that the lockfile names."""
    artefacts = compiled(tmp_path_factory, None)
    script = str(Path(__file__).with_name("first_calls.py"))
    done = fresh(tmp_path, script, FERRYMAN_ARTEFACTS=str(artefacts), CC=NO_COMPILER)
    assert done["failed"] == {} and done["warnings"] == [] and done["compiled"] == []
    assert not (tmp_path / "ours" / "simt").exists()
    device = profile_for(torch.device("cuda", 0))
    simt = "cuda" if device.vendor == "nvidia" else "hip"
    lines = [line for op in registry.primitives() for line in registry.implementations(op)]
    ours = {f"{line.op} {line.name}" for line in lines if line.backend in ("triton", simt)}
    assert set(done["ran"]) == ours - set(done["never"]), done["never"]
    assert {f"{op} triton" for op in registry.primitives()} & ours <= set(done["ran"])
    if device.name == "h200":
        assert done["never"] == {}


def test_without_them_the_same_process_compiles(tmp_path: Path) -> None:
    """That the listener would have told."""
    done = deploy(tmp_path, "triton")
    assert len(done["compiled"]) >= 2 and done["found"]["triton"]["error"] < 2**-7


def test_a_damaged_artefact_is_compiled_instead(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "artefacts"
    shutil.copytree(folder, copy)
    for path in (copy / "objects").glob("*.cubin" if torch.version.cuda else "*.hsaco"):
        path.write_bytes(path.read_bytes()[:-64])
    done = deploy(tmp_path, "triton", FERRYMAN_ARTEFACTS=str(copy))
    assert done["compiled"] and done["warnings"] and all("compiling instead" in text for text in done["warnings"])
    assert done["found"]["triton"]["error"] < 2**-7
