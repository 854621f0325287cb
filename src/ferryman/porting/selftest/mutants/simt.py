"""Edits of the portable C++ kernels; NVRTC or hipRTC compiles them, so they run on a GPU."""

from __future__ import annotations

import functools

from ferryman.porting.selftest.planting import Bugs

BUGS = Bugs()
NORM, SOFTMAX, ACTIVATION, ROPE = (
    "ops/norm/norm.cuh", "ops/softmax/softmax.cuh", "ops/activation/activation.cuh", "ops/rope/rope.cuh",
)  # fmt: skip
SOFTMAX_BACKWARD = "ops/softmax/softmax_backward.cuh"
ROWS, PORTABLE = "backends/simt/rows.cuh", "backends/simt/portable.cuh"
edit = functools.partial(BUGS.edit, "simt")

edit(
    "eps",
    "rms_norm add_rms_norm",
    "eps_dropped",
    NORM,
    "scale = inverse_root<KEPT>(divide<KEPT>(squares, count) + eps);",
    "scale = inverse_root<KEPT>(divide<KEPT>(squares, count));",
    first="fill_tiny large_eps",
)
edit(
    "count of terms",
    "rms_norm",
    "mean_over_one_less",
    NORM,
    "divide<KEPT>(squares, count) + eps)",
    "squares / (count - 1.0f) + eps)",
    first="prime",
)
edit(
    "another function",
    "layer_norm",
    "second_moment_not_centred",
    NORM,
    "float centred = values[i] - mean;",
    "float centred = values[i];",
    first="fill_offset",
)
edit(
    "another function",
    "layer_norm",
    "mean_not_subtracted",
    NORM,
    "values[i] = (values[i] - mean) * scale;",
    "values[i] = values[i] * scale;",
    first="prime",
)
edit("sign", "layer_norm", "bias_subtracted", NORM, "; ++i) values[i] += b[i];", "; ++i) values[i] -= b[i];",
     first="prime")  # fmt: skip
