"""The pytest plugin: what it gives, what it says, and that it costs nothing where it is not used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ferryman import testing
from ferryman.device_profiles import detect, profile
from ferryman.dispatch import registry, select, state
from ferryman.errors import ArgumentError, UnknownName
from ferryman.ops.primitive import Case, TensorSpec
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import prepare
from ferryman.porting.judging.results import Cell
from ferryman.testing import assert_parity, unmet
from tests.lines import serving
from tests.sessions import imports_stay, run_inside  # noqa: F401

pytest_plugins = "pytester"
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text("utf-8")
KERNEL = re.findall(r"```python\n# my_kernels\.py\n(.*?)```", PAGE, re.DOTALL)[0]
here: dict[str, object] = {}
exec(compile(KERNEL, "docs/testing.md", "exec"), here)  # noqa: S102 - our own page
my_rms_norm = here["my_rms_norm"]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the backend must not be usable here")


def session(pytester: pytest.Pytester, *arguments: str, **files: str) -> pytest.RunResult:
    pytester.makepyfile(my_kernels=KERNEL, **files)
    plugins = [] if _installed() else ["-p", "pytest_ferryman"]
    return run_inside(pytester, *plugins, "--ferryman-device", "cpu", "-p", "no:cacheprovider", *arguments)


@pytest.fixture(autouse=True)
def found_from_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions run in folders of their own; a relative PYTHONPATH would lead nowhere."""
    given = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*given, str(ROOT / "src")]))


def _installed() -> bool:
    from importlib.metadata import entry_points

    return any(e.name == "pytest_ferryman" for e in entry_points(group="pytest11"))


def test_the_page_s_examples_run(pytester: pytest.Pytester) -> None:
    files = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
    assert set(files) == {"my_kernels", "test_my_kernels", "test_more"}
    lines = [x for x in files["test_my_kernels"].splitlines() if x]
    assert len(lines) == 3, "three lines are promised"
    done = session(pytester, "-q", test_my_kernels=files["test_my_kernels"], test_more=files["test_more"])
    done.assert_outcomes(passed=3, skipped=1)
    done.stdout.fnmatch_lines(["*ferryman: NOT_RUN (not run here)*", "1 test: *vendor is cpu; required: nvidia*wgmma*"])


def test_a_failure_says_gate_worst_element_and_verdict(pytester: pytest.Pytester) -> None:
    done = session(
        pytester,
        test_wrong="""
        import torch
        from my_kernels import my_rms_norm
        def test_scaled(assert_parity):
            assert_parity("rms_norm", lambda x, weight, eps: my_rms_norm(x, weight, eps) * 1.01, "prime", dtype="bf16")
        def test_returns_none(assert_parity):
            assert_parity("rms_norm", lambda x, weight, eps: None, "prime", dtype="bf16")
        def test_mutates(assert_parity):
            def mutate(x, weight, eps):
                return my_rms_norm(x, weight, eps), x.zero_()
            assert_parity("rms_norm", lambda x, weight, eps: mutate(x, weight, eps)[0], "prime", dtype="bf16")
        def test_refuses(assert_parity):
            def refuse(x, weight, eps): raise NotImplementedError("only sm_90")
            assert_parity("rms_norm", refuse)
    """,
    )
    done.assert_outcomes(failed=4)
    text = done.stdout.str()
    assert re.search(r"FAIL bfloat16 prime: G2: y\[\d+, \d+\] is \S+, expected \S+ within \S+: \S+ bounds away", text)
    assert "G0: returned None; required: a tensor (y)" in text and "x was modified" in text
    cases = 3 * len(cases_of(registry.primitive("rms_norm")))
    assert f"nothing is shown to be right ({cases} UNIMPLEMENTED): refuse refuses: only sm_90" in text
    assert "kernel/adapter.py" not in text, "the traceback ends at the test"


