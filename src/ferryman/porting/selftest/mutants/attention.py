"""Attention: masks, windows, scales, groups of heads, the online softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.selftest.planting import Bugs, finish, through, torch_kernel

BUGS = Bugs()
Scores = Callable[[Tensor], Tensor]


def _grouped(x: Tensor, heads: int) -> Tensor:
    return x.float().repeat_interleave(heads // x.shape[1], 1)


def _hidden(a: dict[str, Any]) -> Tensor:
    """True where causal or window hide a key."""
    sq, sk = a["q"].shape[2], a["k"].shape[2]
    i = torch.arange(sq, device=a["q"].device).unsqueeze(1) + (sk - sq)
    j = torch.arange(sk, device=a["q"].device)
    hidden = torch.zeros(sq, sk, dtype=torch.bool, device=a["q"].device)
    if a["causal"]:
        hidden = hidden | (j > i)
    if a["window"] is not None:
        hidden = hidden | (j <= i - a["window"])
        if not a["causal"]:
            hidden = hidden | (j >= i + a["window"])
    return hidden


def scores(a: dict[str, Any], *, hidden: float = -math.inf, cap_last: bool = False) -> Tensor:
    """The masked scores in float32. ``hidden``: what a score that must not be seen becomes."""
    q, k, mask = a["q"].float(), _grouped(a["k"], a["q"].shape[1]), a["mask"]
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if a["scale"] is None else a["scale"])

    def capped(s: Tensor) -> Tensor:
        return a["softcap"] * torch.tanh(s / a["softcap"]) if a["softcap"] else s

    s = s if cap_last else capped(s)
    if mask is not None:
        s = s.masked_fill(~mask, hidden) if mask.dtype == torch.bool else s + mask.float()
    s = capped(s) if cap_last else s
    return s.masked_fill(_hidden(a), hidden)


def attend(a: dict[str, Any], s: Tensor, change: Scores | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) in float32 of some scores; ``change`` is applied to exp(s - max) before the product with V."""
    v = _grouped(a["v"], a["q"].shape[1])
    if s.shape[-1] == 0:
        return torch.zeros_like(a["q"].float()), torch.full(s.shape[:-1], -math.inf, device=s.device)
    m = s.amax(-1, keepdim=True)
    m = torch.where(m.isinf(), 0.0, m)
    p = torch.exp(s - m)
    total = p.sum(-1, keepdim=True)
    empty = total == 0
    out = torch.where(empty, 0.0, ((p if change is None else change(p)) @ v) / torch.where(empty, 1.0, total))
    return out, (m + torch.log(total)).squeeze(-1)


def named(args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("q", "k", "v", "causal", "scale", "window", "softcap", "mask"), args, strict=False))


def _plain(a: dict[str, Any]) -> bool:
    return a["mask"] is None and a["window"] is None and not a["softcap"]


# --------------------------------------------------------------------------------------------------------- causal mask


def _masked_instead(a: dict[str, Any], shift: int, aligned: str = "bottom right") -> None:
    """Causal calls without a mask of their own get one whose diagonal lies ``shift`` further right."""
    if not a["causal"] or a["mask"] is not None or a["window"] is not None or a["k"].shape[2] == 0:
        return
    sq, sk = a["q"].shape[2], a["k"].shape[2]
    i = torch.arange(sq, device=a["q"].device).unsqueeze(1) + (sk - sq if aligned == "bottom right" else 0)
    a["mask"] = torch.arange(sk, device=a["q"].device) <= i + shift
    a["causal"] = False


@BUGS.given("causal mask", "attention", "attention_backward")
def next_token_seen(a: dict[str, Any]) -> None:
    """Every query sees the key after its own"""
    _masked_instead(a, 1)


@BUGS.given("causal mask", "attention")
def own_token_hidden(a: dict[str, Any]) -> None:
    """No query sees its own key"""
    _masked_instead(a, -1)


@BUGS.given("causal mask", "attention", "attention_backward")
def diagonal_from_the_top_left(a: dict[str, Any]) -> None:
    """The diagonal starts at the first key, whatever the lengths"""
    _masked_instead(a, 0, "top left")