edit(
    "half a wave lost",
    "layer_norm",
    "mean_of_one_lane",
    NORM,
    "mean = divide<KEPT>(reduction.template reduce<Sum>(sum), count);",
    "mean = (0.0f * reduction.template reduce<Sum>(sum) + sum) / count;",
    first="fill_offset prime",
)
edit(
    "arguments swapped",
    "add_rms_norm",
    "residual_stored_for_the_sum",
    NORM,
    "store(sum_row + column, x);",
    "store(sum_row + column, residual);",
    first="prime",
)
edit(
    "overflow inside",
    "softmax",
    "without_the_maximum",
    SOFTMAX,
    "largest = platform::fmax(largest, values[i]);",
    "largest = platform::fmax(0.0f, 0.0f * values[i]);",
    first="fill_offset",
)
edit(
    "half a wave lost",
    "softmax",
    "sum_of_one_lane",
    SOFTMAX,
    "reciprocal = divide<L::WORDS>(1.0f, reduction.template reduce<Sum>(sum));",
    "reciprocal = 1.0f / sum;",
    first="prime",
)
edit(
    "half a wave lost",
    "rms_norm softmax layer_norm",
    "reduction_over_half_the_lanes",
    PORTABLE,
    "for (int mask = WIDTH / 2; mask > 0; mask /= 2)",
    "for (int mask = WIDTH / 4; mask > 0; mask /= 2)",
    first="prime",
)
edit(
    "half a wave lost",
    "rms_norm",
    "last_wave_not_read",
    PORTABLE,
    "value = wave_reduce<R, WIDTH>(part < WAVES ?",
    "value = wave_reduce<R, WIDTH>(part < WAVES - 1 ?",
    first="wide",
)
edit(
    "missing barrier",
    "rms_norm softmax",
    "partials_read_without_a_barrier",
    PORTABLE,
    "platform::barrier();\n            int part",
    "int part",
    first="wide",
    harmless="a race: a warp may happen to be in time",
)
edit(
    "missing barrier",
    "softmax layer_norm",
    "one_half_for_every_reduction",
    PORTABLE,
    "half ^= 1;",
    "half ^= 0;",
    first="wide",
    harmless="a race: a warp may happen to be in time",
)
edit(
    "stale output",
    "rms_norm softmax",
    "last_column_outside",
    ROWS,
    "return L::FIT != RAGGED || column < end;",
    "return L::FIT != RAGGED || column < end - 1;",
    first="prime",
)
edit(
    "strides ignored",
    "rms_norm softmax layer_norm",
    "row_stride_is_the_width",
    ROWS,
    "return (const T*)in.data + row * in.stride + column;",
    "return (const T*)in.data + row * n + column;",
    first="layout_rows",
)
edit(
    "rounding direction",
    "rms_norm silu_mul softmax",
    "truncated_to_bfloat16",
    PORTABLE,
    "u32 pair(float low, float high) { return platform::bf16_pair(low, high); }",
    "u32 pair(float low, float high) {\n        return (platform::bits_of(low) >> 16) | (platform::bits_of(high) & "
    "0xffff0000u);\n    }",
    first="prime",
)
edit(
    "another function",
    "softmax",
    "exponential_in_base_two",
    PORTABLE,
    "return platform::quick_exp2(v * LOG2_E);",
    "return platform::quick_exp2(v);",
    first="prime",
)
edit(
    "sign",
    "silu_mul",
    "sigmoid_of_the_other_side",
    ACTIVATION,
    "return (v < 0.0f ? e : 1.0f)",
    "return (v < 0.0f ? 1.0f : e)",
    first="prime",
)
edit(
    "stale output",
    "silu_mul gelu_mul",
    "last_of_the_tail_skipped",
    ACTIVATION,
    "platform::block_index() == 0 && at < n)",
    "platform::block_index() == 0 && at + 1 < n)",
    first="prime",
)
edit(
    "another function",
    "gelu_mul",
    "cubic_term_of_three_digits",
    ACTIVATION,
    "0.0713548163f * (v * v)",
    "0.0713f * (v * v)",
    first="fill_moderate",
)
edit(
    "arguments swapped",
    "gelu_mul",
    "gate_and_up_swapped",
    ACTIVATION,
    "a[i] = Act::template apply<T>(a[i]) * b[i];",
    "a[i] = Act::template apply<T>(b[i]) * a[i];",
    first="prime",
)
edit(
    "strides ignored",
    "silu_mul",
    "up_walked_with_the_gates_stride",
    ACTIVATION,
    "op{gate, up, y, gate_stride, up_stride, n};",
    "op{gate, up, y, gate_stride, gate_stride, n};",
    first="layout_rows",
)
edit(
    "gradient term missing",
    "silu_mul_backward gelu_mul_backward",
    "slope_of_the_factor_left_out",
    ACTIVATION,
    "d[i] * b[i] * (factor + a[i] * slope);",
    "d[i] * b[i] * factor;",
    first="prime",
)
edit(
    "arguments swapped",
    "silu_mul_backward gelu_mul_backward",
    "gradients_of_gate_and_up_swapped",
    ACTIVATION,
    "store(grad_gate + row * width + column, in.gate);\n        store(grad_up + row * width + column, in.up);",
    "store(grad_gate + row * width + column, in.up);\n        store(grad_up + row * width + column, in.gate);",
    first="prime",
)
edit(
    "strides ignored",
    "silu_mul_backward",
    "up_walked_with_the_gates_stride",
    ACTIVATION,
    "grad_stride, gate_stride, up_stride, n};",
    "grad_stride, gate_stride, gate_stride, n};",
    first="layout_rows",
)
edit(
    "another function",
    "gelu_mul gelu_mul_backward",
    "tail_of_the_other_side",
    ACTIVATION,
    "return v < 0.0f ? tail : 1.0f - tail;",
    "return v < 0.0f ? 1.0f - tail : tail;",
    first="erf_prime",
)
edit(
    "angle tables",
    "rope",
    "low_sine_for_both",
    ROPE,
    "sin.data + b * sin.batch + (s + t * apart) * sin.token + column);",
    "sin.data + b * sin.batch + (s + t * apart) * sin.token + column % (rotary / 2));",
    first="d64",
)
edit(
    "angle tables",
    "rope",
    "first_batch_serves_all",
    ROPE,
    "(const C*)cos.data + b * cos.batch + (s + t * apart) * cos.token + column",
    "(const C*)cos.data + (s + t * apart) * cos.token + column",
    first="per_batch",
)
edit(
    "sign",
    "rope",
    "rotated_backwards",
    ROPE,
    "factor.word[i] ^= first != BACKWARD ? ALL : 0u;",
    "factor.word[i] ^= first == BACKWARD ? ALL : 0u;",
    first="d64",
)
edit(
    "stale output",
    "rope",
    "last_head_skipped",
    ROPE,
    "const int q_heads = (int)q.heads, all_heads = q_heads + (int)k.heads;",
    "const int q_heads = (int)q.heads, all_heads = q_heads + (int)k.heads - 1;",
    first="d64",
)
edit(
    "angle tables",
    "rope_backward",
    "sines_stay_with_their_elements",
    ROPE,
    "if constexpr (BACKWARD) factor = partner<INTERLEAVED>(sin, across);",
    "if constexpr (BACKWARD) factor = sin;",
    first="d64",
)
edit(
    "gradient term missing",
    "softmax_backward",
    "sum_left_out",
    SOFTMAX_BACKWARD,
    "a[i] = b[i] * (a[i] - sum);",
    "a[i] = b[i] * a[i];",
    first="prime",
)
edit(
    "strides ignored",
    "softmax_backward",
    "rows_of_y_are_those_of_grad",
    SOFTMAX_BACKWARD,
    "(const T*)y.data + row * y.stride",
    "(const T*)y.data + row * grad.stride",
    first="layout_rows",
)
edit(
    "launch geometry",
    "softmax",
    "stride_argument_is_the_width",
    "ops/softmax/simt_kernels.py",
    "(source, stride, result, rows, n,",
    "(source, n, result, rows, n,",
    first="layout_rows",
)
