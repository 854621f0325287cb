"""Why edits of the kernels of softmax and cross entropy, and rules over them, change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "cross_entropy_backward.torch",
        (
            "denominator_in_bfloat16",
            "first_term",
            "half_a_wave",
            "last_term",
            "maximum_of_128",
            "no_maximum",
            "padding_counted",
            "splits_in_bfloat16",
            "sums_in_bfloat16",
            "sums_in_float16",
            "tail",
            "tile_twice",
        ),
        "No softmax is left in it: it takes exp(logits - lse) with the lse that is given, and sums over no columns.",
    ),
    Equivalent(
        "cross_entropy_backward.torch",
        (
            "computed_in_place.grad",
            "computed_in_place.lse",
            "computed_in_place.target",
            "inputs_swapped.grad_logits",
            "inputs_swapped.logits_target",
            "inputs_swapped.target_lse",
        ),
        "The loss's gradient is one number, the lse has one of a row, targets are whole numbers: no two are of one "
        "shape and dtype, nor is a result.",
    ),
    Equivalent(
        "cross_entropy_backward.torch",
        ("read_as_if_contiguous.grad", "read_as_if_contiguous.lse", "reversed_rows.grad"),
        "One number has no strides and no order; the lse is saved by forward without gaps.",
    ),
    Equivalent(
        "cross_entropy_backward.torch",
        ("infinity_clamped.grad_logits", "saturated_at_448.grad_logits"),
        "A softmax less an indicator, times a finite number: below 448.",
    ),
    Equivalent(
        "cross_entropy_inplace_grad_backward.torch",
        ("computed_in_place.grad", "read_as_if_contiguous.grad", "reversed_rows.grad"),
        "The loss's gradient is one number: it has no strides and no order, and no result has its shape.",
    ),
    Equivalent(
        "cross_entropy_inplace_grad_backward.torch",
        ("infinity_clamped.grad_logits", "saturated_at_448.grad_logits"),
        "What it multiplies is a gradient of at most 1, by a finite number below 448.",
    ),
    Equivalent(
        "cross_entropy_inplace_grad_backward.torch",
        ("in_storage_precision",),
        "It is one product, which is rounded once in any precision.",
    ),
    Equivalent(
        "cross_entropy_inplace_grad.triton.long._inverse_count",
        (
            "count += (mask & (label != ignore_index)).to(tl.int32) -> "
            "count = (count + (mask & (label != ignore_index)).to(tl.int32)).to(tl.float16).to(tl.float32)",
        ),
        "Each of 1024 lanes counts its own rows: float16 rounds from 2049 on, of more than two million rows.",
    ),
    Equivalent(
        "cross_entropy_inplace_grad.triton.rows._loss_over_short",
        ("x_ptr -> target_ptr in p = exp(distance, x_ptr.dtype.element_ty == tl.float32) - even",),
        "Interpreted, exp is one function. Compiled, float32 would get the form for 16 bits: a GPU alone can show it.",
    ),
    Equivalent(
        "softmax.triton.long._merge",
        ('0.0 -> 1.0 in shift = tl.where(tl.abs(larger) == float("inf"), 0.0, larger)',),
        "What stands for an infinite maximum is discarded: a lane that saw nothing gets 0 on the next line, and a row "
        "whose maximum is +inf is NaN whatever its sum.",
    ),
    Equivalent(
        "cross_entropy.triton.long._mean_loss",
        ("(mask & (label != ignore_index)).to(tl.int32) -> (mask & (label != ignore_index))",),
        "A truth value that is added to whole numbers counts 1.",
    ),
    Equivalent(
        "cross_entropy.triton.rows._loss_short",
        ("0 -> 1.0 in label = tl.load(target_ptr + first + line, mask=inside, other=0)",),
        "A row past the last picks no logit, and is not stored.",
    ),
    Equivalent(
        "softmax_backward.triton.long._softmax_long_backward",
        (
            "widen(tl.load(y_ptr + start + col, mask=mask, other=0.0)) -> "
            "(tl.load(y_ptr + start + col, mask=mask, other=0.0))",
        ),
        "The gradient that it meets is float32 already, and widens it.",
    ),
    Equivalent(
        "softmax_backward.triton.long._softmax_long_backward",
        ("0.0 -> 1.0 in g = widen(tl.load(grad_ptr + start + col, mask=mask, other=0.0))",),
        "Past the row's end it meets a 0 of y, or is not stored.",
    ),
    Equivalent(
        "softmax.cuda.add",
        (
            "largest, values[i] -> values[i], largest in if constexpr (PASS == 0) largest = platform::fmax(largest, "
            "values[i]);",
        ),
        "A maximum of two does not ask which is the first.",
    ),
    Equivalent(
        "softmax.cuda.run",
        (
            "Op::INPUTS == 2 -> false in if (AHEAD && more) fetch_register(held[p], other[Op::INPUTS == 2 ? p : 0], "
            "row + step, true, p);",
        ),
        "It has one input.",
    ),
    Equivalent(
        "softmax.cuda.unpack",
        ("< -> <= in for (int i = 0; i < V; ++i) out[i] = platform::float_of(pack.word[i]);",),
        "Nothing reads a number behind the pack's last.",
    ),
    Equivalent(
        "softmax_backward.cuda.stream",
        ("- -> + in const i64 packs = (n + L::LANES * L::V - 1) / (L::LANES * L::V) - L::PACKS;",),
        "Packs past the row's end are passed over.",
    ),
    Equivalent(
        "softmax_backward.cuda.softmax_backward",
        ("base += blocks / L::CLUSTER * L::ROWS; -> base = ferryman_narrow(base + (blocks / L::CLUSTER * L::ROWS));",),
        "Only of long rows does a block take several. More than 256, whose numbers 8 bits do not hold, are no small "
        "case.",
    ),
    Equivalent(
        "softmax_backward.cuda.softmax_backward",
        ("-> - 1 in for (int i = 0; i < L::PACKS; ++i) disguise(g[i], change), disguise(p[i], change);",),
        "It changes no bit: the compiler alone must not know that.",
    ),
    Equivalent(
        "cross_entropy_backward.triton._loss_backward",
        ("tl.load(lse_ptr + first + line, mask=inside, other=0.0) -> tl.load(lse_ptr + first + line)",),
        "Rows past the last are not stored.",
    ),
    Equivalent(
        "cross_entropy_backward.triton._loss_backward",
        ("0.0 -> 1.0 in lse = tl.where(counted, lse, 0.0)",),
        "An ignored row's log-sum-exp meets logits and a scale of 0: whatever finite number it is, the gradient is a "
        "zero, of either sign.",
    ),
    Equivalent(
        "cross_entropy_inplace_grad_backward.triton.rows._scale_over",
        ("rows - first -> (rows + first) in mask = (col < width - start) & (row < rows - first)",),
        "The H200 that is simulated gives few rows a program each. Where a check is interpreted for a CPU, a program "
        "has several.",
    ),
)
