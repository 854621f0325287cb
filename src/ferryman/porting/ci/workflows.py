"""The workflows of a matrix, for GitHub, GitLab and Buildkite: thin, pinned, with one gate (docs/ci.md)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from ferryman.porting.ci.matrix import Matrix
from ferryman.porting.ci.row import MatrixError, Row

SYSTEMS = {
    "github": ".github/workflows/ferryman.yml",
    "gitlab": ".gitlab-ci.yml",
    "buildkite": ".buildkite/pipeline.yml",
}
_HERE = "ferryman.porting.ci"
_HOSTED = ("cpu", "compile", "simulated")
_ROW_MINUTES = 120
_PYTHON = "3.12"
_PYTHON_IMAGE = f"python:{_PYTHON}"


@lru_cache(maxsize=2)
def data(name: str) -> dict[str, Any]:
    """One of the package's data files: actions or images."""
    text = (resources.files(_HERE) / "data" / f"{name}.yaml").read_text("utf-8")
    entries: dict[str, Any] = yaml.safe_load(text)[name]
    return entries


def action(name: str) -> str:
    """An action pinned by hash, with its tag beside."""
    pinned = data("actions")[name]
    return f"{name}@{pinned['hash']} # {pinned['tag']}"


def flow(values: Iterable[str]) -> str:
    """A list in one line; every text quoted as JSON, which YAML reads."""
    return "[" + ", ".join(json.dumps(value) for value in values) + "]"


HOST = "host"  # an image that is none: the row runs on the runner itself


@dataclass(frozen=True)
class Container:
    """Where a row on a device runs: an image (HOST: none), the device's flags, what the image lacks."""

    image: str
    options: str
    prepare: tuple[str, ...]
    path: str


def container_of(row: Row) -> Container:
    """The row's own image, else its vendor's; the flags are always the vendor's."""
    known = data("images")[group(row)]
    if row.image == HOST:
        return Container(HOST, "", (), "")
    prepare = tuple(known["prepare"]) if row.image is None else ()
    return Container(row.image or known["image"], known["options"], prepare, known["path"] if prepare else "")


def _template(name: str) -> str:
    return (resources.files(_HERE) / "templates" / name).read_text("utf-8")


def _filled(text: str, **values: object) -> str:
    for name, value in values.items():
        text = text.replace(f"@@{name}@@", str(value))
    return text


def _steps(matrix: Matrix, container: Container | None = None) -> str:
    """The steps that install what rows need."""
    if not matrix.setup:
        raise MatrixError(f"{matrix.origin} has no setup: the commands that install what its rows need")
    lines = []
    if container is not None and container.prepare:
        added = f'echo "{container.path}" >> "$GITHUB_PATH"'
        lines += [
            "      - name: what the image lacks",
            "        run: |",
            *(f"          {command}" for command in (*container.prepare, added)),
        ]
    lines += ["      - name: set up", "        run: |", *(f"          {command}" for command in matrix.setup)]
    return "\n".join(lines)


def _prepared(matrix: Matrix, container: Container) -> list[str]:
    """The same in one shell."""
    commands = list(container.prepare)
    if container.path:
        commands.append(f'export PATH="{container.path}:$PATH"')
    return [*commands, *matrix.setup]


def _replays(matrix: Matrix, before: str, after: str = "\n") -> dict[str, str]:
    """The gate's judging of capsules, where rows write some."""
    if not any(row.capsule for row in matrix.rows):
        return {"REPLAYS": "", "REPLAY": ""}
    return {"REPLAYS": " --replays replays", "REPLAY": f"{before}ferryman ci replay results --out replays{after}"}


def _github(matrix: Matrix) -> str:
    python = f'      - uses: {action("actions/setup-python")}\n        with: {{python-version: "{_PYTHON}"}}\n'
    checkout = (
        f"      - uses: {action('actions/checkout')}\n        with: {{persist-credentials: false, fetch-depth: 0}}"
    )
    upload = (
        f"      - if: always()\n        uses: {action('actions/upload-artifact')}\n"
        '        with: {name: "ferryman-${{ matrix.id }}", path: results/, if-no-files-found: ignore}'
    )
    groups = _groups(matrix)
    names = ["hosted", *groups]
    hardware = ""
    for name, (container, _) in groups.items():
        text = f"    container: {{image: {json.dumps(container.image)}, options: {json.dumps(container.options)}}}\n"
        hardware += _filled(
            _template("github-hardware.yml"),
            NAME=name,
            CONTAINER="" if container.image == HOST else text,
            HARDWARE_SETUP=_steps(matrix, container),
        )
    wanted = {"hosted": " ".join(f"--how {how}" for how in _HOSTED), **{name: f"--group {name}" for name in groups}}
    plans = []
    for name, chosen in wanted.items():
        asked = f'ferryman ci matrix --format github {chosen} ${{BASE:+--base "$BASE"}}'
        plans.append(f'          echo "{name}=$({asked})" >> "$GITHUB_OUTPUT"')
    return _filled(
        _template("github.yml"),
        **_replays(matrix, "      - name: what the devices recorded, judged here\n        run: "),
        HARDWARE=hardware,
        OUTPUTS="\n".join(f"      {n}: ${{{{ steps.rows.outputs.{n} }}}}" for n in names),
        PLAN="\n".join(plans),
        CHECKOUT=checkout,
        SETUP=python + _steps(matrix),
        UPLOAD=upload,
        UPLOAD_ACTION=action("actions/upload-artifact"),
        DOWNLOAD=action("actions/download-artifact"),
        MATRIX=matrix.origin,
        BRANCH="main",
        MINUTES=_ROW_MINUTES,
        WAIT=matrix.wait_minutes,
        ROUNDS=max(1, 2 * matrix.wait_minutes),
        GATE_MINUTES=matrix.wait_minutes + 30,
    )


