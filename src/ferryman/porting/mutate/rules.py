"""What no edit of a source expresses, as rules over any op: aliasing, stale memory, kept results, changed inputs,
streams."""

from __future__ import annotations

from ferryman.porting.mutate import arguments, memory, results, streams
from ferryman.porting.mutate.rule import Rule

RULES: tuple[Rule, ...] = tuple(
    one for module in (results, memory, arguments, streams) for one in vars(module).values() if isinstance(one, Rule)
)
