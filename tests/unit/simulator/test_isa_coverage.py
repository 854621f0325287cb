"""The tables against what they claim: every instruction of the simulator has a row, and LLVM's assembler knows it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from ferryman.errors import UnimplementedInstruction
from tests.unit.simulator import harness, rational

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    for path in sorted(FOLDER.glob("test_isa_*.py")):
        importlib.import_module(f"tests.unit.simulator.{path.stem}")
    return harness.TEXTS


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_every_implemented_instruction_is_tested(arch: str, texts: dict[str, list[str]]) -> None:
    """gfx950 runs by the same code what gfx942 does, so that a row for either counts; what it adds needs its own."""
    from ferryman.backends.simulator import snippet
    from ferryman.backends.simulator.program import supported

    assert snippet.LANES == harness.LANES
    covered = {
        harness.base(line) for other in ("gfx942", arch) for text in texts[other] for line in harness.instructions(text)
    }
    assert len(supported(arch)) > 500
    assert not supported(arch) - covered


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_what_is_not_implemented_is_refused_by_name(arch: str, texts: dict[str, list[str]]) -> None:
    from ferryman.backends.simulator import snippet
    from ferryman.backends.simulator.program import supported

    missing = [text for text in texts[arch] if not harness.implemented(text, arch)]
    assert len(missing) < len(texts[arch]) / 3
    for text in missing:
        with pytest.raises(UnimplementedInstruction) as caught:
            snippet.execute(text, arch=arch)
        names = {harness.base(line) for line in harness.instructions(text)} - supported(arch)
        assert any(name in str(caught.value) for name in names), (text, str(caught.value))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_assembler_knows_every_text(arch: str, texts: dict[str, list[str]], tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    lines = []
    for index, text in enumerate(texts[arch]):  # labels are the snippet's own
        lines += [line.replace(".LBB", f".L{index}_") for line in text.splitlines()]
    source = tmp_path / "all.s"
    source.write_text(".text\n" + "\n".join(lines) + "\n")
    command = [sys.executable, "-m", "ziglang", "clang", "-cc1as", "-triple", "amdgcn-amd-amdhsa", "-target-cpu", arch]
    done = subprocess.run(
        [*command, "-filetype", "obj", "-o", tmp_path / "all.o", source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:2000]


# -- the oracles' own arithmetic against NumPy and PyTorch, where those are correctly rounded


def test_rationals_agree_with_numpy() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 4000, dtype=np.uint64).astype(np.uint32)
    numbers = bits.view(np.float32)
    with np.errstate(all="ignore"):
        halves, products = numbers.astype(np.float16).view(np.uint16), (numbers[:-1] * numbers[1:]).view(np.uint32)
        sums, roots = (numbers[:-1] + numbers[1:]).view(np.uint32), np.sqrt(numbers).view(np.uint32)
    f32, f16 = rational.F32, rational.F16
    decoded = [f32.decode(int(b)) for b in bits]
    for i in range(len(bits) - 1):
        assert harness.same(f32.encode(decoded[i]), int(bits[i]), "f32")
        assert harness.same(f16.encode(decoded[i]), int(halves[i]), "f16")
        assert harness.same(f32.encode(rational.mul(decoded[i], decoded[i + 1])), int(products[i]), "f32")
        assert harness.same(f32.encode(rational.add(decoded[i], decoded[i + 1])), int(sums[i]), "f32")
        assert harness.same(f32.encode(rational.sqrt(decoded[i])), int(roots[i]), "f32")


@pytest.mark.parametrize(
    "form", [rational.FP8_FNUZ, rational.BF8_FNUZ, rational.FP8_OCP, rational.BF8_OCP], ids=lambda f: f.name
)
def test_float8_agrees_with_pytorch(form: rational.Format) -> None:
    import torch

    dtype = {
        "fp8 fnuz": torch.float8_e4m3fnuz,
        "bf8 fnuz": torch.float8_e5m2fnuz,
        "fp8 ocp": torch.float8_e4m3fn,
        "bf8 ocp": torch.float8_e5m2,
    }[form.name]
    values = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float64).tolist()
    for bits, value in enumerate(values):
        number = form.decode(bits)
        assert number.nan == (value != value)
        if not number.nan:
            assert form.encode(number) == bits
            assert value == (float("-inf" if number.negative else "inf") if number.infinite else float(number.value))
