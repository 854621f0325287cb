"""The matrix: what is refused, with file and line; what a change reaches, and why."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from ferryman.porting.ci import changes, commands, provenance
from ferryman.porting.ci import matrix as matrices
from ferryman.porting.ci.row import HOW, MatrixError
from tests.cli.run import ferryman
from tests.unit.ci_world import MATRIX, commit, git, repository

ROOT = Path(__file__).resolve().parents[2]
HEAD = "schema: 1\nrows:\n"
ROW = "  - {vendor: amd, device: mi300x, backend: hip, how: compile}\n"


def read(folder: Path, text: str) -> matrices.Matrix:
    path = folder / "ferryman.yaml"
    path.write_text(text)
    return matrices.read(path)


def test_our_own_matrix_covers_both_vendors_and_every_way() -> None:
    rows = matrices.read(ROOT / "ferryman.yaml").rows
    assert {row.vendor for row in rows} == {"cpu", "nvidia", "amd"}
    assert {row.how for row in rows} == set(HOW)
    assert {row.backend for row in rows} == {"torch", "triton", "cuda", "hip"}
    assert {(r.device, r.backend) for r in rows if r.how == "simulated"} == {
        ("mi300x", "triton"),
        ("mi300x", "hip"),
        ("mi355x", "triton"),
    }
    assert all("self-hosted" in row.labels for row in rows if row.on_device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "mi300y"}, "unknown device profile 'mi300y'; nearest: mi300x"),
        ({"device": "instinct-mi300x"}, "is an alias; write mi300x"),
        ({"vendor": "nvidia", "backend": "cuda"}, "device mi300x is of vendor amd; the row says nvidia"),
        ({"backend": "cuda"}, "backend cuda does not serve amd"),
        ({"backend": "hipp"}, "unknown backend 'hipp'; nearest: hip"),
        ({"backend": "torch"}, "nothing to compile"),
        ({"how": "hardwear"}, "unknown how 'hardwear'; nearest: hardware"),
        ({"how": "cpu"}, "how is 'cpu' for vendor amd"),
        ({"how": "hardware"}, "hardware needs labels"),
        ({"how": "simulated", "device": "rx7900xtx"}, "required: a device of gfx942 or gfx950"),
        ({"how": "stand-in"}, "required: an NVIDIA device of the catalogue"),
        ({"suite": "pytes", "tests": "[t]"}, "unknown suite 'pytes'; nearest: pytest"),
        ({"suite": "pytest"}, "tests names what pytest runs"),
        ({"suite": "command"}, "command is what suite command runs"),
        ({"suite": "pytest", "tests": "['/etc']"}, "a path inside the repository"),
        ({"suite": "pytest", "tests": "['../other']"}, "a path inside the repository"),
        ({"suite": "pytest", "tests": "[-x]"}, "a path inside the repository"),
        ({"labels": "self-hosted"}, "labels is text; required: a list"),
        ({"labels": "['$(reboot)']"}, "a name of letters"),
        ({"image": "'registry:5000/x y'"}, "an image's short name"),
        ({"colour": "red"}, "unknown key 'colour' of a row"),
        ({"optinal": "true"}, "unknown key 'optinal' of a row; nearest: optional"),
        ({"quarantine": "{until: tomorrow, reason: x}"}, "required: a day such as"),
        ({"quarantine": "{until: 2026-12-01}"}, "lacks 'reason'"),
        ({"skips": "[{match: a}]"}, "lacks 'reason'"),
        ({"optional": "perhaps"}, "optional is true or false"),
        ({"vendor": '"\\e[31mred"'}, "vendor is "),
        ({"id": "'${{ github.token }}'"}, "a name of letters"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(tmp_path: Path, change: dict[str, str], message: str) -> None:
    good = {"vendor": "amd", "device": "mi300x", "backend": "hip", "how": "compile"}
    row = ", ".join(f"{k}: {v}" for k, v in (good | change).items())
    with pytest.raises(MatrixError, match="^ferryman.yaml:4: .*" + message.replace("(", "\\(")):
        read(tmp_path, HEAD + "  # a comment\n  - {" + row + "}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ferryman.yaml:1: the file is empty"),
        ("rows: [", "not valid YAML"),
        (HEAD + ROW + ROW, "ferryman.yaml:4: a second row 'mi300x-hip-compile'; the first is on line 3"),
        ("schema: 2\nrows: []\n", "ferryman.yaml:1: schema is '2'; this Ferryman reads 1"),
        ("schema: 1\nrows: []\n", "ferryman.yaml:2: rows must be a list of 1 to 1000"),
        ("schema: 1\n", "the matrix lacks 'rows'"),
        (HEAD + ROW + "rowz: 1\n", "ferryman.yaml:4: unknown key 'rowz' of the matrix; nearest: rows"),
        (HEAD + ROW + "require: [intel]\n", "ferryman.yaml:4: require names 'intel', of which there is no row"),
        (HEAD + ROW + "max_age_days: forever\n", "ferryman.yaml:4: max_age_days is 'forever'"),
        (HEAD + ROW + "max_age_days: nan\n", "ferryman.yaml:4: max_age_days is 'nan'"),
        (HEAD + "  - text\n", "ferryman.yaml:3: a row is text"),
        (HEAD + "  - !!python/object/apply:os.system [true]\n", "ferryman.yaml:3: YAML tags are refused"),
        (HEAD + "  - &a {vendor: amd}\n", "YAML anchors are refused"),
        (HEAD + ROW + "sources: [" + "x" * 600 + "]\n", "a text of at most 500 characters"),
        ("#" * 300_000, "larger than"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MatrixError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_pyproject_holds_a_matrix_too(tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no reader of TOML")
    head = '[project]\nname = "x"\n\n[tool.ferryman.ci]\nschema = 1\n\n[[tool.ferryman.ci.rows]]\nvendor = "amd"\n'
    good = head + 'device = "mi300x"\nbackend = "hip"\nhow = "compile"\n'
    (tmp_path / "pyproject.toml").write_text(good)
    matrix = matrices.read(matrices.find(tmp_path))
    assert [row.id for row in matrix.rows] == ["mi300x-hip-compile"]
    (tmp_path / "pyproject.toml").write_text(good.replace("compile", "guess"))
    with pytest.raises(MatrixError, match="^pyproject.toml:11: unknown how 'guess'"):
        matrices.read(tmp_path / "pyproject.toml")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(MatrixError, match="ferryman ci init"):
        matrices.find(tmp_path)


def test_settings_leave_the_matrix_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ferryman import settings

    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.ferryman]\nstrict = true\n[tool.ferryman.ci]\nschema = 1\n")
    settings.forget()
    try:
        assert settings.get("strict") is (sys.version_info >= (3, 11))
    finally:
        monkeypatch.undo()
        settings.forget()


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("changes"))


@pytest.mark.parametrize(
    ("name", "chosen", "why"),
    [
        ("kernels/k.py", {"cpu", "h200", "mi300x"}, "reaches kernels/k.py"),
        ("tests/test_k.py", {"cpu", "h200", "mi300x"}, "reaches tests/test_k.py"),
        ("run_tests", {"gtest", "cpu", "h200", "mi300x", "check", "sim"}, "nothing says who uses run_tests"),
        ("kernels/unused.py", set(), "none of 1 changed files"),
        ("README.md", set(), "none of 1 changed files"),
        ("kernels/new.cu", {"cpu", "h200", "mi300x"}, "reaches kernels/new.cu"),
        ("pyproject.toml", {"cpu", "h200", "mi300x", "check", "sim", "gtest"}, "reaches pyproject.toml"),
        ("data.bin", {"cpu", "h200", "mi300x", "check", "sim", "gtest"}, "nothing says who uses data.bin"),
    ],
)
def test_a_change_runs_what_it_reaches(repo: Path, name: str, chosen: set[str], why: str) -> None:
    base = git(repo, "rev-parse", "HEAD")
    path = repo / name
    before = path.read_text() if path.exists() else None
    path.write_text("# changed\n" + (before or ""))
    try:
        decisions = changes.decide(repo, matrices.read(repo / "ferryman.yaml"), base)
        assert {d.row.id for d in decisions if d.chosen} == chosen
        assert any(why in d.why for d in decisions)
    finally:
        path.unlink() if before is None else path.write_text(before)


def test_a_removed_file_runs_everything_that_it_may_have_served(repo: Path) -> None:
    base = git(repo, "rev-parse", "HEAD")
    path = repo / "kernels" / "unused.py"
    text = path.read_text()
    path.unlink()
    try:
        git(repo, "rm", "-q", "--cached", "kernels/unused.py")
        decisions = changes.decide(repo, matrices.read(repo / "ferryman.yaml"), base)
        assert all(d.chosen for d in decisions) and "is gone" in decisions[0].why
    finally:
        path.write_text(text)
        git(repo, "add", "-A")


def test_without_a_change_nothing_runs_and_without_a_base_everything(repo: Path) -> None:
    known = matrices.read(repo / "ferryman.yaml")
    assert not any(d.chosen for d in changes.decide(repo, known, "HEAD"))
    assert all(d.chosen for d in changes.decide(repo, known, None))


def test_a_base_that_is_not_here_is_an_error_with_the_remedy(repo: Path) -> None:
    done = ferryman("ci", "matrix", "--root", str(repo), "--base", "0" * 40)
    assert done.code == 2 and "is not here" in done.err and "fetch-depth 0" in done.err
    done = ferryman("ci", "matrix", "--root", str(repo), "--base", "--output=x")
    assert done.code == 2 and not (repo / "x").exists()


def test_a_change_of_one_backend_s_kernels_leaves_the_others_out() -> None:
    """In this repository: menus say which files a backend's rows follow from."""
    known = matrices.read(ROOT / "ferryman.yaml")
    tree = changes.Tree(ROOT, known)
    reach = {row.id: tree.reach(row) for row in known.rows}
    triton, cuda = "src/ferryman/ops/norm/triton_kernels.py", "src/ferryman/ops/norm/norm.cuh"
    assert triton in reach["h200-triton-hardware"] and triton not in reach["h200-cuda-hardware"]
    assert cuda in reach["h200-cuda-hardware"] and cuda in reach["mi300x-hip-hardware"]
    assert cuda not in reach["h200-triton-hardware"] and cuda not in reach["cpu-torch-cpu"]
    assert "src/ferryman/ops/norm/definition.py" in reach["cpu-torch-cpu"]
    assert "src/ferryman/device_profiles/data/mi300x.yaml" in reach["mi300x-hip-hardware"]
    assert "src/ferryman/porting/running/simulated.py" in reach["mi300x-hip-simulated"]
    assert not any("src/ferryman/porting/ci/init" in name for names in reach.values() for name in names)


