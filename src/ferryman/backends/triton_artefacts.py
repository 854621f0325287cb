"""Triton kernels that were compiled ahead of time: the key that a launch must match, and loading without compiling."""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from ferryman.backends import artefacts

# Options that say where the toolchain's own files lie, or nothing of the code.
_ELSEWHERE = ("extern_libs",)
# Parts of a launch's metadata that hold a path or a hash of this machine.
_LOCAL = ("extern_libs", "hash")


def key(source: Any, options: Mapping[str, Any], target: Any) -> str:
    """A hash over the kernel's source with all that it calls, types, alignments, constants, compiler options, arch and
    Triton's version: what the JIT's own cache key holds, without paths of this machine.

    ``source`` is Triton's ASTSource; ``options`` are as passed to `triton.compile`, their defaults are filled in here.
    """
    import triton
    from triton.compiler import make_backend

    parsed = vars(make_backend(target).parse_options(dict(options)))
    parts = [
        triton.__version__,
        target.backend,
        str(target.arch),
        target.warp_size,
        code(source.fn),
        [[name, str(kind)] for name, kind in source.signature.items()],
        sorted((list(path), _text(value)) for path, value in source.constants.items()),
        # the JIT lists parameters of which nothing is known, an ahead-of-time source does not
        sorted((list(path), [list(a) for a in facts]) for path, facts in source.attrs.items() if facts),
        sorted((name, str(value)) for name, value in parsed.items() if name not in _ELSEWHERE),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def code(function: Any) -> str:
    """A hash over a kernel's source, the functions that it calls, and the constants outside that both read.

    Triton's own `cache_key` depends on which kernel was asked first: what a function reads through another is part of
    it only if that other's key was known already (triton 3.6, `DependenciesFinder._update_hash`).
    """
    from triton.language import constexpr
    from triton.runtime.jit import JITCallable

    texts: dict[str, str] = {}  # what was met, by module and name: recursion ends

    def visit(value: Any) -> None:
        place = f"{value.fn.__module__}.{value.fn.__qualname__}"
        if texts.setdefault(place, value.src) != value.src:
            raise TypeError(f"{place} names two functions with different sources")
        outside = inspect.getclosurevars(value.fn).nonlocals
        names = {*_names(value.fn.__code__), *outside}
        for name in sorted(names):
            read = outside.get(name, value.fn.__globals__.get(name))
            inner = [getattr(read, n, None) for n in sorted(names)] if inspect.ismodule(read) else [read]
            for one in inner:
                if isinstance(one, JITCallable):
                    if f"{one.fn.__module__}.{one.fn.__qualname__}" not in texts:
                        visit(one)
                elif isinstance(one, constexpr) or not (one is None or callable(one) or inspect.ismodule(one)):
                    texts[f"{place} reads {name}"] = repr(one)

    visit(function)
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()


def _names(code_object: CodeType) -> Iterator[str]:
    """Every name that a function, or one inside it, looks up outside."""
    yield from code_object.co_names
    for constant in code_object.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _text(value: Any) -> str:
    return code(value) if hasattr(value, "cache_key") else str(value)


def metadata_of(compiled: Any) -> dict[str, Any]:
    """What Triton's launcher reads of a compiled kernel, in JSON types and without paths of this machine."""
    metadata: dict[str, Any] = json.loads(json.dumps(compiled.metadata._asdict(), default=vars))
    metadata["target"] = vars(compiled.metadata.target)  # a named tuple would have become a list
    return {name: None if name in _LOCAL else value for name, value in metadata.items()}


def kept(kernel: Any, key: Any, signature: Any, device: Any, rest: tuple[Any, ...]) -> Any:
    """The kernel compiled ahead of time that serves this launch, kept as Triton would keep its own; None: compile.

    The one place where a launch asks for it: before Triton's own compile step, with that step's arguments.
    """
    if artefacts.store() is None or len(rest) != 4:
        return None
    constexprs, options, attrs, _ = rest
    kernels, _, target, _, _ = kernel.device_caches[device]
    prebuilt = load(kernel, signature, constexprs, options, attrs, target)
    if prebuilt is not None:
        kernels[key] = prebuilt
    return prebuilt


def load(kernel: Any, signature: Any, constexprs: Any, options: Any, attrs: Any, target: Any) -> Any:
    """The `CompiledKernel` of a launch, from the artefacts; None: compile. The arguments are those of the JIT's own
    compile step. Raises CompileError where the configuration failed its resource gates."""
    from triton import knobs
    from triton.compiler import ASTSource

    store = artefacts.store()
    if store is None or knobs.compilation.always_compile:
        return None
    source = ASTSource(kernel, signature, constexprs, attrs)
    digest = key(source, vars(options), target)
    arch = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    entry = store.find(digest, "triton", arch)
    if entry is None:
        return None
    return compiled(store, entry, source)


def compiled(store: artefacts.Store, entry: artefacts.Entry, source: Any) -> Any:
    """A `CompiledKernel` as Triton builds it from its cache's files; None, with one warning, where one is damaged."""
    image = store.image(entry)
    if image is None:
        return None
    try:
        if entry.metadata is None or entry.kind is None:
            raise ValueError("the manifest names no metadata")
        metadata = json.loads(store.content(entry.metadata))
        if metadata["name"] != entry.kernel:
            raise ValueError(f"its metadata is that of {metadata['name']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        store.warn(entry, error)
        return None
    return built(source, entry.kernel, {entry.kind: image}, metadata, entry.key)


def built(source: Any, name: str, code: Mapping[str, bytes], metadata: Mapping[str, Any], key: str) -> Any:
    """A `CompiledKernel` of Triton's. ``code``: its files by suffix, the image ("cubin", "hsaco") among them;
    ``metadata`` as `metadata_of` gives it; ``key`` names it, 64 hexadecimal digits."""
    from triton.compiler import CompiledKernel

    # Triton reads the files while it builds the object, and never again: each call has a folder of its own, so that no
    # thread meets what another is writing, and nothing is left behind.
    with tempfile.TemporaryDirectory(prefix="ferryman-artefacts-") as folder:
        group = {}
        for suffix, data in {**code, "json": json.dumps(metadata).encode()}.items():
            path = Path(folder, f"{name[:150]}.{suffix}")
            path.write_bytes(data)
            group[path.name] = str(path)
        return CompiledKernel(source, group, key)
