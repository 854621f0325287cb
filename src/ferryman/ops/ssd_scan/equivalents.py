"""Why edits of the ssd scan's kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "ssd_scan.triton.recurrent._steps",
        ("0.0 -> 1.0 in return tl.where(live, step, 0.0), slope",),
        "This line asks for one token at a time: every lane is live.",
    ),
    Equivalent(
        "ssd_scan.triton.recurrent._steps",
        ("low -> (low - 1) in slope = tl.where(step < low, 0.0, slope)",),
        "The forward takes the steps alone; their slopes are for the gradient.",
    ),
    Equivalent(
        "ssd_scan.triton.parallel._states",
        ("0.0 -> 1.0 in state = widen(tl.load(there, mask=at < size, other=0.0))",),
        "Lanes past the state's last number are never stored.",
    ),
    Equivalent(
        "ssd_scan.triton.chunked._steps",
        ("0.0 -> 1.0 in z = widen(tl.load(dt_ptr + q * t_l, mask=live, other=0.0))",),
        "Steps past the last token are 0 whatever stands for them.",
    ),
)
