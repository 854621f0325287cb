"""Which implementations of sorting rows by expert, and of summing them back, exist."""

from __future__ import annotations

from ferryman.ops.clauses import Clause
from ferryman.ops.menu import Implementation, menu

MOST = 4096  # slots that each program reads whole
FEW = Clause(
    f"at most {MOST} slots",
    ("topk_ids.shape",),
    lambda view: int(view.args["topk_ids"].numel()),
    lambda count: count <= MOST,
)

IMPLEMENTATIONS = menu(
    "ferryman.ops.moe_permute",
    # a row for each slot is gathered before it is summed
    Implementation(op="moe_permute", name="torch"),
    Implementation(op="moe_permute_backward moe_combine moe_combine_backward", name="torch", composed=True),
    Implementation(op="moe_permute", name="triton.ranks", where="few_kernels", when=(FEW,), partial=True),
    Implementation(op="moe_permute", name="triton.counted"),
    Implementation(op="moe_permute_backward moe_combine moe_combine_backward", name="triton"),
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "moe_combine": (
        "b54988c4f8c19ebf06373057288f0fed0716bdd084193829e8f6217c4391fea1",
        ("ddc484b09ee454b761fabc21f2d5277cf9ce315cbfa099a7160917ef9f4d4cf9",),
    ),
    "moe_combine_backward": (
        "2205868f9c7e376ddf54df0f0ab5e27acf2d159b07aa3975b5deab38e2e2af7e",
        ("a262e0108ffeef45bf1010d557b2d6f39e79f76757956a734aa3bd830f96b8fe",),
    ),
    "moe_permute": (
        "e93a66443c34e4db2cfb5a400471ac7c8d58adb6ec591f6542be75d1b38fe6b2",
        ("282369666d595f21adc768ff3bccb97af8264346e9b60a20a8e813547f49eb85",),
    ),
    "moe_permute_backward": (
        "959d15979659bace9188f942ef671b9e81fe98d7bebe5c06be5ec307a2e2ddb7",
        ("225dd003b7685dc271c164e81329bc842424a76d30e786ce30e38b4933d8b4da",),
    ),
}