@BUGS.given("causal mask", "attention")
def not_causal_while_decoding(a: dict[str, Any]) -> None:
    """A decoding path for few queries forgets the mask"""
    if a["q"].shape[2] <= 8:
        a["causal"] = False


@BUGS.kernel("causal mask", "attention")
def future_tokens_leak(*args: Any) -> Any:
    """Hidden scores become -10 in place of -inf"""
    a = named(args)
    return finish("attention", attend(a, scores(a, hidden=-10.0)), args[:-1])


@BUGS.kernel("causal mask", "attention")
def hidden_by_ten_thousand(*args: Any) -> Any:
    """Hidden scores become -10000: rows that see nothing average V"""
    a = named(args)
    return finish("attention", attend(a, scores(a, hidden=-1e4)), args[:-1])


# -------------------------------------------------------------------------------------------------------------- window


@BUGS.given("window", "attention", "attention_backward")
def window_one_wider(a: dict[str, Any]) -> None:
    """A window of w sees w + 1 keys"""
    a["window"] = None if a["window"] is None else a["window"] + 1


@BUGS.given("window", "attention")
def window_one_narrower(a: dict[str, Any]) -> None:
    """A window of w sees w - 1 keys, and at least one"""
    a["window"] = None if a["window"] is None else max(a["window"] - 1, 1)


@BUGS.given("window", "attention")
def window_to_the_left_only(a: dict[str, Any]) -> None:
    """A window that is not causal does not see later keys"""
    if a["window"] is not None:
        a["causal"] = True


@BUGS.given("window", "attention_backward")
def window_ignored_in_backward(a: dict[str, Any]) -> None:
    """The backward has no window"""
    a["window"] = None


# ------------------------------------------------------------------------------------------------------ scale, softcap


@BUGS.given("scale", "attention", "attention_backward")
def scale_of_the_padded_width(a: dict[str, Any]) -> None:
    """The default scale comes from the tile's head_dim, the next power of two"""
    if a["scale"] is None:
        a["scale"] = (1 << (a["q"].shape[-1] - 1).bit_length()) ** -0.5


@BUGS.given("scale", "attention")
def scale_ignored(a: dict[str, Any]) -> None:
    """A scale that is given is not used"""
    a["scale"] = None


@BUGS.given("scale", "attention_backward")
def scale_ignored_in_backward(a: dict[str, Any]) -> None:
    """A scale that is given is not used by the backward"""
    a["scale"] = None


@BUGS.kernel("scale", "attention_backward")
def key_gradient_not_scaled(*args: Any) -> Any:
    """dK lacks the scale where it is not the default"""
    gq, gk, gv = torch_kernel("attention_backward")(*args)
    scale = args[8]
    return gq, gk if scale is None else (gk.float() / scale * args[2].shape[-1] ** -0.5).to(gk.dtype), gv


@BUGS.given("softcap", "attention", "attention_backward")
def softcap_ignored(a: dict[str, Any]) -> None:
    """No softcap"""
    a["softcap"] = 0.0


@BUGS.kernel("softcap", "attention")
def softcap_after_the_mask(*args: Any) -> Any:
    """A float mask is added before the cap, and -inf becomes -cap"""
    a = named(args)
    return finish("attention", attend(a, scores(a, cap_last=True)), args[:-1])


@BUGS.kernel("softcap", "attention")
def softcap_clamps(*args: Any) -> Any:
    """The cap clamps, and is no tanh"""
    a = named(args)
    bare = {**a, "softcap": 0.0, "mask": None, "causal": False, "window": None}
    s = scores(bare).clamp(-a["softcap"], a["softcap"]) if a["softcap"] else scores(bare)
    mask = a["mask"]
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.float()
    return finish("attention", attend(a, s.masked_fill(_hidden(a), -math.inf)), args[:-1])


# ---------------------------------------------------------------------------------------------------------- mask tensor


@BUGS.given("mask tensor", "attention", "attention_backward")
def bool_mask_added(a: dict[str, Any]) -> None:
    """A bool mask is added as 0 and 1"""
    if a["mask"] is not None and a["mask"].dtype == torch.bool:
        a["mask"] = a["mask"].to(a["q"].dtype)


