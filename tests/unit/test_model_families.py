"""docs/models.md is what its file says, lists every bundled family, and a sample of them still ports as it says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("ferryman_ci_models", ROOT / "ci" / "models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.declare_torchvision()
    return module


MODELS = _loaded()
pytest.importorskip("transformers")
import ferryman.integrations.transformers  # noqa: E402, F401 - it registers itself
from ferryman.porting.model import diffusion, elsewhere  # noqa: E402
from ferryman.porting.model.families import FAMILIES  # noqa: E402
from tests.conftest import SLOW, listed  # noqa: E402

SAMPLE = (
    "llama",
    "gemma2",
    "t5",
    "bert",
    "vit",
    "mamba2",
    "phimoe",
    "qwen3_vl",
    "flux",
    "timm_convnext",
    "torchaudio_conformer",
)

# Those that take more than 10 s of CPU. All come weekly.
LONG = (
    "bloom",
    "yolos",
    "vits",
    "fastspeech2_conformer",
    "qwen2_vl",
    "dit",
    "unet2d_condition",
    "autoencoder_kl",
)
SECONDS = 10.0


@pytest.fixture(scope="module")
def models() -> Any:
    return MODELS


@pytest.fixture(scope="module")
def document(models: Any) -> Any:
    return json.loads(models.FILE.read_text(encoding="utf-8"))


def test_the_page_is_what_the_file_says(models: Any, document: Any) -> None:
    assert models.PAGE.read_text(encoding="utf-8") == models.page(document), "run: python ci/models.py render"


def test_every_bundled_family_was_measured_and_is_listed(models: Any, document: Any) -> None:
    assert set(document["families"]) == set(FAMILIES), "run: python ci/models.py measure"
    page = models.PAGE.read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"\n| {name} |" not in page] == []
    for name, row in document["families"].items():
        if row["float32"]["verdict"] != "PASS":
            assert f"\n- {name}, float32: {row['float32']['verdict']}" in page


def test_the_report_claims_what_a_pass_makes_in_either_dtype(document: Any) -> None:
    for name, row in document["families"].items():
        assert not row["float32"].get("miscounted") and not row["bfloat16"].get("miscounted"), name


def test_what_is_left_of_families_that_serve_little_no_op_computes(models: Any, document: Any) -> None:
    assert set(models.FIRST) <= set(document["families"])
    shares = [document["families"][n]["real"]["shares"] for n in models.FIRST]
    assert sum(s["flops"] for s in shares) >= 0.7 * len(shares) and sum(s["time"] for s in shares) >= 0.5 * len(shares)
    little = {n: row["real"] for n, row in document["families"].items() if row["real"]["shares"]["time"] < models.LEAST}
    assert not {n: op for n, real in little.items() for op, _ in real["unserved"] if op in models.OURS}


def test_what_serves_little_does_not_count(models: Any) -> None:
    same = {"float32": {"verdict": "PASS"}, "bfloat16": {"verdict": "PASS"}}
    assert models.counts({**same, "real": {"shares": {"time": 0.2}}})
    assert not models.counts({**same, "real": {"shares": {"time": 0.19}}})
    assert not models.counts({**same, "real": {"error": "no account"}})
    wrong = {"float32": {"verdict": "PASS"}, "bfloat16": {"verdict": "FAIL"}}
    assert not models.counts({**wrong, "real": {"shares": {"time": 0.9}}})


def _needs(name: str) -> None:
    if name in diffusion.FAMILIES:
        pytest.importorskip("diffusers")
    if name in elsewhere.FAMILIES:
        pytest.importorskip(elsewhere.FAMILIES[name].maker.split(":")[0], exc_type=(ImportError, OSError))


def _others() -> list[Any]:
    return [name for name in FAMILIES if name not in SAMPLE]


@pytest.mark.slow
@pytest.mark.parametrize("name", _others())
def test_every_other_family_ports_within_its_limits(models: Any, document: Any, name: str) -> None:
    """Served by the same ops as the page says, each as often as the account says."""
    _needs(name)
    row, known = models.parity(name, torch.float32), document["families"][name]["float32"]
    assert row["verdict"] == "PASS" == known["verdict"], row["reasons"]
    assert {*row["modules"], *row["calls"]} >= {*known["modules"], *known["calls"]} and not row["miscounted"]


_OWN = tuple(
    f"tests/unit/test_model_families.py::{name}"
    for name in ("test_every_other_family_ports_within_its_limits", "test_a_sample_ports_as_the_page_says")
)


def test_a_family_adds_at_most_10_seconds() -> None:
    """By what was measured; those that take longer are the listed ones, and no list grows unseen."""
    costs = listed(SLOW.read_text())
    ours = {name: s for name, s in costs.items() if name.startswith(_OWN)}
    assert any(name.startswith(_OWN[0]) for name in ours) and any(name.startswith(_OWN[1]) for name in ours)
    assert {name.partition("[")[2][:-1] for name, seconds in ours.items() if seconds > SECONDS} == {*LONG}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_ports_as_the_page_says(models: Any, document: Any, name: str) -> None:
    _needs(name)
    row = models.parity(name, torch.float32)
    assert row["verdict"] == "PASS" == document["families"][name]["float32"]["verdict"], row["reasons"]
    assert row["made"] == document["families"][name]["float32"]["made"] and not row["miscounted"]
