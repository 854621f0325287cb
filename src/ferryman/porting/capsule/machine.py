"""What is written down of the machine that records: driver, clocks, power, and the flags that change arithmetic."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import torch

from ferryman.backends.precision import float32_precision
from ferryman.porting.capsule.contents import Machine
from ferryman.porting.running.process import flushes_subnormals

_AMD_DRIVER = Path("/sys/module/amdgpu/version")
_NVIDIA = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
# Each can change which kernel runs, or the bits that it gives.
_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_LOG_LEVEL",
    "TRITON_INTERPRET",
    "ROCBLAS_INTERNAL_FP16_ALT_IMPL",
    "HIPBLASLT_ALLOW_TF32",
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "FERRYMAN_BACKEND",
    "FERRYMAN_PROFILE",
)


def machine(device: torch.device) -> Machine:
    """Read from the driver's own tools; what none of them says stays out."""
    flags = _flags()
    if device.type != "cuda":
        return Machine(flags=flags, memory_bytes=_host_memory(), source="no accelerator")
    memory = int(torch.cuda.get_device_properties(device).total_memory)
    if torch.version.hip:
        return _amd(device, flags, memory)
    return _nvidia(device, flags, memory)


def _flags() -> dict[str, str | bool]:
    flags: dict[str, str | bool] = {
        "cuda_matmul_tf32": float32_precision() == "tf32",
        "cudnn_tf32": bool(torch.backends.cudnn.allow_tf32),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
        "flush_denormal": flushes_subnormals(),
    }
    return flags | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _nvidia(device: torch.device, flags: dict[str, str | bool], memory: int) -> Machine:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return Machine(flags=flags, memory_bytes=memory, source="no nvidia-smi")
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = f"GPU-{uuid}" if uuid is not None else str(device.index or 0)
    command = [smi, f"--query-gpu={','.join(_NVIDIA)}", "--format=csv,noheader,nounits", "-i", which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Machine(flags=flags, memory_bytes=memory, source=f"nvidia-smi failed: {type(error).__name__}")
    if done.returncode:
        return Machine(flags=flags, memory_bytes=memory, source=f"nvidia-smi ended with {done.returncode}")
    return from_nvidia_smi(done.stdout, flags, memory)


def from_nvidia_smi(text: str, flags: dict[str, str | bool], memory: int) -> Machine:
    """One line of its CSV; a field that a partition or a board does not have reads "[N/A]"."""
    fields = [field.strip() for field in (text.splitlines() or [""])[0].split(",")]
    said = dict(zip(_NVIDIA, fields, strict=False))

    def numbers(**wanted: str) -> dict[str, float]:
        readings = {name: _number(said.get(field, "")) for name, field in wanted.items()}
        return {name: value for name, value in readings.items() if value is not None}

    return Machine(
        driver=said.get("driver_version") or None,
        clocks_mhz=numbers(sm="clocks.sm", memory="clocks.mem", sm_max="clocks.max.sm", memory_max="clocks.max.mem"),
        power_watts=numbers(draw="power.draw", limit="power.limit"),
        temperature_celsius=_number(said.get("temperature.gpu", "")),
        memory_bytes=memory,
        flags=flags,
        source="nvidia-smi",
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _amd(device: torch.device, flags: dict[str, str | bool], memory: int) -> Machine:
    driver = _AMD_DRIVER.read_text(encoding="utf-8").strip() if _AMD_DRIVER.exists() else None
    try:  # torch asks amdsmi, an optional package of ROCm's
        clock, watts = float(torch.cuda.clock_rate(device)), torch.cuda.power_draw(device) / 1e3
        heat = float(torch.cuda.temperature(device))
    except (ModuleNotFoundError, RuntimeError) as error:
        return Machine(driver=driver, flags=flags, memory_bytes=memory, source=f"no amdsmi: {type(error).__name__}")
    return Machine(
        driver=driver,
        clocks_mhz={"sm": clock},
        power_watts={"draw": watts},
        temperature_celsius=heat,
        memory_bytes=memory,
        flags=flags,
        source="amdsmi",
    )
