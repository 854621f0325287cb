"""Executes gfx942 (CDNA3) and gfx950 (CDNA4) code on a CPU, with NumPy: the assembly that Triton and HIP compile to.

`assembly` reads the text; `operations` is the table that `scalar`, `vector_integer`, `vector_float`, `lanes`, `access`,
`lds`, `atomics`, `matrix`, `control` and `newer` fill; `machine` holds the registers of many waves, `program` decodes a
kernel and schedules them; `memory` and `lds.Shadow` find what hardware would not tell. docs/simulator.md.
"""
