"""The metadata of a code object's kernels, checked as far as it is read."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from ferryman.errors import AssemblyError


class _Entry(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Argument(_Entry):
    offset: StrictInt = Field(alias=".offset", ge=0, le=1 << 16)
    size: StrictInt = Field(alias=".size", ge=0, le=1 << 16)
    value_kind: StrictStr = Field(alias=".value_kind")


class _KernelEntry(_Entry):
    """What is read of a kernel's metadata; code objects may hold more."""

    name: StrictStr = Field(alias=".name")
    arguments: list[_Argument] = Field(default=[], alias=".args")
    kernarg_segment_size: StrictInt = Field(default=0, alias=".kernarg_segment_size", ge=0, le=1 << 16)
    max_flat_workgroup_size: StrictInt = Field(default=1024, alias=".max_flat_workgroup_size", ge=1, le=1024)
    wavefront_size: StrictInt = Field(default=64, alias=".wavefront_size")
    vgpr_count: StrictInt = Field(default=0, alias=".vgpr_count", ge=0)


class _Metadata(_Entry):
    kernels: list[_KernelEntry] = Field(alias="amdhsa.kernels")


def read(text: str, line: int) -> Any:
    """The metadata of a text that begins behind this line. Raises AssemblyError."""
    try:
        raw = yaml.safe_load(text)
        _Metadata.model_validate(raw)
    except yaml.YAMLError as error:
        raise AssemblyError(f"line {line}: the metadata is no YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise AssemblyError(f"line {line}: the metadata is damaged: {place}: {first['msg']}") from error
    return raw
