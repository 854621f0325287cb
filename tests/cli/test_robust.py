"""The command under faults: ended workers, memory, streams that are gone, imports that raise, what kernels leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman.backends import base, cuda, triton
from ferryman.dispatch import registry
from ferryman.porting.kernel import adapter as kernel_adapter
from ferryman.porting.kernel import check as kernel
from ferryman.porting.running.process import Numerics, bound, flushes_subnormals
from tests.cli.run import ferryman
from tests.lines import planted

HERE = Path(__file__).parent
SOURCE = str(HERE.parents[1] / "src")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("user_kernels.py", "user_triton.py"):
        shutil.copy(HERE / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- workers end with their parent, and have a limit (6) ------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Processes below one, at any depth."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            pids += [int(path.parent.name), *children(int(path.parent.name))]
    return pids


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="workers end with their parent on Linux")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_that_spins_ends_with_the_command(folder: Path, number: signal.Signals) -> None:
    arguments = ["check", "--kernel", "user_kernels.py:spinning", "--op", "rms_norm", "--device", "cpu", "--json"]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    command = subprocess.Popen(
        [sys.executable, "-m", "ferryman", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not (workers := [p for p in children(command.pid) if b"porting.kernel.worker" in _command_line(p)]):
            assert time.monotonic() < deadline and command.poll() is None
            time.sleep(0.1)
        time.sleep(1)
        command.send_signal(number)
        command.wait(5)
        deadline = time.monotonic() + 5
        while any(map(alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, workers))
    finally:
        command.kill()
        command.wait()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_every_worker_is_bound_to_its_parent() -> None:
    """Each process that the package starts from its own sources says so first."""
    for where in ("running/worker", "kernel/worker", "tune/worker", "aot/worker"):
        text = Path(SOURCE, "ferryman", "porting", f"{where}.py").read_text(encoding="utf-8")
        body = text[text.index("def main()") :]
        assert "end_with_parent()" in body.partition("os.fdopen")[0], where


# What `ferryman ci run` and `ferryman mutate` start is a user's command, and none of the package's own sources.
STARTS = {
    "ci run": """
from ferryman.porting.ci import run
run._execute(command, pathlib.Path(), {}, 60.0)
""",
    "mutate": """
from ferryman.porting.mutate import targets, users
target = targets.Target(pathlib.Path("user_kernels.py"), "user_kernels", "rms_norm")
users._Tests(target, shlex.join(command), pathlib.Path(folder), False, []).run(None, 60.0)
""",
}
SPINS = """
import os, sys, time
os.fork()  # what it starts, too
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
time.sleep(120)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="commands end with their parent on Linux")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("verb", STARTS)
def test_a_users_command_ends_with_ours(verb: str, number: signal.Signals, folder: Path, tmp_path: Path) -> None:
    """At SIGTERM with all that it started; at SIGKILL, which no process can answer, the command itself."""
    begun, own = tmp_path / "begun", tmp_path / "own"
    begun.mkdir(), own.mkdir()
    (tmp_path / "spins.py").write_text(SPINS)
    script = (
        "import pathlib, shlex, signal, sys\nfrom ferryman.cli.main import _terminated\n"
        "signal.signal(signal.SIGTERM, _terminated)\n"
        f"command, folder = [sys.executable, 'spins.py', {str(begun)!r}], {str(own)!r}\n{STARTS[verb]}"
    )
    command = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": SOURCE})
    try:
        deadline = time.monotonic() + 60
        while len(list(begun.iterdir())) < 2:
            assert time.monotonic() < deadline and command.poll() is None
            time.sleep(0.05)
        all_of_it = [int(path.name) for path in begun.iterdir()]
        first = [p for p in all_of_it if p in children(command.pid) and b"spins.py" in _command_line(p)]
        command.send_signal(number)
        command.wait(5)
        must_end = all_of_it if number == signal.SIGTERM else [p for p in first if p == min(all_of_it)]
        assert must_end
        deadline = time.monotonic() + 5
        while any(map(alive, must_end)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, must_end))
    finally:
        command.kill()
        command.wait()
        for pid in map(int, (path.name for path in begun.iterdir())):
            if alive(pid) and b"spins.py" in _command_line(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_kernel_that_takes_all_memory_is_stopped_and_said_to_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "MOST_LOST", 1)
    document = kernel.run("user_kernels.py:greedy", "rms_norm", device="cpu", dtypes=["f32"], memory=900 << 20)
    first, *others = document.cells
    assert first.verdict == "FAIL" and "required: at most 0.879 GiB (memory limit)" in str(first.reason)
    assert {cell.verdict for cell in others} == {"NOT_RUN"}