@no_gpu
def test_what_cannot_run_here_is_skipped_and_never_green(pytester: pytest.Pytester) -> None:
    done = session(
        pytester,
        "-n",
        "1",
        test_skips="""
        import pytest
        pytestmark = pytest.mark.requires(arch=("cpu", "sm_90"))
        @pytest.mark.requires(vendor="amd", arch="gfx9*")
        def test_amd(): assert False
        @pytest.mark.parametrize("i", range(3))
        @pytest.mark.requires(feature=("wgmma", "tma"))
        def test_hopper(i): assert False
        @pytest.mark.requires(vendor="cpu")
        def test_here(): pass
        def test_cuda(assert_parity):
            assert_parity("rms_norm", "cuda", "prime")
    """,
    )
    done.assert_outcomes(passed=1, skipped=5)
    text = done.stdout.str()
    assert "3 tests: the host CPU: features are none; required: wgmma, tma" in text
    assert "1 test: the host CPU: vendor is cpu; required: amd; arch is cpu; required: gfx9*" in text
    assert "cuda does not serve cpu devices" in text and text.count("ferryman: NOT_RUN") == 1


def test_a_misspelt_requirement_is_an_error_and_another_s_marker_is_not_ours(pytester: pytest.Pytester) -> None:
    done = session(
        pytester,
        test_marks="""
        import pytest
        @pytest.mark.requires(vendor="nvida")
        def test_vendor(): pass
        @pytest.mark.requires(arch="sm90")
        def test_arch(): pass
        @pytest.mark.requires(feature="wgma")
        def test_feature(): pass
        @pytest.mark.requires(vendor="cpu", archs="cpu")
        def test_word(): pass
        @pytest.mark.requires("a package")
        def test_other(): pass
        @pytest.mark.requires(package="x")
        def test_another(): pass
    """,
    )
    done.assert_outcomes(passed=2, errors=4)
    text = done.stdout.str()
    for message in (
        "vendor 'nvida'; nearest: nvidia",
        "arch 'sm90'",
        "feature 'wgma'; nearest: wgmma",
        "requirement 'archs'; nearest: arch",
    ):
        assert f"unknown {message}" in text


