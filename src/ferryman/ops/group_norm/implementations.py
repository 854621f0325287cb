"""Which implementations of group_norm exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import Clause, View
from ferryman.ops.group_norm import layout
from ferryman.ops.menu import Implementation, menu


def _group_in_registers(arrays: int) -> Clause:
    def measure(view: View) -> tuple[int, bool]:
        x, groups = view.args["x"], view.args["num_groups"]
        return layout.padded(x, groups), layout.fits(x, groups, view.max_threads, arrays)

    return Clause(
        f"groups that fit registers, {arrays} at once, 64 bytes a thread in all (padded elements, fits)",
        ("x.shape", "num_groups", "x.dtype", "profile.max_threads"),
        measure,
        lambda m: m[1],
    )


IMPLEMENTATIONS = menu(
    "ferryman.ops.group_norm",
    Implementation(op="group_norm", name="torch", batch_invariant=True),
    Implementation(op="group_norm_backward", name="torch", composed=True),
    *(
        Implementation(
            op=op,
            name="triton.rows",
            when=(_group_in_registers(arrays),),
            batch_invariant=True,
            replayable=True,
            partial=True,
            kin="triton",
        )
        for op, arrays in (("group_norm", 1), ("group_norm_backward", 2))
    ),
    *(
        Implementation(
            op=op, name="triton.long", where=f":{op}_long", batch_invariant=True, replayable=True, kin="triton"
        )
        for op in ("group_norm", "group_norm_backward")
    ),
)