def test_a_decision_takes_less_than_a_second() -> None:
    """Of this repository, the processor's time of everything but starting Python."""
    began = time.process_time()
    known = matrices.read(ROOT / "ferryman.yaml")
    changes.decide(ROOT, known, None, changes.Tree(ROOT, known))
    tree = changes.Tree(ROOT, known)
    assert all(tree.reach(row) for row in known.rows)
    assert time.process_time() - began < 1.0


def test_the_command_prints_rows_for_job_matrices(repo: Path) -> None:
    import json

    done = ferryman("ci", "matrix", "--root", str(repo), "--format", "github", "--group", "amd")
    assert [row["id"] for row in json.loads(done.out)["include"]] == ["mi300x"]
    done = ferryman("ci", "matrix", "--root", str(repo), "--format", "ids", "--how", "cpu")
    assert done.out.split() == ["cpu", "gtest"]
    assert ferryman("ci", "matrix", "--root", str(repo), "--format", "xml").code == 2
    assert ferryman("ci", "matrix", "--root", str(repo), "--how", "guess").code == 2
    done = ferryman("ci", "run", "h2000", "--root", str(repo))
    assert done.code == 2 and "no row 'h2000'; nearest: h200" in done.err


def test_commands_are_the_same_whatever_folder_they_write_to(repo: Path) -> None:
    for row in matrices.read(repo / "ferryman.yaml").rows:
        words = commands.real(commands.shown(row), "/place")
        assert not any("{out}" in word for word in words)
        assert [w.replace("/place", "{out}") for w in words[1:]] == commands.shown(row)[1:]


def test_state_is_of_tracked_files(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", MATRIX)
    checkout = provenance.state(root)
    assert checkout.commit == git(root, "rev-parse", "HEAD") and checkout.dirty is False
    (root / "new.txt").write_text("x")
    assert provenance.state(root).dirty is False
    (root / "kernels" / "k.py").write_text("x = 1\n")
    assert provenance.state(root).changed == ("kernels/k.py",)
    commit(root)
    assert provenance.state(root).dirty is False
    assert provenance.state(tmp_path).commit is None
