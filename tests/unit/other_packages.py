"""Packages that add ops through an entry point, written into a folder that a child process has on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

GATHERED = {
    "definition": '''
from __future__ import annotations
import torch
from torch import Tensor
from ferryman.errors import ArgumentError
from ferryman.ops.primitive import Cost, Limits, primitive, wide

def _check(parts, index, sizes, scale, dtype):
    if sum(sizes) != sum(part.shape[0] for part in parts):
        raise ArgumentError("gathered", "sizes", sizes, "the rows of the parts")

def _like(parts, index, sizes, scale, dtype):
    return parts[0].new_empty((index.shape[0], parts[0].shape[1]), dtype=dtype or parts[0].dtype)

@primitive(
    outputs=("y",), check=_check, meta=_like,
    cost=lambda parts, index, sizes, scale, dtype: Cost(1.0, 1.0),
    limits=Limits(bound=lambda args, outputs: ({"accumulate": outputs[0].abs()},)),
    dtypes={"index": (torch.int32, torch.int64)},
)
def gathered(
    parts: list[Tensor], index: Tensor, sizes: list[int], scale: float | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Rows of the parts, one after the other, by index, times a scale. Padding of the index is below 0 and gives 0."""
    rows = torch.cat([wide(part) for part in parts])
    picked = rows[index.clamp(min=0).long()] * (1.0 if scale is None else scale)
    picked = picked.masked_fill((index < 0)[:, None], 0.0)
    wanted = dtype or parts[0].dtype
    return picked if picked.dtype == torch.float64 else picked.to(wanted)
''',
    "implementations": """
from ferryman.ops.menu import Implementation, menu
IMPLEMENTATIONS = menu("gathered_ops", Implementation(op="gathered", name="torch"))
""",
    "torch_kernels": """
import torch

def gathered(parts, index, sizes, scale, dtype, target):
    rows = torch.cat(list(parts)).float()
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    picked = rows[torch.where(index < 0, len(rows) - 1, index).long()]
    return (picked if scale is None else picked * scale).to(dtype or parts[0].dtype)
""",
    "evidence": '''
import torch
from ferryman.ops.draw import Draw, Fill
from ferryman.ops.evidence import Evidence
from ferryman.ops.primitive import Case, TensorSpec

def _places(d: Draw):
    """Places in the parts, every third of them padding."""
    total = sum(part.shape[0] for part in d.given("parts"))
    return torch.where(d.words(3) % 3 == 0, -1.0, d.integers(0, total))

def _cases():
    found = []
    for name, sizes, scale, dtype in (("two", (3, 5), None, None), ("scaled", (4, 1, 6), 0.5, None),
                                      ("into", (2, 2), 2.0, torch.float32)):
        parts = [TensorSpec((rows, 16)) for rows in sizes]
        index = TensorSpec((11,), "int32", "places")
        for tier in ("small", "standard"):
            found.append(Case(f"{name}_{tier}", {"parts": parts, "index": index, "sizes": list(sizes), "scale": scale,
                                                 "dtype": dtype}, tier))
    return found

EVIDENCE = (Evidence("gathered", _cases, fills=(Fill("places", "places in the parts, or -1", _places),)),)
''',
}  # source by module

SCALED = {
    "definition": '''
from __future__ import annotations
import torch
from torch import Tensor
from ferryman.ops.primitive import Cost, Limits, primitive, wide

EIGHT = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)

@primitive(
    outputs=("y",), check=lambda x, scale, bias: None, meta=lambda x, scale, bias: bias.new_empty(x.shape),
    cost=lambda x, scale, bias: Cost(1.0, 1.0),
    limits=Limits(bound=lambda args, outputs: ({"accumulate": wide(args[0]).abs() * wide(args[1])},)),
    dtypes={"x": EIGHT, "scale": (torch.float8_e8m0fnu,)},
)
def scaled(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """``x * scale + bias``: x (T, K) in 8 bits, scale (T, 1) powers of two, bias (K,) in the result's dtype."""
    return (wide(x) * wide(scale) + wide(bias)).to(bias.dtype)
''',
    "implementations": """
from ferryman.ops.menu import Implementation, menu
IMPLEMENTATIONS = menu("scaled_ops", Implementation(op="scaled", name="torch"))
""",
    "torch_kernels": """
import torch

def scaled(x, scale, bias, target):
    return torch.addcmul(bias.float(), x.float(), scale.float()).to(bias.dtype).contiguous()
""",
    "evidence": """
from ferryman.ops.evidence import Evidence
from ferryman.ops.primitive import Case, TensorSpec

def _cases():
    return [
        Case(f"{kind}_{tier}", {"x": TensorSpec((5, 24), f"float8_{kind}"), "bias": TensorSpec((24,)),
                                "scale": TensorSpec((5, 1), "float8_e8m0fnu")}, tier)
        for kind in ("e4m3fn", "e4m3fnuz", "e5m2") for tier in ("small", "standard")
    ]

EVIDENCE = (Evidence("scaled", _cases),)
""",
}  # source by module


def install(folder: Path, name: str, modules: Mapping[str, str], group: str = "ferryman.ops", value: str = "") -> None:
    """Write a package and what makes importlib find its entry point."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for module, source in modules.items():
        (package / f"{module}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value or name}\n")


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python command with the folder on its path."""
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    own = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=own, capture_output=True, text=True, timeout=120, check=False
    )
