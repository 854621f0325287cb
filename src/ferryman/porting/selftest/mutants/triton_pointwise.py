"""Edits of the Triton kernels that work element by element: gated activations, rotary embedding."""

from __future__ import annotations

import functools

from ferryman.porting.selftest.planting import Bugs

BUGS = Bugs()
ACTIVATION, ROPE, LANG = "ops/activation/triton_kernels.py", "ops/rope/triton_kernels.py", "backends/triton_lang.py"
edit = functools.partial(BUGS.edit, "triton")

# --------------------------------------------------------------------------------------------------- gated activations

edit(
    "undeclared rounding",
    "silu_mul gelu_mul",
    "activation_rounded",
    ACTIVATION,
    "y = narrow(g * factor * u, y_ptr.dtype.element_ty)",
    "y = narrow(widen(narrow(g * factor, y_ptr.dtype.element_ty)) * u, y_ptr.dtype.element_ty)",
    first="prime",
)
edit(
    "strides ignored",
    "silu_mul gelu_mul",
    "up_walked_with_the_gates_stride",
    ACTIVATION,
    "u = widen(tl.load(up_ptr + first * up_stride + start + (row * up_stride + col), mask=mask))\n    factor, _",
    "u = widen(tl.load(up_ptr + first * gate_stride + start + (row * gate_stride + col), mask=mask))\n    factor, _",
    first="layout_rows",
)
edit(
    "another function",
    "gelu_mul gelu_mul_backward",
    "cubic_term_of_three_digits",
    ACTIVATION,
    "x * (1.0 + 0.044715 * square), EXACT)",
    "x * (1.0 + 0.0447 * square), EXACT)",
    first="fill_moderate prime",
)
edit(
    "NaN injected",
    "gelu_mul_backward",
    "square_not_bounded",
    ACTIVATION,
    "bounded = tl.minimum(square, 1e8)",
    "bounded = square",
    first="fill_nonfinite fill_moderate",
    harmless="the square is infinite from gates of 1.8e19 on, which no fill holds",
)
edit(
    "gradient factor",
    "silu_mul_backward",
    "slope_of_the_square",
    ACTIVATION,
    "return s, s * rest\n",
    "return s, s * s\n",
)
edit(
    "gradient factor",
    "silu_mul_backward gelu_mul_backward",
    "up_in_place_of_gate",
    ACTIVATION,
    "narrow(d * (g * factor), grad_up_ptr.dtype.element_ty)",
    "narrow(d * u * factor, grad_up_ptr.dtype.element_ty)",
)
edit(
    "overflow inside",
    "silu_mul_backward gelu_mul_backward",
    "gradient_times_gate_first",
    ACTIVATION,
    "narrow(d * (g * factor), grad_up_ptr.dtype.element_ty)",
    "narrow(d * g * factor, grad_up_ptr.dtype.element_ty)",
)
edit(
    "stale output",
    "silu_mul",
    "last_column_of_the_tile_masked",
    ACTIVATION,
    "mask = col < width - start\n    if ROWS > 1:",
    "mask = col < width - start - 1\n    if ROWS > 1:",
)
edit(
    "launch geometry",
    "silu_mul gelu_mul_backward",
    "blocks_rounded_down",
    ACTIVATION,
    "triton.cdiv(rows, together) * triton.cdiv(width, block),)",
    "triton.cdiv(rows, together) * (width // block),)",
    first="prime",
)
edit(
    "approximate function",
    "gelu_mul",
    "polynomial_of_four_digits",
    LANG,
    "q = q * t + 0.13962705433368683",
    "q = q * t + 0.1396",
    first="erf_prime erf_fill_moderate",
)
edit(
    "approximate function",
    "silu_mul",
    "sigmoid_by_halves",
    LANG,
    "large = reciprocal(1.0 + e)\n    small = e * large",
    "large = reciprocal(1.0 + e).to(tl.float16).to(tl.float32)\n    small = e * large",
    first="prime",
)

# ----------------------------------------------------------------------------------------------------- rotary embedding

edit(
    "angle tables",
    "rope_backward",
    "first_sine_for_both",
    ROPE,
    "first = a * first_cos + b * second_sin",
    "first = a * first_cos + b * first_sin",
    first="d64",
)
edit(
    "angle tables",
    "rope",
    "first_sine_for_both",
    ROPE,
    "second = b * second_cos + a * second_sin",
    "second = b * second_cos + a * first_sin",
    first="d64",
)
edit(
    "sign",
    "rope",
    "rotated_backwards",
    ROPE,
    "first = a * first_cos - b * first_sin\n        second = b * second_cos + a * second_sin",
    "first = a * first_cos + b * first_sin\n        second = b * second_cos - a * second_sin",
    first="d64",
)
edit(
    "angle tables",
    "rope rope_backward",
    "first_batch_serves_all",
    ROPE,
    "cos_ptr += batch * cos_batch + token * cos_token",
    "cos_ptr += token * cos_token",
    first="per_batch",
)
edit(
    "stale output",
    "rope",
    "last_of_the_rest_masked",
    ROPE,
    "mask = inside & (rest < dim)",
    "mask = inside & (rest < dim - 1)",
    first="partial interleaved_partial",
)
edit(
    "stale output",
    "rope",
    "last_pair_masked",
    ROPE,
    "mask = inside & (col < rotary)",
    "mask = inside & (col < rotary - 2)",
    first="interleaved",
)
edit(
    "launch geometry",
    "rope_backward",
    "grid_without_the_batch",
    ROPE,
    "grid = (batch * triton.cdiv(tokens, token_lines) * blocks,)",
    "grid = (triton.cdiv(tokens, token_lines) * blocks,)",
    first="decode per_batch",
)
edit(
    "undeclared rounding",
    "rope",
    "products_rounded",
    ROPE,
    "first = a * first_cos - b * first_sin",
    "first = widen(narrow(a * first_cos, dtype)) - widen(narrow(b * first_sin, dtype))",
    first="d64 contiguous",
)
edit(
    "launch geometry",
    "rope",
    "last_head_of_a_block_skipped",
    ROPE,
    "for _ in range(tl.minimum(q_heads - head, HEADS)):",
    "for _ in range(tl.minimum(q_heads - head, HEADS) - 1):",
    first="fill_offset",
)
