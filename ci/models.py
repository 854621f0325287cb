"""Measures every bundled model family and writes docs/models.json and docs/models.md.

python ci/models.py measure [FAMILY ...]   measures those named (default: all that the file lacks), adds them to it
python ci/models.py render                 writes the page from the file
--beside FOLDER                            has libraries that the environment lacks (`pip install --no-deps --target`)

A family is ported tiny in float32 and bfloat16, forward and backward, in this process, on the CPU, and compared with
itself unported (`ferryman.porting.model.generic`). Shares are predicted for an H100 at the widths of the library's
default config, two layers (four where layers differ), bfloat16, on fake tensors. Run by hand: all families take about
a quarter of an hour.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ferryman

DOCS = Path(__file__).resolve().parent.parent / "docs"
FILE = DOCS / "models.json"
PAGE = DOCS / "models.md"
SMALL = 1 << 27  # parameters of a model that is run with data on the CPU
LIBRARIES = ("torch", "transformers", "diffusers", "timm", "torchaudio")
# What porting was measured against first, beside three models that the tests write by hand.
_FIRST = (
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3 phi3 glm4 olmo2 granite cohere2 smollm3 gpt2 gpt_oss mixtral "
    "qwen3_moe olmoe glm4_moe deepseek_v3 mamba2 falcon_h1 jamba nemotron_h qwen3_next lfm2 t5 bart marian bert "
    "modernbert whisper moonshine wav2vec2 wav2vec2-conformer parakeet_ctc seamless_m4t_v2 speecht5 vits encodec mimi "
    "dac speecht5_hifigan fastspeech2_conformer univnet csm moshi musicgen vit dinov2 siglip_vision_model "
    "clip_vision_model convnext sam llava paligemma qwen2_audio qwen2_vl qwen3_vl chameleon dit sd3 flux wan "
    "unet2d_condition autoencoder_kl timm_vit timm_convnext torchaudio_conformer"
)
FIRST = tuple(_FIRST.split())
# PyTorch's ops that one of ours computes, alone or as part of a region.
_OURS = (
    "mm addmm _grouped_mm native_layer_norm _fused_rms_norm _softmax _log_softmax silu gelu relu tanh sigmoid elu "
    "leaky_relu embedding scaled_dot_product_attention"
)
OURS = frozenset(_OURS.split())
LEAST = 0.2  # of the predicted time: what serves less is listed, and does not count as ported


def _version(library: str) -> str:
    try:
        return metadata.version(library).split("+")[0]
    except metadata.PackageNotFoundError:
        return ""


_declared: list[torch.library.Library] = []


def declare_torchvision() -> None:
    """PyPI's torchvision, which timm imports, is a build for CUDA: beside another torch its operators are declared by
    schema, and none has a kernel. Before transformers is imported, which imports torchvision, too."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        if not _declared:
            _declared.append(torch.library.Library("torchvision", "DEF"))
            for name in ("nms", "qnms"):
                _declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def parity(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """One tiny family, ported and compared: {verdict, reasons, ops by way, runs, miscounted, seconds}."""
    from ferryman.errors import PortError
    from ferryman.porting.model import bundled, generic

    begin = time.perf_counter()
    try:
        model = bundled.build(name, True, dtype)
        run = bundled.inputs_of(name, True, model)
        ferryman._integrate()  # libraries that building it loaded
        plain, _ = generic.observe(model, run, False)
    except Exception as error:  # noqa: BLE001 - the library's own code, whatever it raises is the row's text
        return {"verdict": "not built", "reasons": [_line(error)]}
    if not plain:
        return {"verdict": "not built", "reasons": ["it gives no floating tensor"]}
    quiet = None
    try:
        comparison = generic.compare(model, run, True)
        if not all(site.gradient for site in comparison.report.ported):
            quiet = generic.compare(model, run, False)
    except PortError as error:
        return {"verdict": "not ported", "reasons": [_line(error)]}
    except Exception as error:  # noqa: BLE001 - it belongs in the table, as wrong
        return {"verdict": "FAIL", "reasons": [f"raised {_line(error)}"]}
    roles = {site.role for site in comparison.report.ported if site.role}
    reasons = list(comparison.reasons)
    called = {op for op in comparison.calls if not op.endswith("_backward")}
    more: dict[str, Any] = {}
    if quiet is not None:
        reasons += [f"without gradients: {reason}" for reason in quiet.reasons]
        more = {"without_gradients": dict(quiet.calls), "only_without": sorted((roles & quiet.calls.keys()) - called)}
    inside = {op for site in comparison.report.ported if not site.role for op in (*site.ops, *site.maybe)} & called
    return {
        "verdict": "FAIL" if reasons else "PASS",
        "reasons": reasons,
        "modules": sorted(roles & called),
        "calls": sorted(inside),
        "made": dict(comparison.calls),
        "repeated": len(comparison.runs),
        "miscounted": {op: list(pair) for op, pair in comparison.miscounted.items()},
        "left": _kinds(comparison.report.unsupported),
        "seconds": round(time.perf_counter() - begin, 2),
        **more,
    }


def shares(name: str) -> dict[str, Any]:
    """Predicted shares at real widths, and what is unserved, the most time first."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    from ferryman.porting.model import bundled
    from ferryman.porting.model.account import account

    how = ""
    try:
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                model = bundled.build(name, False, torch.bfloat16)
        except DataDependentOutputException:  # its constructor reads a tensor's elements: built with data then
            model = bundled.build(name, False, torch.bfloat16)
        ferryman._integrate()
        run = bundled.inputs_of(name, False, model)
        try:
            ledger = account(model, run)
        except Exception:  # sizes that follow from what it computes: with data, where that is small enough
            if sum(p.numel() for p in model.parameters()) > SMALL:
                raise
            ledger, how = _with_data(name, run)
    except Exception as error:  # noqa: BLE001 - the library's own code on tensors without data
        return {"error": _line(error)}
    whole = ledger.ported.total().seconds or 1.0
    left = [(op, work.seconds / whole) for what, op, _, work in ledger.rows() if what == "left"]
    return {
        "shares": {k: round(v, 4) for k, v in ledger.shares().items()},
        "unserved": [[op, round(share, 4)] for op, share in left[:4]],
        **({"how": how} if how else {}),
    }


def _with_data(name: str, run: Any) -> tuple[Any, str]:
    """(account of a model with data, how); in float32 where the library's own code refuses 16 bits."""
    from ferryman.porting.model import bundled
    from ferryman.porting.model.account import account

    try:
        return account(bundled.build(name, False, torch.bfloat16), run, data=True), "with data"
    except Exception:  # noqa: BLE001 - the library's own code
        return account(bundled.build(name, False, torch.float32), run, data=True), "with data, in float32"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]


