"""Why edits of the rotary kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "rope.triton._angles",
        ("(line < lines) & (col < rotary) -> (col < rotary)",),
        "A line past the last turns pairs that are not stored.",
    ),
    Equivalent(
        "rope.triton._rotate",
        ("0.0 -> 1.0 in a = widen(tl.load(x_ptr + (line * x_stride + col), mask=mask, other=0.0))",),
        "What stands for a pair past the last column or line is not stored.",
    ),
    Equivalent(
        "rope_backward.triton._rotate",
        ("tl.load(x_ptr + (line * x_stride + col), mask=mask, other=0.0) -> tl.load(x_ptr + (line * x_stride + col))",),
        "What lies behind a line, or the last one, is turned with pairs that are not stored.",
    ),
    Equivalent(
        "rope_.triton._angles",
        (
            "tl.load(ptr + (line * stride + col), mask=(line < lines) & (col < rotary), other=0.0) -> "
            "tl.load(ptr + (line * stride + col))",
        ),
        "An angle past the last column or line turns a pair that is not stored.",
    ),
    Equivalent(
        "rope_.triton._rotate",
        ("x_stride -> out_stride in b = widen(tl.load(x_ptr + half + (line * x_stride + col), mask=mask, other=0.0))",),
        "The result is written over x: both strides are x's.",
    ),
    Equivalent(
        "rope.cuda.partner",
        ("< -> <= in for (int i = 0; i < Pack<T, V>::WORDS; ++i) {",),
        "Nothing reads a word behind the pack's last.",
    ),
    Equivalent(
        "cuda.rope_packs",
        ("forget(c[t]) -> (c[t]) in forget(c[t]), forget(f[t]);",),
        "It tells the compiler to unpack again, and changes no value.",
    ),
    Equivalent(
        "cuda.rope_packs",
        ("rest, walk.batches_inverse -> walk.batches_inverse, rest",),
        "The product is the same, but where a batch of one has several stretches of tokens: of more than 1 MiB of "
        "angles.",
    ),
    Equivalent(
        "cuda.rope_packs",
        ("zero(c[t]) -> (c[t]) in zero(c[t]), zero(f[t]);",),
        "Cosines that are not read turn nothing that is stored.",
    ),
    Equivalent(
        "rope_.cuda.rope_packs",
        (
            "-> - 1 in const i64 step = (i64)(head < q_heads ? of_q.out_token : of_k.out_token) * apart;",
            "* apart -> in if (head < all_heads && s + t * apart < tokens) store(out + t * step, x[j][t]);",
        ),
        "Over its input a thread has one token: t is 0.",
    ),
    Equivalent(
        "rope_backward.cuda.rope_packs",
        ("< -> <= in for (int i = 0; i < V; ++i) values[i] = turned(values[i], cosines[i], others[i], sines[i]);",),
        "Nothing reads a number behind the pack's last.",
    ),
    Equivalent(
        "rope.cuda.rope",
        ("-> - 1 in for (int i = 0; i < V; i += 2) {",),
        "Pairs in a pack: V is even.",
    ),
    Equivalent(
        "rope_.cuda.rope",
        ("1 -> 2 in const int all_units = rotated_units + (OVER ? 0 : (int)((dim - rotary + V - 1) / V));",),
        "Over its input the rest stays where it is, and is no unit.",
    ),
    Equivalent(
        "rope_backward.cuda.rope",
        (
            "sin_low[i], sin_high[i] -> sin_high[i], sin_low[i] in for (int i = 0; i < V; ++i) transpose(sin_low[i], "
            "sin_high[i]);",
        ),
        "Each becomes the other's negative, whichever is called the first.",
    ),
)
