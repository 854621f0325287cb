"""The wheel alone, beside torch: base dependencies are complete, and no verb needs more than it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def needed(names: list[str]) -> set[str]:
    """The distributions that these need, themselves included; none of an extra's."""
    markers, distributions, waiting = pytest.importorskip("packaging.requirements"), set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name in distributions:
            continue
        distributions.add(name)
        for line in metadata.requires(name) or ():
            one = markers.Requirement(line)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                waiting.append(re.sub(r"[-_.]+", "-", one.name).lower())
    return distributions


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of the wheel, what its metadata requires, and torch: links to the packages that are here."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (information,) = site.glob("*.dist-info")
    required = [line for line in metadata.Distribution.at(information).requires or () if "extra ==" not in line]
    base = [re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", line)[0]).lower() for line in required]
    for name in needed([*base, "torch"]):
        for file in metadata.distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__", "bin") and not (site / top).exists():
                (site / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    assert not (site / "numpy").exists() and not (site / "transformers").exists()
    return site


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`ferryman` with that folder alone on the path: without the environment's own site-packages."""
    start = f"import sys; sys.path.insert(0, {str(site)!r}); from ferryman.cli.main import main; main()"
    given = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FERRYMAN_"))}
    command = [sys.executable, "-I", "-S", "-c", start, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=site.parent, env=given, timeout=200)


VERBS = [
    ("--version",),
    ("--help",),
    ("ops",),
    ("devices",),
    ("doctor",),
    ("counters", "--help"),
    ("tune", "--help"),
    ("explain", "rms_norm", "--shape", "4,8", "--device", "cpu"),
    ("ci", "--help"),
    ("check", "--op", "silu_mul", "--device", "cpu", "--dtype", "f32", "--backend", "torch"),
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_verb_starts_without_numpy_or_says_what_it_needs(place: Path, verb: tuple[str, ...]) -> None:
    done = run(place, *verb)
    advice = re.search(r"ferryman: this needs \S+, which is not installed: pip install 'ferryman\[\w+\]'", done.stderr)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.returncode == 0 or (done.returncode == 2 and advice), (done.returncode, done.stderr[-500:])
    if verb[0] in ("--version", "--help", "ops", "devices", "explain"):
        assert done.returncode == 0 and done.stdout


def test_adapters_of_other_libraries_are_said_to_be_elsewhere(place: Path) -> None:
    done = run(place, "bench", "--op", "silu_mul", "--peers", "all", "--device", "cpu")
    assert done.returncode == 2 and "benchmarks/peers of its source" in done.stderr, done.stderr[-500:]