@BUGS.given("mask tensor", "attention")
def mask_of_the_first_batch(a: dict[str, Any]) -> None:
    """The first sequence's mask serves the whole batch"""
    if a["mask"] is not None and a["mask"].dim() == 4:
        a["mask"] = a["mask"][:1]


@BUGS.given("mask tensor", "attention")
def mask_of_the_first_head(a: dict[str, Any]) -> None:
    """The first head's mask serves every head"""
    if a["mask"] is not None and a["mask"].dim() == 4:
        a["mask"] = a["mask"][:, :1]


@BUGS.given("mask tensor", "attention")
def last_key_unmasked(a: dict[str, Any]) -> None:
    """The mask's last column is taken as seen (a ragged tile of the mask)"""
    if a["mask"] is not None and a["mask"].dtype == torch.bool:
        a["mask"] = a["mask"].clone()
        a["mask"][..., -1] = True


# ------------------------------------------------------------------------------------------------------ groups of heads


@BUGS.given("grouped heads", "attention")
def heads_dealt_round(a: dict[str, Any]) -> None:
    """Query head h reads key head h % kv_heads, in place of h // group"""
    heads, kv = a["q"].shape[1], a["k"].shape[1]
    if 1 < kv < heads:
        at = torch.arange(heads, device=a["q"].device) % kv
        a["k"], a["v"] = a["k"][:, at], a["v"][:, at]


@BUGS.kernel("grouped heads", "attention_backward")
def first_head_of_the_group_only(*args: Any) -> Any:
    """dK and dV come from the first query head of each group"""
    right = torch_kernel("attention_backward")
    gq, gk, gv = right(*args)
    group = args[2].shape[1] // max(args[3].shape[1], 1)
    if group < 2:
        return gq, gk, gv
    first = [a[:, ::group] if i in (0, 1, 2, 5, 6) and a is not None else a for i, a in enumerate(args)]
    if first[11] is not None and first[11].dim() == 4 and first[11].shape[1] > 1:
        first[11] = first[11][:, ::group]
    _, gk, gv = right(*first)
    return gq, gk, gv


# ----------------------------------------------------------------------------------------------------------- last keys


@BUGS.given("last keys", "attention", "attention_backward")
def last_key_dropped(a: dict[str, Any]) -> None:
    """The last key is not read, where no mask says anything about it"""
    if not a["causal"] and a["mask"] is None and a["window"] is None and a["k"].shape[2] > 1 and "out" not in a:
        a["k"], a["v"] = a["k"][:, :, :-1], a["v"][:, :, :-1]
    elif "out" in a and a["k"].shape[2] > 1:
        a["v"] = torch.cat((a["v"][:, :, :-1], torch.zeros_like(a["v"][:, :, -1:])), 2)


@BUGS.kernel("last keys", "attention")
def padding_keys_of_zero_counted(*args: Any) -> Any:
    """Keys are padded with zeros to a multiple of 16, and the padding has weight exp(0)"""
    a = named(args)
    s = scores(a)
    pad = -s.shape[-1] % 16
    if not _plain(a) or a["causal"] or s.shape[-1] == 0:
        return torch_kernel("attention")(*args)
    out, lse = attend(a, s)
    longer = torch.logaddexp(lse, torch.full_like(lse, math.log(pad) if pad else -math.inf))
    return finish("attention", (out * torch.exp(lse - longer).unsqueeze(-1), longer), args[:-1])


# ------------------------------------------------------------------------------------------------------ online softmax


def _by_blocks(a: dict[str, Any], s: Tensor, size: int, rescale: bool, low: torch.dtype) -> tuple[Tensor, Tensor]:
    v = _grouped(a["v"], a["q"].shape[1])
    top = torch.full((*s.shape[:-1], 1), -math.inf, device=s.device)
    total, acc = torch.zeros_like(top), torch.zeros((*s.shape[:-1], v.shape[-1]), device=s.device)
    for part, values in zip(s.split(size, -1), v.split(size, 2), strict=True):
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        safe = torch.where(new.isinf(), 0.0, new)
        decay = torch.exp(top - safe)
        p = torch.exp(part - safe)
        total = total * decay + p.sum(-1, keepdim=True)
        acc = through(acc * (decay if rescale else torch.where(decay > 0, 1.0, 0.0)) + p @ values, low)
        top = new
    empty = total == 0
    out = torch.where(empty, 0.0, acc / torch.where(empty, 1.0, total))
    return out, (torch.where(top.isinf(), 0.0, top) + torch.log(total)).squeeze(-1)


