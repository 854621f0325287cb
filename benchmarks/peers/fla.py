"""The kernels of flash-linear-attention (fla-core): gated delta rule, scans, causal convolution.

It has one head of q and k for every head of v, a scan without steps, and no skip term. What a model must make before
its kernels, repeated heads and x times its step, is made outside the timed call, in its favour; the skip's addition and
the sum of what was repeated are inside, because they follow its kernels. It multiplies in the inputs' 16 bits, so that
what it returns in float32, states and gradients of decays, is right to 16 bits: computed, and not judged (None).
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from ferryman_peers import _common
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it

NAME = "fla"
SLOW_START = True  # it compiles or tunes for seconds a call
_FEW = 64  # tokens from which its authors' models take the chunked kernels


def available() -> str | None:
    return _common.missing("fla", "einops", "triton")


def version() -> str:
    return _common.version("fla-core")


def prepare_share(share: int, of: int) -> None:
    """Its autotuners try about 100 configurations for a gated delta rule, which take minutes to compile one by one."""
    for name in ("ops.gated_delta_rule", "ops.simple_gla", "modules.convolution"):
        with contextlib.suppress(ImportError):  # the row of an op that needs it says why
            importlib.import_module(f"fla.{name}")
    for tuner in _common.autotuners("fla"):
        tuner.configs = tuner.configs[share::of] or tuner.configs[:1]


def _each(x: Tensor, heads: int) -> Tensor:
    """(B, L, G, K) as (B, L, heads, K)."""
    return x.repeat_interleave(heads // x.shape[2], 2).contiguous()


def gated_delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, scale: Any, qk_l2norm: bool
) -> _common.Call:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    function = chunk_gated_delta_rule if v.shape[1] > _FEW else fused_recurrent_gated_delta_rule
    if g is None:
        raise _common.NotServed("no rule without a decay")
    q, k = (_each(x, v.shape[2]) for x in (q, k))
    options = {"scale": scale, "initial_state": initial_state, "use_qk_l2norm_in_kernel": qk_l2norm}
    return lambda: (function(q, k, v, g, beta=beta, output_final_state=True, **options)[0], None)


def gated_delta_rule_backward(
    grad_y: Any,
    grad_final_state: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial_state: Any,
    scale: Any,
    qk_l2norm: bool,
) -> _common.Call:
    from fla.ops.gated_delta_rule.chunk import ChunkGatedDeltaRuleFunction as Function

    if g is None:
        raise _common.NotServed("no rule without a decay")
    groups = q.shape[2]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    forward = (*(_each(x, v.shape[2]) for x in (q, k)), v, g, beta, scale, initial_state, True, None, qk_l2norm)
    taken = (0, 1, 2, 3, 4) if initial_state is None else (0, 1, 2, 3, 4, 6)
    call = _common.backward(Function, forward, (grad_y, grad_final_state), taken)

    def summed() -> Any:
        grads = list(call())
        for place in (0, 1):
            grads[place] = grads[place].unflatten(2, (groups, -1)).sum(3)
        return [None if x.dtype == torch.float32 != v.dtype else x for x in grads]

    return summed


def ssd_scan(
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    dt_bias: Any,
    initial_state: Any,
    dt_softplus: bool,
    y_float32: bool,
    dt_min: Any,
    dt_max: Any,
) -> _common.Call:
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    _common.plain(y_float32=y_float32)
    function = chunk_simple_gla if x.shape[1] > _FEW else fused_recurrent_simple_gla
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = F.softplus(step) if dt_softplus else step
    step = step.clamp(dt_min, dt_max) if dt_min is not None or dt_max is not None else step
    values, decay = (x * step[..., None]).to(x.dtype), step * a.float()
    queries, keys = (_each(m, x.shape[2]) for m in (c, b))
    before = None if initial_state is None else initial_state.transpose(2, 3).contiguous()
    skip = None if d is None else d.to(x.dtype)[:, None]

    def call() -> Any:
        y, _ = function(queries, keys, values, decay, scale=1.0, initial_state=before, output_final_state=True)
        return (y if skip is None else torch.addcmul(y, x, skip)), None

    return call


def causal_conv1d(x: Any, weight: Any, bias: Any, initial_state: Any, activation: Any) -> _common.Call:
    from fla.modules.convolution import causal_conv1d as function

    if initial_state is not None:
        raise _common.NotServed("its state has another layout")
    rows = x.transpose(1, 2).contiguous()  # its layout: channels innermost
    return lambda: (function(rows, weight, bias, activation=activation)[0].transpose(1, 2),)


def causal_conv1d_backward(
    grad_y: Any, grad_final_state: Any, x: Any, weight: Any, bias: Any, initial_state: Any, activation: Any
) -> _common.Call:
    from fla.modules.convolution import causal_conv1d_bwd

    if initial_state is not None or grad_final_state is not None:
        raise _common.NotServed("its state has another layout")
    rows, grads = (t.transpose(1, 2).contiguous() for t in (x, grad_y))

    def call() -> Any:
        gradients = causal_conv1d_bwd(rows, grads, None, weight, bias, activation=activation)
        return gradients[0].transpose(1, 2), gradients[1], gradients[2]

    return call


OPS = {
    "gated_delta_rule": gated_delta_rule,
    "gated_delta_rule_backward": gated_delta_rule_backward,
    "ssd_scan": ssd_scan,
    "causal_conv1d": causal_conv1d,
    "causal_conv1d_backward": causal_conv1d_backward,
}
