"""Edits of the Triton kernels of the norms."""

from __future__ import annotations

import functools

from ferryman.porting.selftest.planting import Bugs

BUGS = Bugs()
NORM, LANG = "ops/norm/triton_kernels.py", "backends/triton_lang.py"
SHORT_ROWS = {"max_threads": 256}  # float32 rows of 4099 are then long ones
SEVERAL = {"vendor": "cpu"}  # tiles of several rows, also where there are few rows
edit = functools.partial(BUGS.edit, "triton")

# --------------------------------------------------------------------------------------------------------------- norms

edit(
    "eps",
    "rms_norm",
    "eps_dropped",
    NORM,
    "y = x * inverse_root(variance + eps)[:, None]",
    "y = x * inverse_root(variance)[:, None]",
    first="fill_tiny",
)
edit(
    "count of terms",
    "rms_norm layer_norm",
    "mean_over_the_block",
    NORM,
    "variance = _over(tl.sum(x * x, 1), n, WHOLE, BLOCK)",
    "variance = tl.div_rn(tl.sum(x * x, 1), BLOCK + 0.0)",
    first="prime",
)
edit(
    "count of terms",
    "layer_norm",
    "padding_in_the_variance",
    NORM,
    "tl.sum(x, 1), n, WHOLE, BLOCK)\n        x = tl.where(inside if WHOLE else mask, x - mean[:, None], 0.0)",
    "tl.sum(x, 1), n, WHOLE, BLOCK)\n        x = x - mean[:, None]",
    first="fill_offset prime",
)
edit(
    "count of terms",
    "layer_norm",
    "mean_over_one_less",
    NORM,
    "mean = _over(tl.sum(x, 1), n, WHOLE, BLOCK)\n",
    "mean = tl.div_rn(tl.sum(x, 1), n - 1.0)\n",
    first="prime",
)
edit(
    "cancellation",
    "layer_norm",
    "variance_as_a_difference",
    NORM,
    "variance = _over(tl.sum(x * x, 1), n, WHOLE, BLOCK)\n",
    "variance = tl.div_rn(tl.sum(x * x, 1), n)\n    if CENTRED:\n        raw = tl.where(mask, x + mean[:, None], 0.0)\n"
    "        variance = tl.div_rn(tl.sum(raw * raw, 1), n) - mean * mean\n",
    first="fill_offset",
)
edit(
    "strides ignored",
    "rms_norm add_rms_norm",
    "row_stride_is_the_width",
    NORM,
    "x = widen(tl.load(x_ptr + first * x_stride + (row * x_stride + col), mask=mask, other=0.0))\n    if residual_ptr",
    "x = widen(tl.load(x_ptr + first * width + (row * width + col), mask=mask, other=0.0))\n    if residual_ptr",
    first="layout_rows",
)
edit(
    "strides ignored",
    "add_rms_norm",
    "residual_walked_with_xs_stride",
    NORM,
    "other = residual_ptr + first * residual_stride + (row * residual_stride + col)",
    "other = residual_ptr + first * x_stride + (row * x_stride + col)",
    first="layout_rows",
    harmless="where every case lays x and residual out alike, their strides are one",
)
edit(
    "tail left out",
    "rms_norm",
    "weight_of_the_last_column_masked",
    NORM,
    "y = y * widen(tl.load(weight_ptr + col, mask=inside, other=0.0))",
    "y = y * widen(tl.load(weight_ptr + col, mask=col < width - 1, other=0.0))",
)
edit(
    "sign",
    "layer_norm",
    "bias_subtracted",
    NORM,
    "y = y + widen(tl.load(bias_ptr + col, mask=inside, other=0.0))",
    "y = y - widen(tl.load(bias_ptr + col, mask=inside, other=0.0))",
)
edit(
    "launch geometry",
    "rms_norm",
    "grid_rounded_down",
    NORM,
    "grid = (triton.cdiv(rows, tile.rows),)\n        launch(_norm,",
    "grid = (rows // tile.rows,)\n        launch(_norm,",
    first="prime",
    target=SEVERAL,
)
edit(
    "stale output",
    "rms_norm add_rms_norm",
    "last_row_of_the_tile_masked",
    NORM,
    "mask = inside & (row < rows - first)\n    x = widen(tl.load(x_ptr",
    "mask = inside & (row < rows - first - 1)\n    x = widen(tl.load(x_ptr",
    first="prime",
    target=SEVERAL,
)
edit(
    "stale output",
    "add_rms_norm",
    "sum_never_stored",
    NORM,
    "tl.store(sum_ptr + first * width + (row * width + col), total, mask=mask)",
    "tl.store(sum_ptr + first * width + (row * width + col), total, mask=mask & (col < width - 1))",
)
edit(
    "another function",
    "layer_norm",
    "mean_not_subtracted_in_long_rows",
    NORM,
    "y = (x - mean) * scale\n",
    "y = x * scale\n",
    first="wide",
    target=SHORT_ROWS,
)
edit(
    "gradient factor",
    "rms_norm_backward layer_norm_backward",
    "inner_mean_not_scaled",
    NORM,
    "out = scaled - unit * _over(products * scale, n, WHOLE, BLOCK)[:, None]",
    "out = scaled - unit * _over(products, n, WHOLE, BLOCK)[:, None]",
)
edit(
    "gradient factor",
    "rms_norm_backward",
    "weight_gradient_of_the_raw_input",
    NORM,
    "product = tl.where(mask, g * unit, 0.0)",
    "product = tl.where(mask, g * x, 0.0)",
)
edit(
    "gradient factor",
    "layer_norm_backward",
    "bias_gradient_of_scaled_values",
    NORM,
    "bias_sum += tl.sum(tl.reshape(g, [",
    "bias_sum += 1.01 * tl.sum(tl.reshape(g, [",
)
edit(
    "gradient term missing",
    "layer_norm_backward",
    "mean_of_the_gradient_forgotten",
    NORM,
    "out -= _over(g_sum, n, WHOLE, BLOCK)[:, None]",
    "out -= 0.0 * g_sum[:, None]",
)
edit(
    "gradient term missing",
    "add_rms_norm_backward",
    "residual_gradient_forgotten",
    NORM,
    "out += widen(extra)\n",
    "out += 0.0 * widen(extra)\n",
)
edit(
    "tail left out",
    "rms_norm_backward",
    "last_program_not_added",
    NORM,
    "mask = (row < programs - start) & (col < width)[None, :]",
    "mask = (row < programs - start - 1) & (col < width)[None, :]",
    first="prime",
)
edit(
    "accumulator of the storage dtype",
    "rms_norm_backward layer_norm_backward",
    "partials_added_in_float16",
    NORM,
    "result = tl.sum(total, 0)",
    "result = tl.sum(total.to(tl.float16), 0).to(tl.float32)",
    first="prime",
)
edit(
    "gradient term missing",
    "layer_norm_backward",
    "columns_not_centred",
    NORM,
    "x -= tl.load(statistics_ptr + row, mask=row < rows, other=0.0)[:, None]",
    "x -= 0.0 * tl.load(statistics_ptr + row, mask=row < rows, other=0.0)[:, None]",
    first="wide",
    target=SHORT_ROWS,
)
edit(
    "gradient factor",
    "rms_norm_backward",
    "inner_sum_not_scaled_in_long_rows",
    NORM,
    "inner += tl.where(mask, g * ((x - mean) * scale), 0.0)",
    "inner += tl.where(mask, g * (x - mean), 0.0)",
    first="wide",
    target=SHORT_ROWS,
)
edit(
    "subnormals flushed",
    "rms_norm",
    "narrow_through_float16",
    LANG,
    "def narrow(x, dtype: tl.constexpr):",
    "def narrow(x, dtype: tl.constexpr):\n    x = x.to(tl.float16).to(tl.float32)",
    first="fill_large fill_tiny",
)