# --- toolchains whose import raises (8) -----------------------------------------------------------------------------


@pytest.mark.parametrize("raised", ["ImportError('libcuda')", "ValueError('numpy.dtype size changed')", "OSError(2)"])
def test_a_toolchain_whose_import_raises_is_a_refusal(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brokenchain.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert raised.partition("(")[0].replace("OSError", "Error") in str(base.unimportable("brokenchain"))
    monkeypatch.setattr(cuda, "_LAUNCHING", ("brokenchain",))
    if torch.version.cuda is None:
        reasons = cuda.CudaBackend().probe("nvidia")
        assert len(reasons) == 1 and "importing brokenchain raises" in reasons[0]
    real = triton.unimportable
    monkeypatch.setattr(triton, "unimportable", lambda *names: real("brokenchain"))
    monkeypatch.setattr(triton, "_interpreter_reasons", lambda: ())
    (reason,) = triton.TritonBackend().probe("cpu")
    assert "importing brokenchain raises" in reason


def test_a_backend_that_breaks_its_promise_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        name, vendors = "broken", frozenset({"cpu"})

        def probe(self, vendor: str) -> tuple[str, ...]:
            raise ValueError("another ABI")

    registry.forget()
    monkeypatch.setattr(registry, "backends", lambda: {"broken": Broken()})
    assert registry.probe("broken", "cpu") == ("broken cannot be asked: ValueError: another ABI",)
    registry.forget()


def test_kernels_that_cannot_be_imported_cost_their_line_and_not_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import ferryman as package
    from ferryman import ops
    from ferryman.dispatch import select
    from ferryman.errors import QuarantineWarning
    from ferryman.ops.menu import Implementation

    broken = Implementation(op="softmax", name="triton", where="ferryman.no_such_kernels:softmax")
    backends = registry.backends()
    planted(monkeypatch.setattr, {broken: None}, first=True)
    monkeypatch.setattr(registry, "backends", lambda: {**backends, "triton": backends["torch"]})
    monkeypatch.setattr(registry, "probe", lambda name, vendor: ())
    monkeypatch.setattr(select, "preferred", lambda op, profile: ["triton", "torch", "definition"])
    package.reload()
    x = torch.randn(3, 8)
    with pytest.warns(QuarantineWarning, match="cannot be imported: ModuleNotFoundError"):
        y = ops.softmax(x)
    assert torch.equal(y, torch.softmax(x, -1))
    monkeypatch.undo()
    package.reload()


# --- streams, disks and values (12) -----------------------------------------------------------------------------------


def shell(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **environment}
    line = text.replace("ferryman", f"{sys.executable} -m ferryman", 1)
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, env=given)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    ("line", "message"),
    [("ferryman ops > /dev/full", "ferryman: No space left on device\n"), ("ferryman ops >&-", "stdout is closed")],
)
def test_a_stdout_that_takes_nothing_is_one_message(line: str, message: str) -> None:
    done = shell(line)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


HUGE = "9" * 6000


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "rms_norm", "--shape", f"4,{HUGE}"),
        ("explain", "rms_norm", "--shape", "4,8", "--arg", f"eps={HUGE}"),
        ("explain", "attention", "--shape", "1,1,4,8", "--arg", f"window={HUGE}"),
    ],
)
def test_an_integer_of_6000_digits_is_bad_use(arguments: tuple[str, ...]) -> None:
    done = ferryman(*arguments)
    assert done.code == 2 and len(done.err) < 700 and "required: " in done.err


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": [1]},
        {"rope_theta": "1"},
        {"rms_norm_eps": {}},
        {"rope_theta": 10**400},
        {"initializer_range": True},
    ],
)
def test_a_configuration_of_wrong_types_is_bad_use(change: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
    done = ferryman("check", "--model", str(tmp_path), "--device", "cpu", "--json")
    assert done.code == 2 and f"{next(iter(change))} is " in done.err and "required: a finite number" in done.err


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from ferryman.cli import main

    def missing() -> None:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy.linalg")

    monkeypatch.setattr(main, "app", missing)
    done = ferryman("counters")
    assert (
        done.code == 2
        and done.err == "ferryman: this needs numpy, which is not installed: pip install 'ferryman[triton]'\n"
    )


# --- a user's kernel (14, 15) -----------------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(
    bool(triton._interpreter_reasons() and "numpy" in str(triton._interpreter_reasons())), reason="no interpreter"
)


def python(*arguments: str, **environment: str) -> str:
    given = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=given, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
def test_bfloat16_in_tritons_interpreter_is_mended() -> None:
    python(str(HERE.parent / "unit" / "bfloat16_worker.py"))