@BUGS.kernel("online softmax", "attention")
def accumulator_not_rescaled(*args: Any) -> Any:
    """When the running maximum grows, the sum is rescaled and the accumulator is not"""
    a = named(args)
    if a["k"].shape[2] == 0:
        return torch_kernel("attention")(*args)
    return finish("attention", _by_blocks(a, scores(a), 16, False, torch.float32), args[:-1])


@BUGS.kernel("online softmax", "attention")
def accumulator_in_storage_dtype(*args: Any) -> Any:
    """The accumulator is rounded to storage after every block of 16 keys"""
    a = named(args)
    if a["k"].shape[2] == 0:
        return torch_kernel("attention")(*args)
    return finish("attention", _by_blocks(a, scores(a), 16, True, a["q"].dtype), args[:-1])


@BUGS.kernel("online softmax", "attention")
def split_keys_averaged(*args: Any) -> Any:
    """Two splits of the keys are averaged, and not weighted by their sums"""
    a = named(args)
    s = scores(a)
    half = s.shape[-1] // 2
    if half < 8:
        return torch_kernel("attention")(*args)
    first = attend({**a, "v": a["v"][:, :, :half]}, s[..., :half])
    second = attend({**a, "v": a["v"][:, :, half:]}, s[..., half:])
    return finish("attention", ((first[0] + second[0]) / 2, torch.logaddexp(first[1], second[1])), args[:-1])


@BUGS.kernel("online softmax", "attention")
def split_log_sum_exp_of_the_last(*args: Any) -> Any:
    """The log-sum-exp is that of the second half of the keys"""
    out, lse = torch_kernel("attention")(*args)
    a = named(args)
    s = scores(a)
    return out, torch.logsumexp(s[..., s.shape[-1] // 2 :], -1) if s.shape[-1] > 15 else lse


# ------------------------------------------------------------------------------------------------------------ rounding


@BUGS.kernel("P rounded", "attention", roundings=("p",))
def probabilities_in_8_bits(*args: Any) -> Any:
    """P is rounded to e4m3"""
    a = named(args)
    return finish("attention", attend(a, scores(a), lambda p: through(p, torch.float8_e4m3fn)), args[:-1])


@BUGS.kernel("P rounded", "attention")
def probabilities_rounded_undeclared(*args: Any) -> Any:
    """P is rounded to storage, and nobody said so"""
    a = named(args)
    return finish("attention", attend(a, scores(a), lambda p: through(p, a["q"].dtype)), args[:-1])


@BUGS.kernel("P rounded", "attention")
def scores_rounded(*args: Any) -> Any:
    """The scores are rounded to storage before the softmax, as eager attention in 16 bits does"""
    a = named(args)
    low = torch.bfloat16 if a["q"].dtype == torch.float32 else a["q"].dtype
    return finish("attention", attend(a, through(scores(a), low)), args[:-1])


@BUGS.output("log-sum-exp", "attention")
def lse_in_base_two(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp in base two"""
    return out, lse / math.log(2)


@BUGS.kernel("log-sum-exp", "attention")
def lse_without_the_scale(*args: Any) -> Any:
    """The log-sum-exp is divided by a scale that is given"""
    out, lse = torch_kernel("attention")(*args)
    return out, lse if args[4] is None else lse / args[4]


@BUGS.kernel("log-sum-exp", "attention")
def lse_before_the_mask(*args: Any) -> Any:
    """The log-sum-exp counts the keys that a mask hides"""
    out, lse = torch_kernel("attention")(*args)
    a = named(args)
    if a["mask"] is None or lse.numel() == 0:
        return out, lse
    return out, torch.where(lse.isneginf(), lse, torch.logsumexp(scores({**a, "mask": None}), -1))
