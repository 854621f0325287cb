"""Launches as Triton's JIT prepares them, for a device that is not here: its driver is replaced by a name.

    python artefacts_worker.py profile family dtype       FERRYMAN_ARTEFACTS names the folder

Prints what was compiled and what was not, and what was warned of. Everything short of the launch is the JIT's own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"


class Driver:
    """What the JIT asks of a driver before it launches."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def main(name: str, family: str, dtype: str) -> dict[str, Any]:
    import torch
    import triton
    from triton.runtime.driver import driver

    from ferryman.backends import artefacts, triton_host
    from ferryman.backends import triton as backend
    from ferryman.device_profiles import profile
    from ferryman.dispatch.select import target_of
    from ferryman.errors import CompileError

    torch.cuda.is_current_stream_capturing = lambda: False
    target = target_of(profile(name))
    backend._arch_of = lambda device: target.arch
    driver.set_active(Driver(backend.gpu_target(target.arch)))
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda **facts: compiled.append(facts["src"].name)
    loaded: list[str] = []
    keys: list[bool] = []
    hosted: list[bool] = []
    store = artefacts.store()
    refused: list[str] = []
    specialise = backend.specialise

    def launched(kernel: Any, args: Any, meta: Any) -> Any:
        if "_ferryman_guard" not in kernel.__dict__:
            backend._install_guard(kernel)
        before = len(compiled)
        one = specialise(kernel, args, meta)
        kernel.device_caches.clear()
        try:
            compiled_kernel = kernel.run(*args, grid=(1,), warmup=True, **meta)
        except CompileError as error:
            refused.append(error.log)
            return one
        if len(compiled) == before:
            loaded.append(compiled_kernel.asm["cubin" if target.vendor == "nvidia" else "hsaco"][:4].hex())
            keys.append(compiled_kernel.hash == backend.TritonBackend().key(one, target.arch))
            if store is not None and target.vendor == "nvidia":
                needed = triton_host.texts(compiled_kernel.src).items()
                hosted.extend(store.module(n, triton_host.digest(t), triton_host.abi()) is not None for n, t in needed)
        return one

    backend.specialise = launched  # every launch of the family's own launchers passes here
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        importlib.import_module(f"ferryman.ops.{family}.triton_kernels").specialisations(target, dtype)
    texts = [str(w.message) for w in said if "artefact" in str(w.message)]
    return {
        "compiled": compiled,
        "loaded": loaded,
        "keys": keys,
        "hosted": hosted,
        "refused": refused,
        "warnings": texts,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
