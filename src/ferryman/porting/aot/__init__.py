"""Compiling every kernel ahead of time, for devices that are not here: `ferryman compile`.

`targets` reads what was asked for, `groups` lists the kernels and `calls` those of models, `worker` compiles them in
processes that may die or hang (`pool` drives those), `cache` keeps what was compiled, `gates` judges it against the
profile, `runner` puts it together and writes the folder that `ferryman.backends.artefacts` reads.
"""

from ferryman.porting.aot.groups import Shapes
from ferryman.porting.aot.runner import TIMEOUT_SECONDS, Compiled, compile_all, write
from ferryman.porting.aot.targets import profiles_for

__all__ = ["TIMEOUT_SECONDS", "Compiled", "Shapes", "compile_all", "profiles_for", "write"]
