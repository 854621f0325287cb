"""Edits of the C++ kernels by the generic operators: many in one library of the emulation, chosen by an index."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from torch import Tensor

from ferryman.porting.mutate import cpp, sources
from ferryman.porting.mutate.edits import Edit, spread
from ferryman.porting.selftest import worker
from ferryman.porting.selftest.judging import same_bits
from ferryman.porting.selftest.report import REQUIRED_SHARE, Record
from tests.unit import simt_host as host

_MARKER = re.compile(r'# (\d+) "([^"]*)"')
_ROUNDS = 6  # of a compiler that refuses some edits
_SECONDS = 60.0  # by the clock that one mutant may take
Draw = Callable[[list[Edit]], list[Edit]]


def _texts() -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in sorted(sources.ROOT.rglob("*.cuh"))}


def _live(command: Sequence[str], source: str, file: Path) -> set[tuple[str, int]]:
    """(file, line) of what is left of a source after the preprocessor: a GPU's own branches are not."""
    file.write_text(source)
    flags = [*command, "-E", str(file)]
    lines = subprocess.run(flags, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    live, name, number = set(), "", 0
    for line in lines:
        marker = _MARKER.match(line)
        if marker:
            number, name = int(marker[1]), marker[2]
            continue
        if line.strip():
            live.add((name, number))
        number += 1
    return live


class Planted:
    """The library of what a runtime has collected, with ``most`` edits in it (`edits`: by their index): every
    barrier or wait removed, and others.

    files: where edits are. seed: of the draw. draw: another draw, of the edits that the host's compiler sees.
    `refused`: those that it did not take.
    """

    def __init__(
        self, runtime: host.EmulatedRuntime, files: Collection[str], most: int, seed: int, draw: Draw | None = None
    ) -> None:
        self.runtime, self.edits, self.refused, self._texts = runtime, dict[int, Edit](), list[Edit](), _texts()
        self._files, self._most, self._seed, self._draw = files, most, seed, draw or self._spread
        edit: Callable[[str], str] = self._first
        for _ in range(_ROUNDS):
            refused = self._built(edit)
            if not refused:
                break
            self.refused += [self.edits.pop(n) for n in sorted(refused)]
            edit = self._with
        else:
            raise AssertionError("the compiler refuses the mutants, one after another")
        runtime.load(None)

    def _first(self, source: str) -> str:
        compiler = host.host_compiler()
        assert compiler is not None
        command = [*compiler, *host._FLAGS, f"-DFERRYMAN_WAVE={self.runtime.wave}"]
        live = _live(command, source, self.runtime.folder / "live.cpp")
        every = [e for name in sorted(self._files) for e in cpp.edits(self._texts[name], name)]
        alive = [e for e in every if any((e.file, n) in live for n in range(e.line, e.last + 1))]
        self.edits = dict(enumerate(self._draw(alive), 1))
        return self._with(source)

    def _spread(self, alive: list[Edit]) -> list[Edit]:
        waits = [e for e in alive if e.operator == "wait removed"]
        return [*waits, *spread([e for e in alive if e not in waits], self._most - len(waits), self._seed)]

    def _with(self, source: str) -> str:
        for name in {e.file for e in self.edits.values()}:
            text = self._texts[name]
            own = {n: e for n, e in self.edits.items() if e.file == name}
            assert source.count(text.rstrip()) == 1, name
            source = source.replace(text.rstrip(), cpp.schemata(text, name, own).rstrip())
        return cpp.PRELUDE + source

    def _built(self, edit: Callable[[str], str]) -> set[int]:
        """Compile; the edits that the compiler refuses, none where it took them all."""
        building = self.runtime.compile_collected(edit, subprocess.PIPE)
        if building is None:
            return set()
        complaints = building.communicate(timeout=300)[1].decode()
        if building.returncode == 0:
            Path(f"{self.runtime._path}.part").replace(self.runtime._path)
            return set()
        self.runtime.unlock()
        refused = (cpp.refused(complaints) | self._beside(complaints)) & set(self.edits)
        if not refused:  # a template without an end: the error lies elsewhere, what leads to it is named
            refused = {int(n) for n in re.findall(r"mutant:(\d+):", complaints)} & set(self.edits)
        assert refused, complaints[:2000]
        return refused

    def _beside(self, complaints: str) -> set[int]:
        """Edits of an expression that must stay a constant: the compiler names its line."""
        beside = set[int]()
        for name, line in set(re.findall(r"(\w+\.cuh):(\d+):\d+: error", complaints)):
            text = self._texts[name]
            for region in cpp.regions(text):
                first, last = (text.count("\n", 0, at) + 1 for at in (region.start, region.end))
                if first <= int(line) <= last:
                    ends = range(region.start, region.end + 1)  # what is put behind it, too
                    beside |= {n for n, e in self.edits.items() if e.file == name and e.start in ends}
        return beside

    def choose(self, index: int) -> None:
        for library in self.runtime._libraries:
            ctypes.c_int.in_dll(library, "ferryman_mutant").value = index

    def fates(self, attempts: Sequence[Callable[[], tuple[Tensor, ...]]]) -> list[Record]:
        """What becomes of every edit.

        An attempt runs kernels, raises AssertionError where they are wrong, and gives their results. Caught: some
        attempt raises in some order of threads. Equivalent: the right kernels' bits in every order. Missed: other bits.
        """
        self.choose(0)
        right, began = [], time.process_time()
        for self.runtime.order in (0, 1, 2):
            right += [attempt() for attempt in attempts]
        own = 2.0 + worker.SLOWER * (time.process_time() - began)  # seconds of its process: one that hangs ends there

        def judged(index: int, record: Record) -> Record:
            faulthandler.disable()  # a mutant that dies is no news
            self.choose(index)
            number = 0
            for self.runtime.order in (0, 1, 2):
                for attempt in attempts:
                    try:
                        outputs = attempt()
                    except AssertionError as error:
                        return record.model_copy(update={"outcome": "caught", "reason": str(error)[:200]})
                    if not same_bits(outputs, right[number]):
                        record = record.model_copy(update={"outcome": "missed"})
                    number += 1
            return record

        records = []
        for index, edit in self.edits.items():
            record = Record(
                key=f"{edit.file}.{index}",
                op=edit.file,
                name=f"{edit.function}.{edit.line}",
                operator=edit.operator,
                note=edit.note,
                backend="cuda",
                outcome="equivalent",
            )
            fate = worker.forked(functools.partial(judged, index, record), _SECONDS, own)
            records.append(fate if isinstance(fate, Record) else _died(record, str(fate)))
        return records


def _died(record: Record, reason: str) -> Record:
    return record.model_copy(update={"outcome": "not run", "reason": reason})


def judge(records: Sequence[Record], at_least: int) -> None:
    """Assert that so many are caught, and of those that change a bit as many as the self-test requires."""
    fates = Counter(r.outcome for r in records)
    missed = [(r.key, r.name, r.operator, r.note) for r in records if r.outcome == "missed"]
    assert fates["caught"] >= at_least, fates
    assert fates["caught"] >= REQUIRED_SHARE * (fates["caught"] + fates["missed"]), missed
