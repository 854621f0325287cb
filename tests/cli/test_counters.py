"""`ferryman counters`: one case of each kernel, executed and counted; bad use is refused before anything compiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.running import counting
from tests.cli.run import alone, ferryman

pytest.importorskip("triton")


def test_it_counts_what_kernels_do(tmp_path: Path) -> None:
    """What follows from the op: a softmax reads and writes its rows once, a product needs its matrix instructions."""
    file = tmp_path / "counters.json"
    done = alone("counters", "--op", "softmax", "--op", "linear", "--backend", "triton", "--out", str(file))
    assert done.code == 0, done.err
    assert done.out.startswith("AMD Instinct MI300X, simulated (mi300x, gfx942)")
    rows = [line.split() for line in done.out.splitlines() if line.startswith(("softmax ", "linear "))]
    assert [row[:3] for row in rows] == [
        ["softmax", "triton.rows", "_softmax"],
        ["softmax", "triton.long", "_softmax_long"],
        ["linear", "triton", "_matmul"],
    ]
    document = counting.Counted.model_validate_json(file.read_text("utf-8"))
    assert document.schema_version == 1 and document.environment.arch == "gfx942"
    softmax, long, linear = document.entries
    (launch,) = softmax.launches
    assert launch.bytes < long.launches[0].bytes  # which reads its rows twice
    assert softmax.least_bytes is not None and softmax.reason is None
    # the arguments' scalar loads come on top of the op's own bytes
    assert softmax.least_bytes <= launch.bytes <= 1.1 * softmax.least_bytes
    assert not launch.matrix and launch.lds_cycles > 0 and launch.spills == 0
    assert sum(launch.mix.values()) == launch.wave_instructions > 100 * launch.waves
    assert launch.bytes == sum(a.bytes for a in launch.accesses)
    assert all(0 < a.efficiency <= 1 for a in launch.accesses if a.bytes)
    (launch,) = linear.launches
    assert sum(launch.matrix.values()) == launch.mix["matrix"] > 0
    case = counting.largest(registry.primitive("linear"))
    (m, k), (n, _) = case.args["x"].shape, case.args["weight"].shape
    # each v_mfma_f32_16x16x16_bf16 does 16 * 16 * 16 products, tiles at the edges included
    assert sum(launch.matrix.values()) * 16**3 >= m * n * k
    assert linear.case == case.name


def test_what_cannot_run_is_an_entry_with_its_reason() -> None:
    document = counting.run(profile("mi355x"), ["rms_norm"], ["hip"], case="layout_last")
    (entry,) = document.entries
    assert not entry.launches and entry.reason is not None and "contiguous" in entry.reason
    assert document.environment.arch == "gfx950"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h200"), "counters: --device is h200 (sm_90); required: a device of gfx942 or gfx950"),
        (("--device", "mi300y"), "unknown device profile 'mi300y'; nearest: mi300x"),
        (("--backend", "cuda"), "counters: --backend is cuda; required: triton or hip"),
        (("--backend", "hipp"), "unknown backend or implementation 'hipp'; nearest: hip"),
        (("--op", "rmsnorm"), "unknown op 'rmsnorm'; nearest: rms_norm"),
        (("--op", "softmax", "--case", "vast"), "unknown case 'vast'"),
        (("--dtype", "f8"), "unknown dtype"),
    ],
)
def test_bad_use_is_one_message(arguments: tuple[str, ...], message: str) -> None:
    done = ferryman("counters", *arguments)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err and not done.out


def test_a_file_that_cannot_be_written_is_bad_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = ("--op", "rms_norm", "--backend", "hip", "--case", "layout_last")
    done = ferryman("counters", *refused, "--out", str(tmp_path / "file" / "x.json"))
    assert done.code == 2 and "choose another --out" in done.err


def test_json_is_the_document() -> None:
    done = ferryman("counters", "--op", "rms_norm", "--backend", "hip", "--case", "layout_last", "--json")
    assert done.code == 0
    assert counting.Counted.model_validate(json.loads(done.out)).entries[0].case == "layout_last"