def _kinds(left: Sequence[Any]) -> list[str]:
    return sorted({f"{item.module}: {item.reason}"[:160] for item in left})[:6]


def measure(names: Sequence[str], file: Path, limit: float) -> None:
    import ferryman.integrations.transformers  # noqa: F401 - it registers itself
    from ferryman.porting.model.families import FAMILIES

    document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"families": {}}
    document["versions"] = document.get("versions", {}) | {n: v for n in LIBRARIES if (v := _version(n))}
    begin = time.perf_counter()
    for name in names or [n for n in FAMILIES if n not in document["families"]]:
        row = {"float32": parity(name, torch.float32), "bfloat16": parity(name, torch.bfloat16), "real": shares(name)}
        document["families"][name] = row
        said = row["real"].get("shares", row["real"].get("error"))
        print(name, row["float32"]["verdict"], row["bfloat16"]["verdict"], said, flush=True)
        file.write_text(packed(document), encoding="utf-8")
        if time.perf_counter() - begin > limit:
            print(f"stopped after {limit:.0f} s", flush=True)
            return


def packed(document: dict[str, Any]) -> str:
    """A document as JSON with a line for each family."""
    families = document["families"]
    lines = [f"  {json.dumps(name)}: {json.dumps(families[name], sort_keys=True)}" for name in sorted(families)]
    head = {name: value for name, value in document.items() if name != "families"}
    rest = "".join(f" {json.dumps(n)}: {json.dumps(v, sort_keys=True)},\n" for n, v in sorted(head.items()))
    return "{\n" + rest + ' "families": {\n' + ",\n".join(lines) + "\n }\n}\n"


def counts(row: dict[str, Any]) -> bool:
    """Whether a family counts as ported: parity in both dtypes, and at least `LEAST` of its predicted time served."""
    same = row["float32"]["verdict"] == row["bfloat16"]["verdict"] == "PASS"
    return same and row["real"].get("shares", {}).get("time", 0.0) >= LEAST


