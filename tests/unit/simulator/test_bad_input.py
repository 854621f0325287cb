"""What the simulator must refuse, with an error that says what and where: damaged text, impossible launches."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ferryman.backends.simulator import assembly
from ferryman.backends.simulator.device import Simulator, _triton_arguments
from ferryman.backends.simulator.memory import Region
from ferryman.backends.simulator.program import Program, Report
from ferryman.device_profiles import profile
from ferryman.dispatch.select import target_of
from ferryman.errors import AssemblyError, FerrymanError, SimulationError, UnimplementedInstruction
from tests.cli.run import ferryman

# out[workgroup * 64 + lane] = number + lane, with a loop that ends and 1 KiB of LDS that it only asks for
TEXT = """\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
\t.amdhsa_code_object_version 5
\t.text
\t.globl\tadd
\t.p2align\t8
\t.type\tadd,@function
add:                                    ; @add
\t.file\t1 "/src" "add.hip"
\t.loc\t1 7 3
\ts_load_dwordx2 s[4:5], s[0:1], 0x0
\ts_load_dword s6, s[0:1], 0x8
\ts_lshl_b32 s7, s2, 6
\ts_mov_b32 s8, 3
\ts_waitcnt lgkmcnt(0)
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\ts_sub_u32 s8, s8, 1
\ts_cmp_lg_u32 s8, 0
\ts_cbranch_scc1 .LBB0_1
\t.loc\t1 9 3
\tv_add_u32_e32 v1, s6, v0
\tv_add_u32_e32 v2, s7, v0
\tv_lshlrev_b32_e32 v2, 2, v2
\tglobal_store_dword v2, v1, s[4:5]
\ts_endpgm
\t.section\t.rodata,"a",@progbits
\t.p2align\t6, 0x0
\t.amdhsa_kernel add
\t\t.amdhsa_group_segment_fixed_size 1024
\t\t.amdhsa_private_segment_fixed_size 0
\t\t.amdhsa_kernarg_size 12
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t\t.amdhsa_next_free_vgpr 3
\t\t.amdhsa_next_free_sgpr 9
\t.end_amdhsa_kernel
\t.text
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
      - .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
    .group_segment_fixed_size: 1024
    .kernarg_segment_size: 12
    .max_flat_workgroup_size: 256
    .name:           add
    .wavefront_size: 64
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
...
\t.end_amdgpu_metadata
"""
LINES = TEXT.splitlines()


def line_of(part: str) -> int:
    return next(n for n, line in enumerate(LINES, 1) if part in line)


def program(text: str = TEXT, arch: str = "gfx942") -> Program:
    (kernel,) = assembly.kernels(text).values()
    return Program(kernel, arch)


def launch(
    text: str = TEXT, grid: tuple[int, int, int] = (2, 1, 1), threads: int = 64, **more: Any
) -> tuple[Report, Any]:
    out = np.zeros(128, np.uint32)
    arguments = more.pop("arguments", None)
    if arguments is None:
        arguments = int(out.ctypes.data).to_bytes(8, "little") + (5).to_bytes(4, "little")
    region = Region(out.ctypes.data, out.ctypes.data + out.nbytes, "out")
    more.setdefault("budget", 10_000)  # damage may make a loop that does not end
    return program(text).run(grid, threads, arguments, [region], **more), out


def test_the_text_that_the_tests_damage_is_sound() -> None:
    report, out = launch()
    assert not report.findings
    assert (out == np.tile(np.arange(64, dtype=np.uint32) + 5, 2)).all()


# --------------------------------------------------------------------------------------------------- damaged text


@pytest.mark.parametrize("step", [1, 7])
def test_text_that_is_cut_off_is_refused_wherever_it_ends(step: int) -> None:
    """Between lines, and within them. Whole again is what has the kernel, its descriptor and its metadata."""
    whole = TEXT.index("\t.end_amdgpu_metadata") + len("\t.end_amdgpu_metadata")
    ends = range(0, len(TEXT), step) if step > 1 else [m.start() for m in re.finditer("\n", TEXT)]
    for end in ends:
        if end >= whole:
            continue
        with pytest.raises(AssemblyError) as caught:
            assembly.kernels(TEXT[:end])
        assert str(caught.value), end


def test_a_cut_names_what_is_missing() -> None:
    for part, message in (
        (".end_amdhsa_kernel", "the descriptor of add has no end: the text is cut off"),
        (".end_amdgpu_metadata", f"line {line_of('.amdgpu_metadata')}: the metadata has no end: the text is cut off"),
        (".amdgpu_metadata", "kernel add has no metadata: the text is cut off"),
        (".amdhsa_kernel add", "no kernel in this text"),
    ):
        with pytest.raises(AssemblyError, match=re.escape(message)):
            assembly.kernels("\n".join(LINES[: line_of(part) - 1]))


@pytest.mark.parametrize(
    "old", [line for line in LINES if line.startswith("\t") and not line.startswith(("\t.", "\t\t"))]
)
def test_no_damage_to_an_instruction_is_a_raw_python_error(old: str) -> None:
    """Operands dropped, doubled, or replaced; brackets, numbers and names broken."""
    words = old.strip().split(" ", 1)
    mnemonic, rest = words[0], words[1] if len(words) > 1 else ""
    parts = assembly.split(rest)
    damaged = [f"{mnemonic} {', '.join(parts[:i] + parts[i + 1 :])}" for i in range(len(parts))]
    damaged += [f"{mnemonic} {', '.join([*parts, 'v0'])}", mnemonic, f"{mnemonic} {rest}]", f"{mnemonic} {rest[:-1]}"]
    for wrong in (
        "v[0:1]",
        "s[2:3]",
        "v999",
        "s[5:4]",
        "1.5",
        "0x",
        "off",
        "label",
        "v[",
        "[s0,v1]",
        "a0",
        "|v0|",
        "-s2",
    ):
        damaged += [f"{mnemonic} {', '.join([*parts[:i], wrong, *parts[i + 1 :]])}" for i in range(len(parts))]
    for text in damaged:
        if text.strip() == old.strip():
            continue
        try:
            launch(TEXT.replace(old, "\t" + text))
        except FerrymanError as error:
            assert str(error), text
        # else: the damage made another instruction that is sound, as `s_mov_b32 s8, 1.5`


@pytest.mark.daily(7)
@pytest.mark.parametrize("old", [line for line in LINES if line.startswith(("\t.", "\t\t.", "  ", "      ", "amd"))])
@pytest.mark.parametrize("how", ["empty", "half", "doubled", "rest"])
def test_no_damage_to_a_directive_is_a_raw_python_error(old: str, how: str) -> None:
    word, _, rest = old.strip().partition(" ")
    new = {
        "empty": word.split("\t")[0],
        "half": old[: len(old) // 2],
        "doubled": old + " " + rest + rest,
        "rest": old + ", ]",
    }[how]
    try:
        launch(TEXT.replace(old, new))
    except FerrymanError as error:
        assert str(error), new


def test_an_unknown_directive_is_named_with_its_line() -> None:
    number = line_of("s_mov_b32 s8")
    text = TEXT.replace("\ts_mov_b32 s8, 3", "\t.amdgpu_wonder 3\n\ts_mov_b32 s8, 3")
    with pytest.raises(AssemblyError, match=f"^line {number}: unknown directive .amdgpu_wonder"):
        assembly.kernels(text)


def test_an_unknown_instruction_is_named_with_its_kernel_and_line() -> None:
    text = TEXT.replace("v_add_u32_e32 v1, s6, v0", "v_wonder_u32_e32 v1, s6, v0")
    message = (
        "v_wonder_u32 is not implemented for gfx942: v_wonder_u32_e32 v1, s6, v0 (kernel add, line "
        f"{line_of('v1, s6')}); docs/simulator.md"
    )
    with pytest.raises(UnimplementedInstruction, match=re.escape(message)):
        program(text)


def test_an_instruction_of_the_newer_arch_is_refused_on_the_older() -> None:
    text = TEXT.replace("v_add_u32_e32 v1, s6, v0", "v_permlane32_swap_b32_e32 v1, v0")
    with pytest.raises(UnimplementedInstruction, match="v_permlane32_swap_b32 is not implemented for gfx942"):
        program(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("s_cbranch_scc1 .LBB0_1", "s_cbranch_scc1 .LBB0_9", "a branch to no label of this kernel: .*line 18"),
        ("s_waitcnt lgkmcnt(0)", "s_waitcnt wonder(0)", "line 14"),
        ("\ts_endpgm\n", "", "control leaves the code"),
        ("v_add_u32_e32 v1, s6, v0", "v_add_u32_e32 v1, s6", "line 20"),
        ("amdhsa.kernels:", "amdhsa.kernels: [", "the metadata is no YAML"),
        (".name:           add", ".name:           sub", "kernel add has no metadata"),
        ("amdhsa.kernels:", "amdhsa.wonders:", "the metadata is damaged: amdhsa.kernels: Field required"),
        (".offset:         8", ".offset:         eight", r"the metadata is damaged: amdhsa.kernels.0..args.1..offset"),
    ],
)
def test_damage_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        launch(TEXT.replace(old, new))


# ------------------------------------------------------------------------------------------------------- launches


def test_a_kernel_that_loops_for_ever_is_stopped() -> None:
    text = TEXT.replace("s_cbranch_scc1 .LBB0_1", "s_branch .LBB0_1")
    with pytest.raises(
        SimulationError, match=r"add: stopped after \d+ wave-instructions near line 16 \(s_sub_u32 s8, s8, 1\)"
    ):
        launch(text)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"grid": (1 << 13, 1 << 12, 1)},
            "add: a grid of (8192, 4096, 1) is 33554432 workgroups; the simulator runs up to",
        ),
        ({"grid": (-1, 1, 1)}, "add: a grid of (-1, 1, 1)"),
        ({"threads": 257}, "add: workgroups of 257 threads, the kernel was compiled for 1 to 256"),
        ({"threads": 0}, "add: workgroups of 0 threads"),
        ({"dynamic_lds": 65_536}, "add: 66560 bytes of LDS for a workgroup, the device has 65536"),
        ({"arguments": bytes(8)}, "add: 8 bytes of arguments, the kernel takes 12 to 12"),
        ({"arguments": bytes(20)}, "add: 20 bytes of arguments, the kernel takes 12 to 12"),
    ],
)
def test_a_launch_that_a_device_would_refuse(more: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=re.escape(message)):
        launch(**more)


def test_a_pointer_to_nothing_is_a_finding_and_touches_nothing() -> None:
    report, out = launch(arguments=(1 << 47).to_bytes(8, "little") + bytes(4))
    assert [f.kind for f in report.findings] == ["out-of-bounds"] and not out.any()
    assert report.findings[0].source == "add.hip:9"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([(torch.zeros(4), "*fp32"), (1, "i64")], "add: i64 for an argument of 4 bytes"),
        ([(torch.zeros(4), "*fp32"), (1, "i32"), (2, "i32")], "add: 3 arguments, its metadata has 2"),
    ],
)
def test_arguments_that_do_not_fit_the_metadata(values: list[tuple[Any, str]], message: str) -> None:
    with pytest.raises(SimulationError, match=re.escape(message)):
        _triton_arguments(program(), values)


@pytest.mark.parametrize(
    ("args", "message"), [((1, 2, 3), "3 arguments, its metadata has 2"), ((1, 2), "an argument of 4 bytes got 2")]
)
def test_arguments_of_a_unit_that_do_not_fit(
    args: tuple[Any, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ferryman.backends import simt_offline
    from ferryman.backends.simt import Unit

    monkeypatch.setattr(simt_offline, "assembly", lambda unit, arch, keep=True: TEXT)
    simulator = Simulator(target_of(profile("mi300x")))
    with pytest.raises(SimulationError, match=f"add: {message}"):
        simulator.launch(Unit("add", ""), torch.device("cpu"), 1, 64, 0, args)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: program(arch="gfx950"), "add is compiled for gfx942, the device is gfx950"),
        (lambda: program(arch="gfx90a"), "the simulator executes gfx942, gfx950; this kernel is for gfx90a"),
        (
            lambda: program(TEXT.replace("wavefront_size: 64", "wavefront_size: 32")),
            "add is compiled for waves of 32 lanes; those of gfx942 have 64",
        ),
        (lambda: Simulator(target_of(profile("rx7900xtx"))), "executes gfx942, gfx950; gfx1100 is none of them"),
        (lambda: Simulator(target_of(profile("h200"))), "sm_90 is none of them"),
    ],
)
def test_another_arch_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SimulationError, match=re.escape(message)):
        make()


# --------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--device", "h200"),
            "check: --device is h200 (sm_90); required: a device of gfx942 or gfx950: mi300x, mi355x",
        ),
        (("--device", "rx7900xtx"), "check: --device is rx7900xtx (gfx1100); required: a device of gfx942 or gfx950"),
        (("--device", "cpu"), "required: a device of gfx942 or gfx950"),
        (("--device", "mi300y"), "unknown device profile 'mi300y'; nearest: mi300x"),
        (("--backend", "cuda"), "check: --backend is cuda; required: triton or hip beside simulated"),
        (("--backend", "simulator"), "unknown backend or implementation 'simulator'"),
        (("--op", "rmsnorm"), "unknown op 'rmsnorm'; nearest: rms_norm"),
        (("--dtype", "f8"), "unknown dtype 'f8'"),
        (("--tier", "vast"), "unknown tier 'vast'"),
        (("--model", "qwen3"), "check: --model is given; required: no --backend simulated beside it"),
        (("--full",), "check: --full is given; required: no --backend simulated beside it"),
    ],
)
def test_bad_use_of_the_command_is_one_message(arguments: tuple[str, ...], message: str) -> None:
    done = ferryman("check", "--backend", "simulated", *arguments)
    assert done.code == 2 and message in done.err, done.err
    assert done.err.startswith("ferryman: ") and "Traceback" not in done.err and not done.out
