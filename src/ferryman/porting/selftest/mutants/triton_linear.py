"""Edits of the Triton kernels of linear layers."""

from __future__ import annotations

import functools

from ferryman.porting.selftest.planting import Bugs

BUGS = Bugs()
MATMUL = "ops/matmul/triton_kernels.py"
edit = functools.partial(BUGS.edit, "triton")

# -------------------------------------------------------------------------------------------------------------- linear

edit(
    "tail left out",
    "linear linear_backward",
    "k_tail_dropped",
    MATMUL,
    "for start in range(0, k, BLOCK_K):",
    "for start in range(0, k - BLOCK_K + 1, BLOCK_K):",
    first="ragged",
)
edit(
    "tail left out",
    "linear",
    "last_k_masked",
    MATMUL,
    "a = tl.load(a_ptrs, mask=(depth < k - start)[None, :], other=0.0)",
    "a = tl.load(a_ptrs, mask=(depth < k - start - 1)[None, :], other=0.0)",
    first="ragged",
)
edit(
    "accumulator of the storage dtype",
    "linear",
    "accumulator_in_storage_dtype",
    MATMUL,
    "total_sum = tl.dot(a, b, total_sum, input_precision=PRECISION)",
    "total_sum = tl.dot(a, b, total_sum, input_precision=PRECISION).to(a.dtype).to(tl.float32)",
    first="ragged tile_edge",
)
edit(
    "accumulator of the storage dtype",
    "linear_backward",
    "partial_products_rounded",
    MATMUL,
    "total_sum = tl.dot(a, b, total_sum, input_precision=PRECISION)",
    "total_sum += tl.dot(a, b, input_precision=PRECISION).to(tl.float16).to(tl.float32)",
    first="ragged",
)
edit(
    "tile taken twice",
    "linear",
    "a_advances_one_less",
    MATMUL,
    "a_ptrs += BLOCK_K * a_col",
    "a_ptrs += (BLOCK_K - 1) * a_col",
    first="ragged",
)
edit(
    "arguments swapped",
    "linear",
    "bias_of_the_first_tile",
    MATMUL,
    "total_sum += widen(tl.load(bias_ptr + tile_n + col, mask=b_inside, other=0.0))[None, :]",
    "total_sum += widen(tl.load(bias_ptr + col, mask=b_inside, other=0.0))[None, :]",
    first="ragged",
)
edit(
    "launch geometry",
    "linear linear_backward",
    "tiles_of_a_full_group",
    MATMUL,
    "tile_m = (group * GROUP + within % tall) * BLOCK_M",
    "tile_m = (group * GROUP + within % GROUP) * BLOCK_M",
    first="tile_edge",
)
edit(
    "undeclared rounding",
    "linear",
    "tf32_products",
    MATMUL,
    "total_sum = tl.dot(a, b, total_sum, input_precision=PRECISION)",
    'total_sum = tl.dot(a, b, total_sum, input_precision="tf32")',
    first="square",
    harmless="Triton's interpreter multiplies float32 exactly; a matrix unit does not",
)
edit(
    "stale output",
    "linear",
    "last_column_of_the_tile_masked",
    MATMUL,
    "b_inside = col < n - tile_n\n",
    "b_inside = col < n - tile_n - 1\n",
    first="ragged",
)
edit(
    "transposed operand",
    "linear_backward",
    "square_weight_transposed",
    MATMUL,
    "_product(_rows(grad), _matrix(weight), None, target)",
    "_product(_rows(grad), _matrix(weight.t() if weight.shape[0] == weight.shape[1] else weight), None, target)",
    first="square",
)
edit(
    "tail left out",
    "linear_backward",
    "last_row_not_in_the_bias_gradient",
    MATMUL,
    "grad_bias = grad.reshape(rows, weight.shape[0]).sum(0,",
    "grad_bias = grad.reshape(rows, weight.shape[0])[:-1].sum(0,",
    first="ragged",
)
edit(
    "launch geometry",
    "linear",
    "tile_columns_taken_for_rows",
    MATMUL,
    "tile_n = (within // tall) * BLOCK_N",
    "tile_n = (within % across) * BLOCK_N",
    first="tile_edge",
)
