"""The numeric fingerprint of a device: what its arithmetic does, measured (docs/fingerprint.md)."""

from ferryman.porting.fingerprint.collect import fingerprint
from ferryman.porting.fingerprint.compare import compare, compared, contradicted, supports, verify
from ferryman.porting.fingerprint.document import Fact, Fingerprint, dumps, load, schema

__all__ = [
    "Fact",
    "Fingerprint",
    "compare",
    "compared",
    "contradicted",
    "dumps",
    "fingerprint",
    "load",
    "schema",
    "supports",
    "verify",
]
