"""Edits of the Triton kernels of softmax and cross entropy."""

from __future__ import annotations

import functools

from ferryman.porting.selftest.edits import Edit
from ferryman.porting.selftest.planting import Bugs

BUGS = Bugs()
SOFTMAX = "ops/softmax/triton_kernels.py"
# Edits that change no result: long rows, and wide tiles of classes, in several pieces.
SMALL_BLOCK = Edit(
    SOFTMAX, "import LONG_BLOCK, collapse_rows, long_warps, row_tile\n",
    "import collapse_rows, long_warps, row_tile\n\nLONG_BLOCK = 1024\n",
)  # fmt: skip
NARROW_LOSS = Edit(SOFTMAX, "tile = row_tile(target, min(width, 4096),", "tile = row_tile(target, min(width, 64),")
SEVERAL = {"vendor": "cpu"}  # tiles of several rows, also where there are few rows
edit = functools.partial(BUGS.edit, "triton")

# ---------------------------------------------------------------------------------------------- softmax, cross entropy

edit(
    "count of terms",
    "softmax",
    "padding_counted",
    SOFTMAX,
    'mask=mask, other=float("-inf")))\n    # a maximum',
    "mask=mask, other=0.0))\n    # a maximum",
    first="prime",
)
edit(
    "overflow inside",
    "softmax",
    "without_the_maximum",
    SOFTMAX,
    "e = exp(x - _finite(tl.max(x, 1))[:, None], ",
    "e = exp(x, ",
    first="fill_offset fill_large",
)
edit(
    "rows mixed",
    "softmax",
    "maximum_over_the_tile",
    SOFTMAX,
    "e = exp(x - _finite(tl.max(x, 1))[:, None], ",
    "e = exp(x - _finite(tl.max(tl.max(x, 1), 0)), ",
    first="fill_large",
    target=SEVERAL,
)
edit(
    "approximate function",
    "softmax",
    "quick_exponential",
    SOFTMAX,
    "y_ptr.dtype.element_ty == tl.float32)\n    y = e *",
    "False)\n    y = e *",
    first="fill_offset",
    harmless="Triton's interpreter has one exponential; compiled, float32 shows it",
)
edit(
    "undeclared rounding",
    "softmax",
    "rounded_terms_summed",
    SOFTMAX,
    "y = e * tl.div_rn(1.0, tl.sum(e, 1))[:, None]",
    "e = widen(narrow(e, y_ptr.dtype.element_ty))\n    y = e * tl.div_rn(1.0, tl.sum(e, 1))[:, None]",
    first="prime",
)
edit(
    "gradient factor",
    "softmax_backward",
    "sum_of_the_gradient_alone",
    SOFTMAX,
    "out = y * (g - tl.sum(g * y, 1)[:, None])",
    "out = y * (g - tl.sum(g, 1)[:, None])",
)
edit(
    "strides ignored",
    "softmax_backward",
    "gradient_walked_with_ys_stride",
    SOFTMAX,
    "g = widen(tl.load(grad_ptr + first * grad_stride + (row * grad_stride + col), mask=mask, other=0.0))",
    "g = widen(tl.load(grad_ptr + first * y_stride + (row * y_stride + col), mask=mask, other=0.0))",
    first="layout_rows",
)
edit(
    "online softmax",
    "cross_entropy",
    "running_sum_not_rescaled",
    SOFTMAX,
    "total = total * tl.exp(maximum - shift) + tl.sum",
    "total = total + tl.sum",
    first="wide",
    under=(SMALL_BLOCK,),
)
edit(
    "online softmax",
    "cross_entropy",
    "lanes_merged_without_rescaling",
    SOFTMAX,
    "tl.where(total == 0.0, 0.0, total * scale)",
    "tl.where(total == 0.0, 0.0, total)",
    first="wide",
    under=(SMALL_BLOCK,),
)
edit(
    "count of terms",
    "cross_entropy",
    "padding_of_the_last_block_counted",
    SOFTMAX,
    'x = widen(tl.load(x_ptr + start + place, mask=mask, other=float("-inf")))',
    "x = widen(tl.load(x_ptr + start + place, mask=mask, other=0.0))",
    first="wide",
    under=(SMALL_BLOCK,),
)
edit(
    "labels",
    "cross_entropy",
    "smoothed_loss_without_the_log_sum_exp",
    SOFTMAX,
    "tl.where(mask, x, 0.0), 1), width + 0.0)\n        loss = (1.0 - smoothing) * loss + smoothing * (lse - mean)",
    "tl.where(mask, x, 0.0), 1), width + 0.0)\n        loss = (1.0 - smoothing) * loss - smoothing * mean",
    first="smoothing",
)
edit(
    "count of terms",
    "cross_entropy",
    "smoothing_over_the_block",
    SOFTMAX,
    "mean = tl.div_rn(tl.sum(tl.where(mask, x, 0.0), 1), width + 0.0)",
    "mean = tl.div_rn(tl.sum(tl.where(mask, x, 0.0), 1), BLOCK + 0.0)",
    first="smoothing_ignored",
)
edit(
    "count of terms",
    "cross_entropy cross_entropy_backward",
    "ignored_rows_counted",
    SOFTMAX,
    "count += (mask & (label != ignore_index)).to(tl.int32)",
    "count += mask.to(tl.int32)",
    first="ignored",
)
edit(
    "count of terms",
    "cross_entropy cross_entropy_backward",
    "padding_rows_counted",
    SOFTMAX,
    "count += (mask & (label != ignore_index)).to(tl.int32)",
    "count += (label != ignore_index).to(tl.int32)",
    first="prime",
)
edit(
    "labels",
    "cross_entropy",
    "ignored_rows_kept",
    SOFTMAX,
    "tl.store(loss_ptr + first + line, tl.where(label == ignore_index, 0.0, loss), mask=inside)",
    "tl.store(loss_ptr + first + line, loss, mask=inside)",
    first="ignored",
)
edit(
    "labels",
    "cross_entropy_backward",
    "smoothing_over_the_tile",
    SOFTMAX,
    "even = tl.div_rn(smoothing, width + 0.0)",
    "even = tl.div_rn(smoothing, BLOCK + 0.0)",
    first="smoothing_ignored",
)
edit(
    "labels",
    "cross_entropy_backward",
    "label_not_moved_into_the_tile",
    SOFTMAX,
    "hot = tl.where(valid, label - start, -1).to(tl.int32)",
    "hot = tl.where(valid, label, -1).to(tl.int32)",
    first="prime",
    under=(NARROW_LOSS,),
)
edit(
    "empty rows",
    "cross_entropy_backward",
    "ignored_rows_get_their_softmax",
    SOFTMAX,
    'scale = tl.where(counted, tl.where(valid, scale, float("nan")), 0.0)',
    "counted = inside",
    first="ignored",
)