def _groups(matrix: Matrix) -> dict[str, tuple[Container, list[Row]]]:
    """Rows on devices by what their containers need: one job each. Names are those of `ferryman ci matrix --group`."""
    groups: dict[str, tuple[Container, list[Row]]] = {}
    for row in matrix.rows:
        if row.on_device:
            container = container_of(row)
            first, rows = groups.setdefault(group(row), (container, []))
            rows.append(row)
            if first != container:
                raise MatrixError(f"{matrix.origin}: rows {rows[0].id} and {row.id} share a job, and have two images")
    return groups


def group(row: Row) -> str:
    """The job of a workflow that a row on a device belongs to."""
    return "jetson" if row.device.startswith("orin") else row.vendor


def _gitlab(matrix: Matrix) -> str:
    rows, hosted, devices = [], [], []
    for row in matrix.rows:
        if row.on_device:
            devices.append(row.id)
            container = container_of(row)
            script = "".join(f"    - {json.dumps(c)}\n" for c in _prepared(matrix, container))
            image = "" if container.image == HOST else f"  image: {json.dumps(container.image)}\n"
            rows.append(
                f"{row.id}:\n  extends: .row\n  stage: hardware\n{image}  before_script:\n{script}"
                f"  tags: {flow(row.labels)}\n"
                f"  variables: {{ROW: {row.id}}}\n  needs: []\n  timeout: {_ROW_MINUTES} minutes\n  rules:\n"
                '    - if: $CI_PIPELINE_SOURCE == "merge_request_event" && '
                "$CI_MERGE_REQUEST_SOURCE_PROJECT_ID != $CI_PROJECT_ID\n      when: never\n"
                '    - if: $CI_PIPELINE_SOURCE == "merge_request_event"\n      when: manual\n'
                "      allow_failure: true\n"
                "    - when: on_success\n"
            )
        else:
            hosted.append(row.id)
            rows.append(
                f"{row.id}:\n  extends: .row\n  stage: hosted\n  image: {_PYTHON_IMAGE}\n"
                f"  variables: {{ROW: {row.id}}}\n  timeout: {_ROW_MINUTES} minutes\n"
            )
    return _filled(
        _template("gitlab.yml"),
        **_replays(matrix, "    - "),
        ROWS="\n".join(rows),
        NEEDS=flow(hosted),
        HARDWARE_IDS=" ".join(devices) or '""',
        SETUP="\n".join(f"    - {json.dumps(c)}" for c in matrix.setup),
        MATRIX=matrix.origin,
        PYTHON_IMAGE=_PYTHON_IMAGE,
        WAIT=matrix.wait_minutes,
        ROUNDS=max(1, 2 * matrix.wait_minutes),
        GATE_MINUTES=matrix.wait_minutes + 30,
    )


def _buildkite(matrix: Matrix) -> str:
    rows, hosted, devices = [], [], []
    blocked = False
    for row in matrix.rows:
        last = f"ferryman ci run {row.id} --out results"
        if row.on_device:
            devices.append(row.id)
            container = container_of(row)
            if not blocked:
                rows.append(
                    '  - block: "run the hardware rows of this commit"\n    key: hardware\n'
                    "    if: build.pull_request.id != null && build.pull_request.repository.fork == false\n"
                    "    blocked_state: running\n"
                )
                blocked = True
            body = [*_prepared(matrix, container), last]
            inside = shlex.quote(" && ".join(body)).replace("$", "$$")
            mount = '--volume "$$PWD:/work" --workdir /work'
            command = f"      docker run --rm {container.options} {mount} {container.image} sh -c {inside}"
            if container.image == HOST:
                command = "\n".join(f"      {line}" for line in body).replace("$", "$$")
            rest = (
                f"    agents: {{queue: {json.dumps(row.device)}}}\n    depends_on: hardware\n"
                "    if: build.pull_request.id == null || build.pull_request.repository.fork == false\n"
            )
        else:
            hosted.append(row.id)
            command = "\n".join(f"      {line}".replace("$", "$$") for line in (*matrix.setup, last))
            rest = ""
        rows.append(
            f"  - label: {row.id}\n    key: {row.id}\n{rest}    timeout_in_minutes: {_ROW_MINUTES}\n"
            f'    command: |\n{command}\n    artifact_paths: ["results/**/*"]\n'
        )
    return _filled(
        _template("buildkite.yml"),
        **_replays(matrix, "      "),
        ROWS="\n".join(rows).rstrip("\n"),
        NEEDS=flow(hosted),
        MATRIX=matrix.origin,
        HARDWARE_IDS=" ".join(devices) or '""',
        GATE_SETUP="\n".join(f"      {c}".replace("$", "$$") for c in matrix.setup),
        ROUNDS=max(1, 2 * matrix.wait_minutes),
        GATE_MINUTES=matrix.wait_minutes + 30,
    )


RENDER = {"github": _github, "gitlab": _gitlab, "buildkite": _buildkite}
