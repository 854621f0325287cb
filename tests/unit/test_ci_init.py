"""What `ferryman ci init` writes: valid for each system, safe, pinned; and its steps run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ferryman.porting.ci import initialise, workflows
from ferryman.porting.ci import matrix as matrices
from ferryman.porting.ci.row import MatrixError
from tests.cli.run import ferryman
from tests.unit.ci_world import commit, git

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = tuple(workflows.SYSTEMS)
SCHEMAS = {
    "github": ["--builtin-schema", "vendor.github-workflows"],
    "gitlab": ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"],
    "buildkite": ["--builtin-schema", "vendor.buildkite"],
}
KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def _scale(x, y, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(y + at, tl.load(x + at, mask=mask) * factor, mask=mask)


def scale(x, factor):
    y = torch.empty_like(x)
    _scale[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), factor, BLOCK=256)
    return y
"""
TEST = """
import pytest
import torch
from fastscale import scale

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("n", [1, 256, 1000])
def test_scale(n):
    x = torch.arange(n, dtype=torch.float32, device=DEVICE)
    assert torch.equal(scale(x, 2.0), x * 2.0)
"""


def stranger(root: Path, test: str = TEST) -> Path:
    """A small public-style kernel repository that knows nothing of Ferryman."""
    files = {
        "fastscale/__init__.py": "from fastscale.kernels import scale\n",
        "fastscale/kernels.py": KERNEL,
        "tests/test_scale.py": test,
        "tests/conftest.py": "",
        "README.md": "# fastscale\n",
        "pyproject.toml": "[project]\nname = 'fastscale'\nversion = '1'\n"
        "[tool.pytest.ini_options]\npythonpath = ['.']\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q", "-b", "main")
    commit(root)
    return root