def test_the_device_is_the_option_s_then_the_environment_s(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "def test_it(ferryman_device):\n    assert str(ferryman_device) == 'cpu'\n"
    monkeypatch.setenv("FERRYMAN_TEST_DEVICE", "cuda:63")
    session(pytester, test_device=body).assert_outcomes(passed=1)
    done = run_inside(pytester, *([] if _installed() else ["-p", "pytest_ferryman"]))
    done.assert_outcomes(errors=1)
    assert "FERRYMAN_TEST_DEVICE: unknown device 'cuda:63'" in done.stdout.str()
    monkeypatch.delenv("FERRYMAN_TEST_DEVICE")
    assert str(testing.default_device("cpu")) == "cpu"
    assert testing.default_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_interpreted_triton_is_said_to_be_simulated(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytester.makepyfile(
        test_triton="""
        def test_it(assert_parity):
            (cell,) = assert_parity("softmax", "triton.rows", "prime", dtype="f32")
            assert (cell.verdict, cell.implementation) == ("SIMULATED", "triton.rows")

        def test_the_backend(assert_parity):
            by_name = {c.case: c.implementation for c in assert_parity("cross_entropy", "triton", dtype="f32")}
            assert by_name["prime"] == "triton.rows" and set(by_name.values()) == {"triton.rows", "triton.long"}
    """
    )
    plugins = [] if _installed() else ["-p", "pytest_ferryman"]
    done = pytester.runpytest_subprocess(*plugins, "--ferryman-device", "cpu")
    done.assert_outcomes(passed=2)
    done.stdout.fnmatch_lines(["*ferryman: SIMULATED*", "2 tests: interpreted: no evidence about a device"])


def test_a_session_without_it_imports_nothing(pytester: pytest.Pytester) -> None:
    """Torch takes seconds, and every pytest session of the environment imports the plugin."""
    code = (
        "import json, sys, time, pytest; t = time.process_time(); import pytest_ferryman; t = time.process_time() - t; "
        "print(json.dumps([t, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    seconds, modules = json.loads(done.stdout)
    assert not {"torch", "ferryman", "pydantic", "numpy"} & set(modules) and seconds < 0.05
    pytester.makepyfile(test_plain="import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    plugins = [] if _installed() else ["-p", "pytest_ferryman"]
    pytester.runpytest_subprocess(*plugins, "-p", "no:hypothesispytest").assert_outcomes(passed=1)


def test_the_entry_point_is_the_module() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert '[project.entry-points.pytest11]\npytest_ferryman = "pytest_ferryman"\n' in text
    assert '"src/pytest_ferryman"' in text[text.index("[tool.hatch.build.targets.wheel]") :]


# --- the function itself ---------------------------------------------------------------------------------------------


def names(cells: list[Cell]) -> set[tuple[str, str, str]]:
    return {(c.implementation, c.case, c.dtype) for c in cells}


def test_cases_by_name_by_case_by_dict_and_all() -> None:
    whole = assert_parity("rms_norm", my_rms_norm, dtype="f32", device="cpu")
    assert len(whole) == len(
        [c for c in registry.evidence(registry.primitive("rms_norm")).cases() if c.tier == "small"]
    )
    one = assert_parity("softmax", "torch", "prime", dtype=("f32", torch.bfloat16), device="cpu")
    assert names(one) == {("torch", "prime", "float32"), ("torch", "prime", "bfloat16")}
    own = assert_parity("softmax", "definition", Case("mine", {"x": TensorSpec((3, 5))}), dtype="f16", device="cpu")
    assert names(own) == {("definition", "mine", "float16")}
    x = torch.randn(6, 40, dtype=torch.bfloat16)[:, ::2]
    given = assert_parity("rms_norm", my_rms_norm, {"x": x, "weight": torch.randn(20)}, device="cpu")
    assert names(given) == {("user:my_rms_norm", "given", "bfloat16")}
    from ferryman import ops

    assert names(assert_parity(ops.softmax, "torch", {"x": TensorSpec((2, 9))}, dtype="f32", device="cpu"))


def test_a_backward_takes_its_forward_s_specs_or_its_own_tensors() -> None:
    specs = {"x": TensorSpec((4, 33)), "weight": TensorSpec((33,))}
    assert assert_parity("rms_norm_backward", "torch", specs, dtype="f32", device="cpu")[0].verdict == "PASS"
    need = {"x": TensorSpec((4, 33)), "weight": TensorSpec((5, 33)), "need_x": False}
    assert assert_parity("linear_backward", "torch", need, dtype="f32", device="cpu")[0].verdict == "PASS"
    y = torch.softmax(torch.randn(3, 8), -1)
    own = {"grad": torch.randn(3, 8), "y": y}
    assert assert_parity("softmax_backward", "torch", own, device="cpu")[0].verdict == "PASS"


def test_given_tensors_keep_their_layout_and_are_left_alone() -> None:
    seen = []

    def look(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        seen.append((x.stride(), x.data_ptr() % 16, x.data_ptr()))
        return my_rms_norm(x, weight, eps)  # type: ignore[operator]

    base = torch.randn(1, 1 + 5 * 12)
    x = base[0, 1:].as_strided((5, 8), (12, 1))
    assert_parity("rms_norm", look, {"x": x}, device="cpu")
    assert {s[:2] for s in seen} == {((12, 1), x.data_ptr() % 16)} and x.data_ptr() not in {s[2] for s in seen}
    wide = torch.randn(1, 8).expand(5, 8)
    assert_parity("rms_norm", look, {"x": wide}, device="cpu")
    assert seen[-1][0] == (0, 1)


def test_equal_terms_are_no_noise() -> None:
    """An honest sequential sum of equal squares errs in step: G3 does not apply to a tensor of one value."""
    cell = assert_parity("rms_norm", my_rms_norm, {"x": torch.full((5, 384), 0.7)}, device="cpu")[0]
    assert cell.gates["G3"].outcome == "n/a" and "equal inputs" in (cell.gates["G3"].reason or "")


def test_what_a_kernel_declares() -> None:
    kernel = registry.launcher(serving("attention", "torch"))
    cells = assert_parity(
        "attention", kernel, "causal", dtype="f16", device="cpu", roundings=("p",), deterministic=False
    )
    assert cells[0].roundings == ["p"] and cells[0].implementation == "user:attention_composed"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("rms_nrm", my_rms_norm), {}, UnknownName, "unknown op 'rms_nrm'; nearest: rms_norm"),
        (("rms_norm", "trton"), {}, UnknownName, "implementation of rms_norm 'trton'; nearest: triton"),
        (("attention", "hip"), {}, UnknownName, "implementation of attention 'hip'; "),
        (("rms_norm", 3), {}, ArgumentError, "implementation is int; required: a name or a function"),
        (("rms_norm", "torch"), {"accumulation": "split-k"}, ArgumentError, "its line in the menu declares them"),
        (("rms_norm", my_rms_norm), {"roundings": ("p",)}, UnknownName, "rounding that rms_norm permits 'p'"),
        (("rms_norm", my_rms_norm), {"accumulation": "fp16"}, UnknownName, "accumulation class 'fp16'"),
        (("rms_norm", my_rms_norm, "prim"), {}, UnknownName, "case of rms_norm 'prim'; nearest: prime"),
        (("rms_norm", my_rms_norm), {"dtype": "f8"}, UnknownName, "unknown dtype 'f8'"),
        (("rms_norm", my_rms_norm, {"y": torch.ones(3)}), {}, UnknownName, "argument of rms_norm 'y'"),
        (("rms_norm", my_rms_norm, {"weight": None}), {}, ArgumentError, "rms_norm: x is missing"),
        (("rms_norm", my_rms_norm, {"x": torch.ones(3)}), {"dtype": "f32"}, ArgumentError, "none beside tensors"),
        (
            ("rms_norm", my_rms_norm, {"x": torch.ones(3), "weight": torch.ones(4)}),
            {},
            ArgumentError,
            "weight.shape is",
        ),
        (("rms_norm", my_rms_norm), {"device": "cuda:63"}, UnknownName, "unknown device 'cuda:63'"),
        (("rms_norm", lambda target, x: x), {}, ArgumentError, "x is parameter 2; required: parameter 1"),
    ],
)
def test_bad_use_says_what_is_wrong(
    arguments: tuple[object, ...], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        assert_parity(*arguments, **{"device": "cpu", **options})  # type: ignore[arg-type]


def test_a_backend_s_name_takes_its_first_line_that_serves() -> None:
    """As `use` does: each case by the line that dispatch takes, and none where no line of it serves."""
    op = registry.primitive("attention")
    for name in ("causal", "bool_mask"):
        (cell,) = assert_parity("attention", "torch", name, dtype="f32", device="cpu")
        args = prepare(
            op, next(c for c in cases_of(op) if c.name == name), torch.float32, torch.device("cpu")
        ).args.values
        taken = select.select(op, args, detect("cpu"), state.intern({"attention": ("torch",)}, False))
        assert (cell.verdict, cell.implementation) == ("PASS", taken.implementation.name)
    with pytest.raises(testing.NotRun, match="rms_norm by triton on .*: nothing ran"):
        assert_parity("rms_norm", "triton", "prime", device="cpu")


def test_nothing_ran_is_not_a_success() -> None:
    with pytest.raises(testing.NotRun, match="nothing ran, so nothing is shown to be right"):
        assert_parity("rms_norm", "hip", "prime", device="cpu")
    with pytest.raises(AssertionError, match="takes no cast_before_weight; required here: True") as raised:
        assert_parity("rms_norm", my_rms_norm, "cast_before_weight", device="cpu")
    assert not isinstance(raised.value, testing.NotRun)


def test_requirements_against_profiles_that_are_not_here() -> None:
    h200, mi300x = profile("h200"), profile("mi300x")
    assert unmet(h200, vendor="nvidia", arch="sm_9*", feature=("wgmma", "tma")) is None
    assert unmet(mi300x, vendor=("nvidia", "amd"), arch="gfx942") is None
    assert unmet(mi300x, feature="wgmma") is not None
    assert "arch is sm_90; required: gfx942 or gfx950" in (unmet(h200, arch=("gfx942", "gfx950")) or "")
    for wrong in ({}, {"vendor": 3}, {"arch": ()}):
        with pytest.raises(ArgumentError):
            unmet(detect("cpu"), **wrong)