def page(document: dict[str, Any]) -> str:
    rows = document["families"]
    ported = [n for n, row in rows.items() if row["float32"]["verdict"] == "PASS"]
    both = [n for n in ported if rows[n]["bfloat16"]["verdict"] == "PASS"]
    counted = [n for n in rows if counts(rows[n])]
    known = [rows[n]["real"]["shares"] for n in counted]
    mean = {k: sum(s[k] for s in known) / len(known) for k in ("flops", "bytes", "time")} if known else {}
    said = ", ".join(f"{100 * v:.0f}% of {k}" for k, v in mean.items())
    first = [rows[n]["real"].get("shares", {}) for n in FIRST if n in rows]
    over = {k: sum(s.get(k, 0.0) for s in first) / max(len(first), 1) for k in ("flops", "time")}
    versions = ", ".join(f"{k} {v}" for k, v in sorted(document["versions"].items()))
    header = "| family | float32 | bfloat16 | modules | calls | FLOPs | bytes | time | unserved | runs |"
    lines = [
        "<!-- Generated by ci/models.py from docs/models.json: do not edit. -->",
        "",
        "# Model families",
        "",
        f"{len(rows)} families of transformers, diffusers, timm and torchaudio are known by name",
        "(`ferryman port NAME`).",
        f"{len(ported)} are ported within the parity limits in float32, {len(both)} of them in bfloat16 too:",
        f"forward and backward, tiny, on the CPU. {len(counted)} of those serve at least {100 * LEAST:.0f}% of their",
        f"predicted time and count as ported; the mean over these is {said}.",
        f"Over all {len(first)} that porting set out with (`FIRST` in ci/models.py) it is",
        f"{100 * over['flops']:.0f}% of flops and {100 * over['time']:.0f}% of time.",
        f"Measured with {versions}.",
        "",
        "Shares are predicted for an H100, at the widths of the library's default config, two layers or four,",
        "bfloat16, on tensors without data: nothing was timed. *Modules*: ops that stand for whole modules, with a",
        "\\* where no gradient is needed only (parity is compared in that mode, too). *Calls*: ops served inside a",
        'module\'s own forward. The third way, `torch.compile(backend="ferryman")`, is',
        "measured in [compile.md](compile.md), not here. *Unserved*: what PyTorch still does, as a share of the ported",
        "model's time. *Runs*: ported modules that a pass does not run exactly once; `PortReport.calls(runs=..)` takes",
        "how often. What is not *yes* is explained below the table.",
        "",
        header,
        "|" + " --- |" * 10,
    ]
    for name, row in sorted(rows.items()):
        in_float32, real = row["float32"], row["real"]
        share = real.get("shares", {})
        cells = [f"{100 * share[k]:.0f}%" if k in share else "-" for k in ("flops", "bytes", "time")]
        left = ", ".join(f"{op} {100 * s:.0f}%" for op, s in real.get("unserved", [])[:3])
        modules = sorted([*in_float32.get("modules", []), *(f"{op}\\*" for op in in_float32.get("only_without", []))])
        lines.append(
            f"| {name} | {_cell(in_float32)} | {_cell(row['bfloat16'])} | {', '.join(modules) or '-'} | "
            f"{', '.join(in_float32.get('calls', [])) or '-'} | {' | '.join(cells)} | {left or '-'} | "
            f"{in_float32.get('repeated', 0) or '-'} |"
        )
    lines += ["", f"## What serves less than {100 * LEAST:.0f}%", ""]
    for name, row in sorted(rows.items()):
        share, left = row["real"].get("shares", {}).get("time"), row["real"].get("unserved", [])
        if share is not None and share < LEAST:
            could = [op for op, _ in left if op in OURS]
            said = f"an op of ours computes {', '.join(could)}" if could else "no op of ours computes any of these"
            parts = ", ".join(f"{op} {100 * s:.0f}%" for op, s in left)
            lines.append(f"- {name}, {100 * share:.0f}% of its time served; most of the rest: {parts}; {said}")
    lines += ["", "## What is not *yes*", ""]
    for name, row in sorted(rows.items()):
        for dtype in ("float32", "bfloat16"):
            if row[dtype]["verdict"] != "PASS" and not (
                dtype == "bfloat16" and row["float32"]["verdict"] == "not built"
            ):
                reasons = "; ".join(row[dtype]["reasons"])[:300].replace("|", "\\|")
                lines.append(f"- {name}, {dtype}: {row[dtype]['verdict']}: {reasons}")
        if "error" in row["real"] and row["float32"]["verdict"] != "not built":
            lines.append(f"- {name}, shares: not computed: {row['real']['error']}")
        if "how" in row["real"]:
            lines.append(f"- {name}, shares: its sizes follow from what it computes: counted {row['real']['how']}")
        for dtype in ("float32", "bfloat16"):
            for op, (expected, actual) in row[dtype].get("miscounted", {}).items():
                lines.append(
                    f"- {name}, {dtype}: `calls()` says {expected} of {op}, a pass with gradients makes {actual}"
                )
    return "\n".join(lines) + "\n"


def _cell(outcome: dict[str, Any]) -> str:
    return {"PASS": "yes", "FAIL": "**no**"}.get(outcome["verdict"], outcome["verdict"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("do", choices=("measure", "render"))
    parser.add_argument("families", nargs="*")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further family starts")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    if given.beside is not None:
        sys.path.append(str(given.beside))
    if given.do == "measure":
        declare_torchvision()
        measure(given.families, given.file, given.limit)
    else:
        PAGE.write_text(page(json.loads(given.file.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
