"""A Ray cluster to run on: our own, made for one command and ended with it, or one that is there already.

Our own has no dashboard and sends no usage statistics. Its files and its token lie in a temporary folder; what ends is
the processes that it began, by their ids.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferryman.device_profiles import Profile
from ferryman.errors import ArgumentError, FerrymanError

ON = re.compile(r"ray(?:@(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:]+\]):(?P<port>[0-9]{1,5}))?")
CONNECT_SECONDS = 5.0
PREFIX = "ferryman:"  # of the resources that a node declares: ferryman:nvidia, ferryman:h200
_STORE_BYTES = 128 << 20  # cells are small
_LONGEST = 60  # a socket's path may have 107 bytes, and Ray appends 45


class FleetError(FerrymanError, RuntimeError):
    """A cluster cannot be reached, has no node for the claim, or runs another Ferryman; the message says which."""


@dataclass(frozen=True)
class Claim:
    """What one worker holds while it works: a core, or a whole GPU of one vendor and profile."""

    device: str  # "cpu", or "cuda": Ray shows a worker only the GPU that it claimed
    resources: Mapping[str, float]

    @classmethod
    def of(cls, known: Profile) -> Claim:
        if known.vendor == "cpu":
            return cls("cpu", {"CPU": 1})
        return cls("cuda", {"CPU": 1, "GPU": 1, f"{PREFIX}{known.vendor}": 1, f"{PREFIX}{known.name}": 1})

    def options(self) -> dict[str, Any]:
        """Of a Ray task. Ray retries nothing by itself: the driver does, and counts."""
        own = {name: n for name, n in self.resources.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "resources": own,
            "max_retries": 0,
        }

    def fits(self, offered: Mapping[str, float]) -> int:
        """How many workers a node's resources hold at once."""
        return int(min(offered.get(name, 0.0) // n for name, n in self.resources.items()))

    def __str__(self) -> str:
        return ", ".join(f"{name} {n:g}" for name, n in self.resources.items())


def address(on: str) -> str | None:
    """HOST:PORT of ``ray@HOST:PORT``; None for ``ray``, a cluster of our own. Raises ArgumentError."""
    match = ON.fullmatch(on)
    if match is None or int(match["port"] or 1) not in range(1, 65536):
        raise ArgumentError("fleet", "--on", on, "ray (a cluster on this machine), or ray@HOST:PORT")
    return None if match["host"] is None else f"{match['host']}:{match['port']}"


def import_ray() -> Any:
    """Ray, told to send nothing. Raises FleetError where it is not installed."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError as error:
        raise FleetError(f"--on ray needs Ray ({error}); pip install 'ferryman[fleet]'") from error
    return ray


@contextlib.contextmanager
def connected(on: str, workers: int) -> Iterator[Any]:
    """Ray's module, connected while the block runs. ``workers``: cores of a cluster of our own.

    Raises ArgumentError for an address that is none, FleetError for one where nothing answers.
    """
    where = address(on)
    with contextlib.ExitStack() as stack:
        if where is None:
            folder = stack.enter_context(_folder())
            stack.enter_context(_environment(_token(folder)))  # before Ray is imported, which reads it then
        ray = import_ray()
        if ray.is_initialized():
            raise FleetError("this process uses a Ray cluster already; run ferryman in a process of its own")
        if where is None:
            options: dict[str, Any] = {
                "num_cpus": workers,
                "_temp_dir": str(folder),
                "object_store_memory": _STORE_BYTES,
                "include_dashboard": False,
            }
        else:
            _answers(where)
            options = {"address": where}
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", configure_logging=True, **options)
        except Exception as error:  # Ray has no class for what fails here
            ray.shutdown()
            place = f"the Ray cluster at {where}" if where else "a Ray cluster on this machine"
            said = (str(error).strip().splitlines() or ["no message"])[0][:300]
            raise FleetError(f"{place} cannot be used: {type(error).__name__}: {said}") from error
        stack.callback(ray.shutdown)  # ends the processes that `init` began, and of a cluster at an address none
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # Ray tells of dead workers where a document goes
        yield ray


def _answers(where: str) -> None:
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise FleetError(
            f"no Ray cluster answers at {where}: {error.strerror or error}; required: the address that "
            "`ray start --head` printed, reachable from here"
        ) from error


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder of this user alone, with a short path, outside the home."""
    base = Path(tempfile.gettempdir())
    try:
        inside = base.resolve().is_relative_to(Path.home().resolve())
    except RuntimeError:  # no home is known
        inside = False
    if inside or len(str(base)) > _LONGEST - 20:
        base = Path("/tmp")
    folder = Path(tempfile.mkdtemp(prefix="ferryman-", dir=base))
    try:
        yield folder
    finally:
        for _ in range(20):  # what ends may still write
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def _token(folder: Path) -> dict[str, str]:
    path = folder / "token"
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def nodes(ray: Any) -> list[dict[str, Any]]:
    """The nodes that live."""
    return [node for node in ray.nodes() if node["Alive"]]


def slots(ray: Any, claim: Claim) -> int:
    """How many workers the cluster holds at once."""
    return sum(claim.fits(node["Resources"]) for node in nodes(ray))


def require(ray: Any, claim: Claim) -> int:
    """`slots`. Raises FleetError where it is none, with what the nodes offer."""
    count = slots(ray, claim)
    if not count:
        offered = "; ".join(f"{n['NodeManagerAddress']}: {_offer(n['Resources'])}" for n in nodes(ray))
        raise FleetError(
            f"no node of the cluster has {claim}; the nodes have {offered or 'nothing'}. A node declares it: "
            f"ray start .. --resources '{_declaration(claim)}'"
        )
    return count


def _offer(resources: Mapping[str, float]) -> str:
    shown = {k: v for k, v in resources.items() if not k.startswith(("node:", "memory", "object_store"))}
    return ", ".join(f"{name} {n:g}" for name, n in sorted(shown.items())) or "nothing"


def _declaration(claim: Claim) -> str:
    own = [f'"{name}": 1' for name in claim.resources if name.startswith(PREFIX)]
    return f"{{{', '.join(own)}}}"
