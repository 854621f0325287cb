"""A process that compiles: it may be killed by its toolchain, or by `pool` when it takes too long.

One JSON request on each line of stdin, one JSON answer on each line of stdout. ``{"group": [..]}`` asks what there is
to compile in a group; ``{"group": [..], "key": k}`` compiles one of that list, a kernel or a C module.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
from typing import Any

from ferryman.backends import artefacts, code_objects
from ferryman.backends.simt import defines_for
from ferryman.device_profiles import Profile
from ferryman.errors import CompileError, FerrymanError
from ferryman.porting.aot import cache
from ferryman.porting.aot.groups import Group, Source, sources_of
from ferryman.porting.aot.targets import profiles_for
from ferryman.porting.running.process import end_with_parent

COMMAND = [sys.executable, "-c", "from ferryman.porting.aot.worker import main; raise SystemExit(main())"]
_LOG = 4000  # of a toolchain's log, from its end: the error stands there


@functools.cache
def _profile(name: str) -> Profile:
    return profiles_for([name.rpartition(".")[2] if "." in name else name])[0]


@functools.cache
def _table(group: Group) -> dict[str, tuple[Source, dict[str, Any]]]:
    """(source, its description) of every kernel of a group, by key: an order would be this process's own."""
    known = _profile(group.profile)
    table: dict[str, tuple[Source, dict[str, Any]]] = {}
    for source in sources_of(group, known):
        row = {"kernel": source.kernel, **_description(group, source)}
        try:
            row["key"] = _key(group, source, known.arch)
        except FerrymanError as error:  # a compiler option that Triton does not know, and would ignore
            row["key"] = hashlib.sha256(repr(source.unit).encode()).hexdigest()
            row["refused"] = f"{type(error).__name__}: {error}"
        table.setdefault(row["key"], (source, row))
    return table


def _key(group: Group, source: Source, arch: str) -> str:
    if group.backend == "triton":
        from ferryman.backends.triton import TritonBackend

        return TritonBackend().key(source.unit, arch)
    return artefacts.simt_key(arch, defines_for(source.unit, arch), source.unit.source)


@functools.cache
def _modules(group: Group) -> dict[str, tuple[str, str]]:
    """(name, C text) of what the group's launches need of the host, by key."""
    known = _profile(group.profile)
    if group.backend != "triton" or known.vendor != "nvidia":
        return {}
    from ferryman.backends import triton, triton_host

    modules: dict[str, tuple[str, str]] = {}
    for source, row in _table(group).values():
        if "refused" not in row:
            for name, text in triton_host.texts(triton.jit_source(source.unit, known.arch)).items():
                modules.setdefault(triton_host.digest(text), (name, text))
    return modules


def listing(group: Group) -> dict[str, Any]:
    """What there is to compile, as a manifest describes it."""
    rows = [row for _, row in _table(group).values()]
    modules = {key: name for key, (name, _) in _modules(group).items()}
    toolchain = cache.toolchain(group.backend, _profile(group.profile).arch)
    return {"kernels": rows, "modules": modules, "toolchain": toolchain}


def _description(group: Group, source: Source) -> dict[str, Any]:
    unit = source.unit
    if group.backend != "triton":
        allowed = 0 if group.backend == "hip" else unit.spills_allowed
        return {"spills_allowed": allowed, "aligned": False}  # its loads are C++ that says their width
    signature = {
        name: f"{kind}{' %16' if name in unit.divisible else ''}{' unaligned' if name in unit.unaligned else ''}"
        for name, kind in unit.signature.items()
    }
    stages = {} if unit.num_stages is None else {"num_stages": unit.num_stages}
    return {
        "signature": signature,
        "constexprs": {name: _plain(value) for name, value in unit.constexprs.items() if value is not None},
        "options": {"num_warps": unit.num_warps, **stages, **unit.options},
        "spills_allowed": unit.spills_allowed,
        "aligned": _aligned(unit),
    }


def _aligned(unit: Any) -> bool:
    """Whether rows start on 16 bytes and are whole numbers of them, as far as the types say: then 16 bytes a lane can
    be read. Sizes that are not compiled in (`do_not_specialize`) are numbers of rows. A tile of rows so short that it
    has no 16 bytes for each lane is none either."""
    sizes = [
        p.name for p in unit.kernel.params if not p.do_not_specialize and unit.signature.get(p.name) in ("i32", "i64")
    ]
    elements = unit.constexprs.get("ROWS", 1) * unit.constexprs.get("BLOCK", 1 << 20)
    halves = any(kind in ("*bf16", "*fp16") for kind in unit.signature.values())
    short = elements * (2 if halves else 4) < 16 * 32 * unit.num_warps
    return bool(sizes) and not (short or unit.unaligned) and all(name in unit.divisible for name in sizes)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def compile_one(group: Group, key: str) -> dict[str, Any]:
    """Compiles, or takes from the cache: where the image lies in the cache, and its facts; or the toolchain's log."""
    known, began = _profile(group.profile), time.perf_counter()
    module = _modules(group).get(key)
    name = cache.key(key, group.backend, known.arch if module is None else _abi())
    damaged = None
    try:
        kept = cache.get(name)
    except cache.DamagedEntry as entry:
        kept, damaged = None, str(entry)
    if kept is not None:
        return {"entry": name, **kept[0], "cached": True}
    try:
        facts, image = _compile(group, _table(group)[key][0], known) if module is None else _built(*module)
    except CompileError as error:
        return {"error": error.log.strip()[-_LOG:] or str(error), "damaged": damaged}
    facts["seconds"] = round(time.perf_counter() - began, 3)
    cache.put(name, facts, image)
    return {"entry": name, **facts, "cached": False, "damaged": damaged}


def _compile(group: Group, source: Source, known: Profile) -> tuple[dict[str, Any], bytes]:
    if group.backend == "triton":
        from ferryman.backends.triton import TritonBackend

        compiled = TritonBackend().compile(source.unit, None, known.arch)
    else:
        from ferryman.backends import simt_offline

        compiled = simt_offline.compile_unit(source.unit, known.arch)
    try:
        code_objects.check(compiled.image, known.arch)
    except ValueError as error:  # a toolchain that exits with 0 and leaves half a file
        raise CompileError(group.backend, source.kernel, known.arch, f"the code object is unusable: {error}") from error
    resources = {**compiled.resources, "code_bytes": code_objects.code_bytes(compiled.image)}
    digest = hashlib.sha256(compiled.image).hexdigest()
    return {
        "sha256": digest,
        "kind": compiled.kind,
        "resources": resources,
        "metadata": compiled.metadata,
    }, compiled.image


def _abi() -> str:
    from ferryman.backends import triton_host

    return triton_host.abi()


def _built(name: str, text: str) -> tuple[dict[str, Any], bytes]:
    from ferryman.backends import triton_host

    image = triton_host.build(name, text)
    return {"sha256": hashlib.sha256(image).hexdigest()}, image


def main() -> int:
    """Serves requests until stdin ends. What a toolchain prints goes to stderr: stdout carries the answers."""
    end_with_parent()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        parts: list[Any] = [tuple(part) if isinstance(part, list) else part for part in request["group"]]
        group, key = Group(*parts), request.get("key")
        try:
            say(listing(group) if key is None else compile_one(group, key))
        except (FerrymanError, OSError) as error:  # a package that is missing, a disk that is full
            say({"refused": f"{type(error).__name__}: {error}"})
    return 0
