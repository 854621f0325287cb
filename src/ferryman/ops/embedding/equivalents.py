"""Why edits of the embedding's kernels and rules over it change nothing."""

from ferryman.ops.evidence import Equivalent

_SHAPE = "The backward reads the table's shape alone: its content and its place mean nothing."

EQUIVALENTS = (
    Equivalent(
        "embedding_backward.torch",
        (
            "input_in_bfloat16.weight",
            "input_in_e4m3.weight",
            "negated.weight",
            "offset_ignored.weight",
            "read_as_if_contiguous.weight",
            "reversed_rows.weight",
        ),
        _SHAPE,
    ),
    Equivalent(
        "embedding_backward.torch",
        ("inputs_swapped.grad_ids", "inputs_swapped.ids_weight", "computed_in_place.ids"),
        "Ids are whole numbers: no other input, and no result, has their dtype.",
    ),
    Equivalent(
        "embedding_backward.torch",
        ("in_storage_precision",),
        "The sum of rows is one index_add_, which this rule does not reach; the scaled sum is rounded once in either.",
    ),
    Equivalent(
        "embedding.cuda.rows_of",
        ("after_previous(platform::thread_index()) -> (platform::thread_index())",),
        "Nothing is started here ahead of the kernel before it.",
    ),
    Equivalent(
        "embedding.cuda.rows_of",
        ("< -> <= in for (int i = 0; i < Pack<T, V>::WORDS; ++i) x[p].word[i] = NotANumber<T>::word;",),
        "A word more is the next pack's first, which is set next. Behind the last pack nothing is read.",
    ),
)