@needs_triton
def test_a_hastened_interpreter_gives_the_same_bits_and_errors() -> None:
    python(str(HERE.parent / "unit" / "hasten_worker.py"))


SOME_CASES = """
import json, sys
import torch
from ferryman.dispatch import registry
from ferryman.porting.kernel import adapter as kernel_adapter
from ferryman.porting.judging.parity import prepare
from ferryman.porting.running.cells import tier_cases
torch.set_num_threads(1)
op = registry.primitive("linear")
function, numerics = kernel_adapter.load_apart(kernel_adapter.parse("user_triton.py:linear"))
adapter, line = kernel_adapter.Adapter(function, op, "linear", numerics), kernel_adapter.declared(op, "linear")
found = {}
for case in tier_cases(op, "small")[::3]:
    cell = kernel_adapter.check(adapter, line, prepare(op, case, torch.bfloat16, torch.device("cpu"), 3))
    found[case.name] = (cell.verdict, cell.reason)
print(json.dumps(found))
"""


@needs_triton
def test_a_right_bfloat16_kernel_is_simulated(folder: Path) -> None:
    verdicts = json.loads(python("-c", SOME_CASES, TRITON_INTERPRET="1"))
    assert len(verdicts) >= 5 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is here")
def test_without_a_driver_and_without_interpretation_nothing_ran(folder: Path) -> None:
    verdicts = json.loads(python("-c", SOME_CASES, TRITON_INTERPRET="0"))
    launched = [verdict for verdict, why in verdicts.values() if "set TRITON_INTERPRET=1" in str(why)]
    assert len(launched) >= 5 and set(launched) == {"NOT_RUN"}
    assert "FAIL" not in {verdict for verdict, _ in verdicts.values()}, verdicts


def test_a_kernels_own_seed_is_fresh_and_repeats(folder: Path) -> None:
    arguments = (
        "check",
        "--kernel",
        "user_kernels.py:rms_norm",
        "--op",
        "rms_norm",
        "--dtype",
        "f32",
        "--device",
        "cpu",
        "--json",
    )
    first = ferryman(*arguments)
    assert first.code == 0 and first.err.startswith("ferryman: seed ")
    seed = first.err.split()[2].rstrip(";")
    document = json.loads(first.out)
    assert document["environment"]["seed"] == int(seed)
    again = json.loads(ferryman(*arguments, "--seed", seed).out)
    ratios = [[cell["ratio"] for cell in d["cells"]] for d in (document, again)]
    assert ratios[0] == ratios[1]


def test_what_a_kernel_turns_does_not_reach_the_oracle(folder: Path) -> None:
    """It flushes subnormals from its second call on: an oracle that did so with it would call that right."""
    document = kernel.run("user_kernels.py:flushing", "rms_norm", device="cpu", dtypes=["f32"], seed=1)
    wrong = [str(cell.reason) for cell in document.cells if cell.verdict == "FAIL"]
    assert wrong and all("is 0, expected" in why for why in wrong), wrong
    assert any(cell.verdict == "PASS" for cell in document.cells)
    before, modes = Numerics.now(), torch._C._len_torch_function_stack()

    def turning(*args: Any) -> Any:
        torch.set_flush_denormal(True)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True)
        return args[0]

    adapter = kernel_adapter.Adapter(turning, registry.primitive("rms_norm"), "turning")
    x = torch.randn(2, 8)
    seen: list[bool] = []
    for _ in range(2):
        adapter(x, None, 1e-6, False, None)
        assert Numerics.now() == before and not flushes_subnormals()
    adapter._function = lambda *args: (seen.append(flushes_subnormals()), args[0])[1]
    adapter(x, None, 1e-6, False, None)
    assert seen == [True], "the kernel finds what it had left"
    adapter._function = lambda *args: (torch.set_default_device("meta"), args[0])[1]
    adapter(x, None, 1e-6, False, None)
    assert Numerics.now() == before and torch._C._len_torch_function_stack() == modes, "torch.compile traces no mode"


def test_a_users_command_finds_its_signals_and_its_locale_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """What starts it is Python, which ignores two signals and may name a locale."""
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    shell_command = [
        "sh",
        "-c",
        "grep SigIgn /proc/self/status; env | grep LC_CTYPE; set -o pipefail 2>/dev/null; yes | head -1",
    ]
    plain, ours = (
        subprocess.run(command, capture_output=True, text=True, check=False)
        for command in (shell_command, bound(shell_command))
    )
    assert (ours.stdout, ours.stderr, ours.returncode) == (plain.stdout, plain.stderr, plain.returncode)
