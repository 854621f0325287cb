"""Which implementations of `gated_delta_rule` exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import at_least, at_most, dtypes, either, feature, vendor
from ferryman.ops.menu import Implementation, menu

_OP = "gated_delta_rule"
_BACKWARD = "gated_delta_rule_backward"
# a program's part of the state, some columns of it, stays in registers
_STATE = at_most("q.shape[3]", 256)
_FEW = at_most("q.shape[1]", 16)
_NARROW = at_most("q.shape[3]", 128)
# two chunks: below, passes that go chunk by chunk share nothing
_MANY = at_least("q.shape[1]", 128)
_LONG = at_least("q.shape[1]", 8192)

IMPLEMENTATIONS = menu(
    "ferryman.ops.gated_delta_rule",
    Implementation(op=f"{_OP} {_BACKWARD}", name="torch", composed=True),
    Implementation(
        op=f"{_OP} {_BACKWARD}",
        name="triton.recurrent",
        where="few_kernels",
        when=(_STATE, _FEW),
        batch_invariant=True,
        replayable=True,
        partial=True,
    ),
    Implementation(
        op=_OP,
        name="triton.parallel",
        where="parallel_kernels",
        when=(_NARROW, _MANY),
        batch_invariant=True,
        replayable=True,
        partial=True,
    ),
    Implementation(op=_OP, name="triton.chunked", batch_invariant=True, replayable=True),
    Implementation(
        op=_BACKWARD,
        name="triton.gradients",
        where="gradient_kernels",
        when=(_NARROW, _MANY),
        batch_invariant=True,
        replayable=True,
        partial=True,
    ),
    Implementation(
        op=_BACKWARD, name="triton.chunked", where="backward_kernels", batch_invariant=True, replayable=True
    ),
    # timed on a long sequence alone
    Implementation(
        op=_BACKWARD,
        name="triton.spans",
        where="spans_kernels",
        when=(either(feature("wgmma"), vendor("cpu")), dtypes("q", torch.bfloat16), _NARROW, _MANY),
        leads=(_LONG,),
        batch_invariant=True,
        replayable=True,
        partial=True,
    ),
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "gated_delta_rule": (
        "111f365676cdb39041d0551155c13a5627f524207f80762a1f10a1ed4c12de19",
        ("7178379568be25fcb0aac3d04da57106b96acbcfc98753fe098732051b1b486a",),
    ),
    "gated_delta_rule_backward": (
        "faaeed3ae0c468996fadb7af6a7fc463414119efc5c4a65250e5d2a618bbb7f8",
        ("d26aa967738ee99219f5d0bd3666998fd30399999d9c7687cfa6e123456d0ff8",),
    ),
}
