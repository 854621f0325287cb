"""Signatures of records, by `ssh-keygen -Y` (OpenSSH 8.2 or newer): ed25519, agents, hardware tokens, as for git.

A key speaks for one vendor's device. FILE of --require-signed is an allowed-signers file whose principals are patterns
of VENDOR/DEVICE, so that the key of one runner cannot sign for another's:

    amd/mi300x namespaces="ferryman-ci" ssh-ed25519 AAAA.. the runner with the MI300X
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ferryman.errors import FerrymanError

NAMESPACE = "ferryman-ci"
_SECONDS = 30


class SigningError(FerrymanError, RuntimeError):
    """Nothing could be signed or verified; the message has what ssh-keygen said."""


def sign(path: Path, key: Path) -> Path:
    """Signs a file with a private key (or a public one whose private half an agent holds); gives the .sig beside it."""
    signature = path.with_name(path.name + ".sig")
    signature.unlink(missing_ok=True)
    _keygen("-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE, str(path))
    if not signature.is_file():
        raise SigningError(f"ssh-keygen wrote no {signature.name}")
    return signature


def verify(path: Path, signature: Path, allowed: Path, identity: str) -> str | None:
    """None where a key that may speak for ``identity`` (VENDOR/DEVICE) signed the file; else why not."""
    if not allowed.is_file():
        raise SigningError(f"{allowed} is not there; --require-signed takes an allowed-signers file (ssh-keygen(1))")
    try:
        _keygen("-Y", "verify", "-f", str(allowed), "-I", identity, "-n", NAMESPACE, "-s", str(signature), data=path)
    except SigningError as error:
        return str(error)
    return None


def _keygen(*arguments: str, data: Path | None = None) -> None:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise SigningError("ssh-keygen is not here; signatures need OpenSSH 8.2 or newer (openssh-client)")
    try:
        done = subprocess.run(
            [program, *arguments],
            input=None if data is None else data.read_bytes(),
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:  # a key with a passphrase asks for it
        raise SigningError(
            f"ssh-keygen did not answer in {_SECONDS} s; use a key without a passphrase, or an agent"
        ) from error
    if done.returncode:
        said = (done.stderr + done.stdout).decode(errors="replace").strip().splitlines()
        raise SigningError(f"ssh-keygen {arguments[1]}: {said[-1][:300] if said else f'exit code {done.returncode}'}")
