"""JUnit files, as many tools write them: their cases, and where a file contradicts itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ferryman.errors import ResultError
from ferryman.porting.ci.record import Case
from ferryman.porting.judging.printable import printable

XML_LIMIT = 64 * 2**20


class _Tree(ElementTree.TreeBuilder):
    """Refuses declarations as soon as they begin, in whatever encoding: entities could grow without end."""

    def doctype(self, *_: Any) -> None:
        raise ResultError("it declares a document type; a JUnit file needs none")


def junit(path: Path) -> tuple[list[Case], str | None]:
    """The cases of a JUnit file, by "classname::name", and what contradicts them there.

    Raises ResultError: too large, no XML, declarations in it.
    """
    if path.stat().st_size > XML_LIMIT:
        raise ResultError(f"{path.name} is {path.stat().st_size} bytes; required: at most {XML_LIMIT}")
    try:
        root = ElementTree.fromstring(path.read_bytes(), ElementTree.XMLParser(target=_Tree()))
    except ResultError as error:
        raise ResultError(f"{path.name}: {error}") from None
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # also an encoding that is not known
        raise ResultError(f"{path.name} is not XML: {error}") from error
    if _tag(root) not in ("testsuites", "testsuite"):
        raise ResultError(f"{path.name} is not JUnit: its root is {root.tag[:40]!r}")
    nodes = [node for node in root.iter() if _tag(node) == "testcase"]
    cases = [_junit_case(node) for node in nodes]
    return cases, _contradicted(root, nodes, cases)


def _contradicted(root: ElementTree.Element, nodes: Sequence[ElementTree.Element], cases: Sequence[Case]) -> str | None:
    """What a file says of all its cases, against the cases. What "tests" counts differs between tools (Catch2:
    assertions), so it only tells of cases that are there."""
    wrong = sum(case.outcome in ("failed", "error", "rerun") for case in cases)
    left = sum(case.outcome in ("skipped", "xfailed") for case in cases)
    inside = {id(inner) for node in nodes for inner in node.iter()}
    outside = [n for n in root.iter() if id(n) not in inside]
    if any(_tag(node) in _WORST for node in outside):
        return "a suite failed outside of its cases"
    for suite in (node for node in outside if _tag(node) in ("testsuite", "testsuites")):
        said = {key: _number(suite.get(key)) for key in ("tests", "failures", "errors", "skipped", "disabled")}
        if said["failures"] + said["errors"] and not wrong:
            return f"it counts {said['failures']} failures and {said['errors']} errors, and no case has one"
        if said["skipped"] + said["disabled"] and not left + wrong:
            return f"it counts {said['skipped'] + said['disabled']} cases that were left out, and none says so"
        mine = sum(_tag(node) == "testcase" for node in suite.iter())
        if said["tests"] > mine and not wrong and suite.get("hostname") != _CATCH2:
            return f"it counts {said['tests']} tests, and has {mine}"
    return None


_WORST = {
    "error": "error",
    "failure": "failed",
    **dict.fromkeys(("rerunfailure", "rerunerror", "flakyfailure", "flakyerror"), "rerun"),
}
_CATCH2 = "tbd"  # what Catch2 has for a host's name
_FINE = {"", "run", "passed", "pass", "success", "successful", "completed", "ok", "true"}
_FAILED = re.compile(
    r"\b(fail|failed|failure|err|error|errored|crash|crashed|abort|aborted|timeout|timed.?out|false)\b"
)


def _tag(node: ElementTree.Element) -> str:
    """A name without its namespace."""
    return str(node.tag).rpartition("}")[2].lower()


def _number(text: str | None) -> int:
    return int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else 0


def _junit_case(node: ElementTree.Element) -> Case:
    name = printable("::".join(p for p in (node.get("classname"), node.get("name")) if p))[:2000]
    children: dict[str, ElementTree.Element] = {_tag(child): child for child in node}
    for tag, outcome in _WORST.items():
        if tag in children:
            return Case.model_validate({"id": name, "outcome": outcome, "reason": _message(children[tag])})
    if "skipped" in children:
        kind = "xfailed" if (children["skipped"].get("type") or "").endswith("xfail") else "skipped"
        return Case.model_validate({"id": name, "outcome": kind, "reason": _message(children["skipped"])})
    for word in ((node.get(key) or "").strip().lower() for key in ("status", "result")):
        if _FAILED.search(word):
            return Case(id=name, outcome="failed", reason=f"the runner says {printable(word)[:60]!r}")
        if word not in _FINE:
            return Case(id=name, outcome="skipped", reason=f"the runner says {printable(word)[:60]!r}")
    return Case(id=name, outcome="passed")


def _message(node: ElementTree.Element) -> str:
    return str(printable(node.get("message") or (node.text or "").strip()))[:600]