def tool(name: str) -> str:
    command = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip(f"{name} is not installed (extra dev, Python 3.11)")
    return command


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = stranger(tmp_path_factory.mktemp("stranger"))
    arguments = [word for name in SYSTEMS for word in ("--for", name)]
    vendors = [word for name in initialise.VENDORS for word in ("--vendor", name)]
    assert ferryman("ci", "init", "--root", str(root), *arguments, *vendors).code == 0
    return root


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_system_takes_its_file(rendered: Path, name: str) -> None:
    path = rendered / workflows.SYSTEMS[name]
    done = subprocess.run([tool("check-jsonschema"), *SCHEMAS[name], str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_zizmor_finds_nothing(rendered: Path) -> None:
    for root in (rendered, ROOT):
        folder = str(root / ".github" / "workflows")
        done = subprocess.run([tool("zizmor"), "--offline", folder], capture_output=True, text=True)
        assert done.returncode == 0 and "No findings" in done.stdout + done.stderr, done.stdout


def test_our_own_workflow_is_what_the_matrix_says() -> None:
    planned = initialise.plan(ROOT, ["github"]).files
    (name,) = planned
    assert (ROOT / name).read_text("utf-8") == planned[name], "run `ferryman ci init --force`"


def workflow(root: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((root / workflows.SYSTEMS["github"]).read_text("utf-8"))
    return document


@pytest.mark.parametrize("which", ["stranger", "ours"])
def test_forks_never_reach_a_runner_of_one_s_own(rendered: Path, which: str) -> None:
    document = workflow(rendered if which == "stranger" else ROOT)
    assert "pull_request_target" not in document[True]  # YAML 1.1 reads on: as true
    assert "workflow_run" not in document[True]
    assert document["permissions"] == {}
    for name, job in document["jobs"].items():
        assert set(job["permissions"].values()) == {"read"}, name
        if job["runs-on"] != "ubuntu-latest":
            asked = " ".join(job["if"].split())
            assert "github.event.pull_request.head.repo.full_name == github.repository" in asked
            assert "format('hardware:{0}', github.event.pull_request.head.sha)" in asked, "bound to one head"
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"])
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False
            assert "${{" not in step.get("run", ""), "an expression inside a script is code that others write"
    gate = document["jobs"]["gate"]
    assert gate["if"] == "always()" and not any(name.startswith("hardware") for name in gate["needs"])


def test_device_flags_and_images_are_the_vendors(rendered: Path) -> None:
    jobs = workflow(rendered)["jobs"]
    containers = {name: job["container"] for name, job in jobs.items() if "container" in job}
    assert set(containers) == {"hardware-nvidia", "hardware-amd", "hardware-jetson"}
    assert containers["hardware-nvidia"]["options"] == "--gpus all"
    assert containers["hardware-amd"]["options"] == "--device=/dev/kfd --device=/dev/dri --group-add video"
    for known in workflows.data("images").values():
        assert re.fullmatch(r"[a-z0-9]+/[a-z0-9-]+:[\w.-]+", known["image"]), "a short name and a tag, no host"


def test_every_action_was_seen_in_two_repositories() -> None:
    text = Path(initialise.__file__).with_name("data").joinpath("actions.yaml").read_text("utf-8")
    for name, pinned in workflows.data("actions").items():
        before = text[: text.index(f"  {name}:")].splitlines()
        comments = []
        while before and before[-1].startswith("  #"):
            comments.append(before.pop())
        assert len({re.findall(r"# (\S+/\S+) ", line)[0] for line in comments}) >= 2, name
        assert re.fullmatch(r"[0-9a-f]{40}", pinned["hash"]) and pinned["tag"].startswith("v")


def test_an_image_of_one_s_own_wins(tmp_path: Path) -> None:
    root = stranger(tmp_path / "r")
    ferryman("ci", "init", "--root", str(root), "--vendor", "amd")
    path = root / "ferryman.yaml"
    path.write_text(path.read_text().replace("how: hardware,", "how: hardware, image: 'mine/rocm:1',"))
    assert ferryman("ci", "init", "--root", str(root), "--force").code == 0
    assert workflow(root)["jobs"]["hardware-amd"]["container"]["image"] == "mine/rocm:1"
    path.write_text(path.read_text().replace("'mine/rocm:1'", "host"))
    assert ferryman("ci", "init", "--root", str(root), "--force").code == 0
    assert "container" not in workflow(root)["jobs"]["hardware-amd"]
    assert "image: host" in path.read_text(), "the matrix that is there is kept"


def test_init_writes_nothing_over_what_is_there(tmp_path: Path) -> None:
    root = stranger(tmp_path / "r")
    assert ferryman("ci", "init", "--root", str(root), "--dry-run").code == 0
    assert not (root / "ferryman.yaml").exists()
    assert ferryman("ci", "init", "--root", str(root)).code == 0
    done = ferryman("ci", "init", "--root", str(root))
    assert done.code == 2 and "ferryman.yml" in done.err and "--force" in done.err
    for wrong in (("--for", "jenkins"), ("--vendor", "intel")):
        assert ferryman("ci", "init", "--root", str(root), *wrong).code == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(MatrixError, match="has no tests"):
        initialise.plan(empty, ["github"])


@pytest.mark.parametrize(
    ("name", "text", "backends"),
    [
        ("k.cu", "__global__ void f() {}", ("cuda",)),
        ("k.hip", "", ("hip",)),
        ("k.py", "import cupy\n", ("cuda",)),
        ("k.py", "from triton import language\n", ("triton",)),
        ("k.py", "# import triton\n", ("torch",)),
    ],
)
def test_kernels_are_found_by_what_sources_say(tmp_path: Path, name: str, text: str, backends: tuple[str, ...]) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / name).write_text(text)
    (tmp_path / "test_k.py").write_text("import triton\n")
    survey = initialise.search(tmp_path)
    assert survey.backends == backends and survey.tests == ("test_k.py",)
    text = initialise.matrix_text(survey, ("cpu", "nvidia", "amd"))
    (tmp_path / "ferryman.yaml").write_text(text)
    rows = matrices.read(tmp_path / "ferryman.yaml").rows
    assert {row.vendor for row in rows} == {"cuda": {"cpu", "nvidia"}, "hip": {"cpu", "amd"}}.get(
        backends[0], {"cpu", "nvidia", "amd"}
    )


def shell(script: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A step, as a runner starts it: bash -e, GITHUB_* files, `ferryman` and `python` on the path."""
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **environment},
    )


def programs(folder: Path) -> str:
    """A PATH with `ferryman` of these sources, and a `gh` that knows of no other run."""
    folder.mkdir(parents=True)
    for name, text in {
        "ferryman": f'#!/bin/sh\nexec "{sys.executable}" -m ferryman "$@"\n',
        "gh": '#!/bin/sh\ncase "$1" in api) echo 0;; *) exit 1;; esac\n',
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


class Runner:
    """Runs the scripts of a rendered workflow's jobs; what actions do is done by hand, `set up` was done already."""

    def __init__(self, root: Path, clone: Path, tmp: Path) -> None:
        subprocess.run(["git", "clone", "-q", str(root), str(clone)], check=True)
        self.clone, self.tmp, self.jobs = clone, tmp, workflow(clone)["jobs"]
        path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH")) if p)
        self.environment = {"PATH": programs(tmp / "bin"), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def job(self, name: str, matrix: dict[str, str] | None = None) -> dict[str, str]:
        """Outputs of its steps. A step that fails ends the job, but for those that say always()."""
        outputs, failed = self.tmp / f"output-{name}", None
        outputs.write_text("")
        summary = self.tmp / f"summary-{name}"
        for step in self.jobs[name]["steps"]:
            if "run" not in step or step.get("name") == "set up" or (failed and step.get("if") != "always()"):
                continue
            given = {k: _expression(str(v), matrix or {}) for k, v in step.get("env", {}).items()}
            done = shell(
                step["run"],
                self.clone,
                **self.environment,
                **given,
                GITHUB_OUTPUT=str(outputs),
                GITHUB_STEP_SUMMARY=str(summary),
            )
            if done.returncode and failed is None:
                failed = f"{step.get('name')}: {done.stdout}{done.stderr}"
        self.failed = failed
        return dict(line.split("=", 1) for line in outputs.read_text().splitlines())


def _expression(text: str, matrix: dict[str, str]) -> str:
    """GitHub's expressions that these workflows have in env, for a push to main."""
    match = re.fullmatch(r"\$\{\{ ([\w.]+) \}\}", text)
    if match is None:
        return text
    known = {f"matrix.{k}": v for k, v in matrix.items()} | {"github.event.pull_request.base.sha": ""}
    known |= {"github.token": "t", "github.repository": "o/r", "github.run_id": "1"}
    known |= {"github.event.repository.default_branch": "main"}
    return known[match[1]]


@pytest.mark.slow
def test_the_rendered_workflow_s_cpu_legs_run_in_a_clean_clone(tmp_path: Path) -> None:
    """plan, hosted and gate, step by step, of a stranger's repository: the gate passes, two vendors are NOT_RUN."""
    import json

    root = stranger(tmp_path / "stranger")
    ferryman("ci", "init", "--root", str(root))
    commit(root)
    runner = Runner(root, tmp_path / "clone", tmp_path)
    outputs = runner.job("plan")
    assert runner.failed is None
    rows = json.loads(outputs["hosted"])["include"]
    assert [row["id"] for row in rows] == ["cpu"] and json.loads(outputs["amd"])["include"][0]["id"] == "mi300x-triton"
    for row in rows:
        runner.job("hosted", row)
        assert runner.failed is None
    runner.job("gate")
    assert runner.failed is None
    page = (tmp_path / "summary-gate").read_text()
    assert "| cpu | cpu | SIMULATED | 3 SIMULATED |" in page and page.count("NOT_RUN | 0 of") == 3
    merged = json.loads((runner.clone / "merged.json").read_text())
    assert [row["green"] for row in merged["rows"]] == [False, False, False]
    assert (runner.clone / "dashboard.html").exists() and (runner.clone / "history" / "history.json").exists()


@pytest.mark.slow
def test_our_own_workflow_s_plan_runs_in_a_clean_clone(tmp_path: Path) -> None:
    import json

    runner = Runner(ROOT, tmp_path / "clone", tmp_path)
    outputs = runner.job("plan")
    assert runner.failed is None
    names = {row["id"] for row in json.loads(outputs["hosted"])["include"]}
    assert {"cpu-torch-cpu", "mi300x-hip-simulated", "rx7900xtx-hip-compile"} <= names
    assert {row["vendor"] for row in json.loads(outputs["nvidia"])["include"]} == {"nvidia"}


@pytest.mark.slow
def test_a_stranger_s_first_honest_matrix_in_four_commands(tmp_path: Path) -> None:
    root = stranger(tmp_path / "stranger")
    path = programs(tmp_path / "bin")
    source = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH")) if p)
    who = "-c user.name=t -c user.email=t@example.org"
    commands = [
        "ferryman ci init",
        f"git add -A && git {who} commit -qm 'CI by ferryman'",
        "ferryman ci run cpu",
        "ferryman ci verify out/ci",
    ]
    said = [shell(c, root, PATH=path, PYTHONPATH=source, OMP_NUM_THREADS="1") for c in commands]
    assert [done.returncode for done in said] == [0, 0, 0, 0], said[-1].stdout + said[-1].stderr
    assert re.search(r"cpu +cpu +SIMULATED +3 SIMULATED", said[-1].stdout)
    assert len(re.findall(r"hardware +NOT_RUN", said[-1].stdout)) == 2
    done = shell("ferryman ci verify out/ci --require nvidia,amd", root, PATH=path, PYTHONPATH=source)
    assert done.returncode == 1 and "amd is required, and is NOT_RUN" in done.stdout
