"""Where a cell's time goes, by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class Laps:
    """Seconds of named parts, each from the end of the part before; what comes twice is added."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, clock()
        self._seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        now = self._clock()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> dict[str, float]:
        return {part: round(seconds, 3) for part, seconds in self._seconds.items()}
