"""What a change reaches: files of the repository that a row's result follows from, and whether a changed one is there.

Python's imports are followed as far as they are written down; sources that compilers read (.cu, .cuh, .hip ..) and data
count with the folder of a module that is reached. A file that this cannot place reaches every row: it is better to run
too much than to call something tested that was not.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ferryman.dispatch import registry
from ferryman.porting.ci import provenance
from ferryman.porting.ci.matrix import Matrix
from ferryman.porting.ci.row import ANY, Row

_BESIDE = (".cu", ".cuh", ".hip", ".cpp", ".cc", ".c", ".h", ".hpp", ".yaml", ".json", ".j2", ".ptx", ".s", ".toml")
_GLOB = re.compile(r"[*?\[]")
# Imports by their text: a syntax tree takes 20 times as long, and what stands in a string only makes the reach larger
_IMPORT = re.compile(
    r"(?:^|;)[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|(?:\\\n|[^\n;])+)|import[ \t]+((?:\\\n|[^\n;])+))",
    re.MULTILINE,
)
_WORD = re.compile(r"([\w.]+)(?:[ \t\n]+as[ \t]+\w+)?")
_CONFTEST = "conftest.py"
_CHECK = ("running/runner.py", "running/worker.py")  # the second runs in processes of its own: nothing imports it
_WAYS = {
    "simulated": ("running/simulated.py",),
    "stand-in": ("running/stand_in.py",),
    "compile": ("aot", "ci/compiled.py"),
}
_PACKAGE = "src/ferryman"  # where the suite ferryman's sources lie, in this project's own repository


@dataclass(frozen=True)
class Decision:
    """Whether a row is in, and why."""

    row: Row
    chosen: bool
    why: str


class Tree:
    """A repository's files and what its Python modules import from each other. ``root``: its folder."""

    def __init__(self, root: Path, matrix: Matrix) -> None:
        self.root, self.matrix = root, matrix
        self.files = _files(root)
        self._modules: dict[str, str] = {}
        for source in reversed(matrix.sources):  # an earlier one wins
            base = PurePosixPath(source).as_posix()
            prefix = "" if base == "." else base + "/"
            for name in self.files:
                if name.endswith(".py") and name.startswith(prefix):
                    dotted = name[len(prefix) : -3].replace("/", ".")
                    self._modules[dotted.removesuffix(".__init__")] = name
        self._beside: dict[str, list[str]] = {}
        for name in self.files:
            if name.endswith(_BESIDE):
                self._beside.setdefault(str(PurePosixPath(name).parent), []).append(name)
        self._imports: dict[str, frozenset[str]] = {}
        self._digests: dict[tuple[str, str], dict[str, str]] = {}

    def matching(self, patterns: Iterable[str]) -> list[str]:
        """Files that a path, a folder or a glob names."""
        matches = []
        for pattern in patterns:
            plain = pattern.split("::")[0].removeprefix("./").rstrip("/")
            if _GLOB.search(plain):
                fits = re.compile(fnmatch.translate(plain)).match
                matches += [f for f in self.files if fits(f)]
            elif plain in self._known:
                matches.append(plain)
            else:
                matches += [f for f in self.files if f.startswith(f"{plain}/")]
        return list(dict.fromkeys(matches))

    @functools.cached_property
    def folders(self) -> frozenset[str]:
        """Folders that hold modules."""
        return frozenset(str(PurePosixPath(file).parent) for file in self._modules.values())

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.files)

    @functools.cached_property
    def _always(self) -> frozenset[str]:
        return frozenset(self.matching(self.matrix.always))

    def imported(self, name: str) -> frozenset[str]:
        """Files of this repository that a module imports, wherever in its text."""
        if name not in self._imports:
            self._imports[name] = frozenset(self._read(name))
        return self._imports[name]

    def _read(self, name: str) -> Iterator[str]:
        try:
            text = (self.root / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return  # gone, or no file: its digest says so
        parts = self._by_file.get(name, "").split(".")
        if not name.endswith("__init__.py"):
            parts = parts[:-1]
        for match in _IMPORT.finditer(text):
            base, names, plain = match.groups()
            if plain is not None:
                for module in _words(plain):
                    yield from self._file_of(module)
                continue
            dots = len(base) - len(base.lstrip("."))
            kept = parts[: len(parts) - dots + 1] if dots else []
            package = ".".join([*kept, *([base[dots:]] if base[dots:] else [])])
            yield from self._file_of(package)
            for word in _words(names):
                yield from self._file_of(f"{package}.{word}")

    @functools.cached_property
    def _by_file(self) -> dict[str, str]:
        return {file: module for module, file in self._modules.items()}

    def _file_of(self, module: str) -> Iterator[str]:
        parts = module.split(".")
        for end in range(1, len(parts) + 1):  # a package's __init__ runs too
            if (file := self._modules.get(".".join(parts[:end]))) is not None:
                yield file

    def closure(self, roots: Iterable[str]) -> set[str]:
        """Roots, what they import, and what lies beside those."""
        reached: set[str] = set()
        folders: set[str] = set()
        waiting = list(roots)
        while waiting:
            name = waiting.pop()
            if name in reached:
                continue
            reached.add(name)
            if not name.endswith(".py"):
                continue
            waiting += self.imported(name) - reached
            folder = name.rpartition("/")[0] or "."
            if folder not in folders:
                folders.add(folder)
                reached.update(self._beside.get(folder, ()))
        return reached

    def reach(self, row: Row) -> set[str]:
        """Every file of the repository that a row's result follows from."""
        roots = self.matching([*row.tests, *row.kernels])
        roots += [word for word in row.command if word in self._known]
        for test in self.matching(row.tests):  # pytest imports every conftest.py on the way
            folders = [PurePosixPath(test).parent, *PurePosixPath(test).parent.parents]
            roots += [c for f in folders if (c := (f / _CONFTEST).as_posix()) in self._known]
        if row.suite in ("ferryman", "bench"):
            roots += [f for f in _menu_files(row.backend) if f in self._known]
            parts = (*_CHECK, *_WAYS.get(row.how, ()))
            roots += self.matching([f"{_PACKAGE}/porting/{part}" for part in parts])
            roots += self.matching([f"{_PACKAGE}/device_profiles/data/{row.device}.yaml"])
        if row.cases is not None:
            roots.append(row.cases)
        reached = self.closure(roots)
        if row.suite in ("ferryman", "bench"):
            reached -= {f for f in reached if _kernels_of_others(f, row.backend)}
        return (reached & self._known) | self._always

    def digests(self, row: Row) -> dict[str, str]:
        """SHA-256 of all that a row reaches, as it lies in the work tree, and of Ferryman's own ops."""
        if (row.id, row.digest) in self._digests:
            return self._digests[row.id, row.digest]
        digests = {}
        for name in sorted(self.reach(row)):
            path = self.root / name
            if path.is_file():
                digests[name] = provenance.file_digest(path)
        if row.suite in ("ferryman", "bench"):
            ops = [
                op for op in registry.primitives() if any(_serves(x.backend, row) for x in registry.implementations(op))
            ]
            digests |= {f"op:{op}": digest for op, digest in provenance.op_digests(ops).items()}
        self._digests[row.id, row.digest] = digests
        return digests


def _words(text: str) -> list[str]:
    """The names of an import's list, without comments and aliases."""
    return _WORD.findall(re.sub(r"#[^\n]*|\\\n", " ", text))


def _serves(backend: str, row: Row) -> bool:
    return row.backend in (ANY, backend)


def _files(root: Path) -> tuple[str, ...]:
    """What git knows or would; without git, every file that is not hidden."""
    try:
        listed = provenance.git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        return tuple(sorted(dict.fromkeys(name for name in listed if name)))
    except provenance.GitError:
        paths = (p.relative_to(root) for p in root.rglob("*") if p.is_file() and not p.is_symlink())
        return tuple(sorted(p.as_posix() for p in paths if not any(part.startswith(".") for part in p.parts)))


@functools.lru_cache(maxsize=32)
def _menu_files(backend: str) -> frozenset[str]:
    """Files of the kernels and meanings that a backend's menu lines name, as they lie in this project's repository."""
    paths: set[str] = set()
    for op, known in registry.primitives().items():
        for line in registry.implementations(op):
            if backend in (ANY, line.backend):
                paths |= set(_path_of(line.where.partition(":")[0]))
                family = known.body.__module__.rpartition(".")[0]
                paths |= {path for part in ("definition", "evidence") for path in _path_of(f"{family}.{part}")}
    paths |= set(_path_of(f"ferryman.backends.{backend}"))
    return frozenset(paths)


def _path_of(module: str) -> Iterator[str]:
    spec = importlib.util.find_spec(module) if module.startswith("ferryman.") else None
    if spec is not None and spec.origin is not None:
        parts = Path(spec.origin).parts
        yield "/".join(("src", *parts[len(parts) - 1 - parts[::-1].index("ferryman") :]))


def _kernels_of_others(name: str, backend: str) -> bool:
    """Whether a file holds kernels of another backend: folders are by op, and rows by backend."""
    if not name.startswith(f"{_PACKAGE}/ops/"):
        return False
    if name.endswith((".cuh", "simt_kernels.py")):
        return backend not in ("cuda", "hip", ANY)
    if name.endswith("_kernels.py") and backend != ANY:
        return name not in _menu_files(backend)
    return False


def changed(root: Path, base: str) -> list[str]:
    """Files that differ between the merge base with ``base`` and the work tree. Raises GitError: no such commit."""
    try:
        start = provenance.git(root, "merge-base", base, "HEAD").strip()
    except provenance.GitError as error:
        raise provenance.GitError(
            f"the base {base!r} is not here, or shares no history: {error}. Fetch it (a shallow clone has one commit: "
            "fetch-depth 0), or leave --base out and run every row"
        ) from error
    listed = provenance.git(root, "diff", "--name-only", "-z", "--no-renames", start).split("\0")
    fresh = provenance.git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
    return sorted({name for name in [*listed, *fresh] if name})


def decide(root: Path, matrix: Matrix, base: str | None, tree: Tree | None = None) -> list[Decision]:
    """Every row, in or out, and why. Without a base every row is in."""
    if base is None:
        return [Decision(row, True, "no base was named: every row runs") for row in matrix.rows]
    names = changed(root, base)
    tree = tree or Tree(root, matrix)
    return [_decision(tree, row, names, base) for row in matrix.rows]


def _decision(tree: Tree, row: Row, names: Sequence[str], base: str) -> Decision:
    if not names:
        return Decision(row, False, f"nothing differs from {base}")
    always, never, known = tree.matrix.always, tree.matrix.never, set(tree.files)
    reach = tree.reach(row)
    reached = [n for n in names if n in reach]
    if reached:
        more = f" and {len(reached) - 1} more" if len(reached) > 1 else ""
        return Decision(row, True, f"reaches {reached[0]}{more}")
    for name in names:
        if _any(name, always):
            return Decision(row, True, f"{name} concerns every row")
        if name not in known and not _any(name, never):
            return Decision(row, True, f"{name} is gone: nothing says who used it")
        if not name.endswith(".py") and not _any(name, never) and not _placed(name, tree):
            return Decision(row, True, f"nothing says who uses {name}")
    return Decision(row, False, f"none of {len(names)} changed files is among the {len(reach)} that it reaches")


def _placed(name: str, tree: Tree) -> bool:
    """Whether a file that is no Python lies beside modules, so that those that reach them reach it."""
    folder = str(PurePosixPath(name).parent)
    return name.endswith(_BESIDE) and folder in tree.folders


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(PurePosixPath(name).name, p) for p in patterns)
