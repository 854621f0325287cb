"""Why edits of the norms' kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "add_layer_norm.triton.rows._norm",
        ("tl.load(weight_ptr + col, mask=inside, other=0.0) -> tl.load(weight_ptr + col)",),
        "What lies behind the weight is multiplied with columns past the row's end, which are not stored.",
    ),
    Equivalent(
        "rms_norm.triton.long._norm_long",
        ("0.0 -> 1.0 in y = y * widen(tl.load(weight_ptr + start + col, mask=mask, other=0.0))",),
        "Columns past the row's end are not stored.",
    ),
    Equivalent(
        "cuda.prepare",
        ("-> - 1 in if (L::FIT != RAGGED || column < end) load<AGAIN>(held[p], data + column);",),
        "Packs that are held have two elements or more: a column and the end are multiples of that.",
    ),
    Equivalent(
        "cuda.prepare",
        ("zero(held[p]) -> (held[p]) in else zero(held[p]);",),
        "Columns past the row's end are not stored.",
    ),
    Equivalent(
        "cuda.get",
        ("forget(held[p]) -> (held[p]) in forget(held[p]);",),
        "It tells the compiler to unpack again, and changes no value.",
    ),
    Equivalent(
        "cuda.get",
        (
            ">= -> > in if (p >= 0) {",
            "0 -> 1 in if (p >= 0) {",
            "p >= 0 -> false in if (p >= 0) {",
        ),
        "Weights that are not taken from registers are read again from where they were read.",
    ),
    Equivalent(
        "add_rms_norm.cuda.get",
        ("p >= 0 -> true in if (p >= 0) {",),
        "Rows that threads keep in part hold no weights of two tensors: p is never below 0.",
    ),
    Equivalent(
        "add_rms_norm.cuda.begin",
        ("row, n -> n, row in RmsNorm<L, W, CAST, 2>::begin(row, n);",),
        "It takes their product.",
    ),
    Equivalent(
        "cuda.run",
        (
            "Op::INPUTS == 2 -> false in if (AHEAD && more) fetch_register(held[p], other[Op::INPUTS == 2 ? p : 0], "
            "row + step, true, p);",
        ),
        "It has one input.",
    ),
    Equivalent(
        "add_rms_norm.triton.long._long_statistics",
        ("CENTRED -> (not (CENTRED)) in if CENTRED:",),
        "Where no mean is taken, the lanes' means are 0, and so is what they add.",
    ),
)
