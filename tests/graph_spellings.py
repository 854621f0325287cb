"""Functions that are an op however they are written, and functions that look like one and are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

EPS = 1e-5


def _ms(h: Tensor) -> Tensor:
    return h.pow(2).mean(-1, keepdim=True)


def _cast(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return w * (h * torch.rsqrt(_ms(h) + EPS)).to(x.dtype)


def _late(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(_ms(h) + EPS) * w.float()).to(x.dtype)


def _offset(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(_ms(h) + EPS) * (1.0 + w.float())).type_as(x)


RMS: dict[str, Callable[..., Any]] = {
    "cast": _cast,
    "late": _late,
    "offset": _offset,
    "functional": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS),
    "square": lambda x, w: (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS) * w).to(x.dtype),
    "product": lambda x, w: (x.float() * torch.rsqrt((x.float() * x.float()).mean(-1, True) + EPS) * w).to(x.dtype),
    "torch.pow": lambda x, w: (
        w * (x.float() * torch.rsqrt(torch.mean(torch.pow(x.float(), 2.0), -1, keepdim=True) + EPS))
    ).to(x.dtype),
    "divided": lambda x, w: (x.float() / torch.sqrt(_ms(x.float()) + EPS) * w.float()).to(x.dtype),
    "reciprocal": lambda x, w: (x.float() * (1.0 / torch.sqrt(_ms(x.float()) + EPS)) * w.float()).to(x.dtype),
    "power": lambda x, w: (w.float() * (x.float() * (EPS + _ms(x.float())) ** -0.5)).to(x.dtype),
    "power_of": lambda x, w: (w.float() * (x.float() * torch.pow(_ms(x.float()) + EPS, -0.5))).to(x.dtype),
    "weight_first": lambda x, w: ((w.float() * x.float()) * torch.rsqrt(_ms(x.float()) + EPS)).to(x.dtype),
    "root_first": lambda x, w: (torch.rsqrt(_ms(x.float()) + EPS) * w.float() * x.float()).to(x.dtype),
    "sum": lambda x, w: (
        x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPS) * w.float()
    ).to(x.dtype),
    "methods": lambda x, w: x.float().mul(_ms(x.float()).add(EPS).rsqrt()).mul(w.float()).to(x.dtype),
    "reciprocal_method": lambda x, w: (x.float() * _ms(x.float()).add(EPS).sqrt().reciprocal() * w.float()).to(x.dtype),
    "no_weight": lambda x, w: (x.float() * torch.rsqrt(_ms(x.float()) + EPS)).to(x.dtype),
    "vector_norm": lambda x, w: (
        x.float()
        * torch.rsqrt(torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).pow(2) / x.shape[-1] + EPS)
        * w.float()
    ).to(x.dtype),
}


def _centred(x: Tensor) -> Tensor:
    return x.float() - x.float().mean(-1, keepdim=True)


LAYER: dict[str, Callable[..., Any]] = {
    "functional": lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b, EPS),
    "composed": lambda x, w, b: (_centred(x) * torch.rsqrt(_ms(_centred(x)) + EPS) * w.float() + b.float()).to(x.dtype),
    "var": lambda x, w, b: (
        _centred(x) / torch.sqrt(x.float().var(-1, unbiased=False, keepdim=True) + EPS) * w.float() + b.float()
    ).to(x.dtype),
    "var_correction": lambda x, w, b: (
        b.float() + w.float() * _centred(x) * (x.float().var(-1, correction=0, keepdim=True) + EPS).rsqrt()
    ).to(x.dtype),
    "no_weight": lambda x, w, b: F.layer_norm(x, (x.shape[-1],), None, None, EPS),
    "no_bias": lambda x, w, b: (_centred(x) * torch.rsqrt(_ms(_centred(x)) + EPS) * w.float()).to(x.dtype),
    "bias_alone": lambda x, w, b: (_centred(x) * torch.rsqrt(_ms(_centred(x)) + EPS) + b.float()).to(x.dtype),
    "power": lambda x, w, b: (_centred(x) * (_ms(_centred(x)) + EPS).pow(-0.5) * w.float() + b.float()).to(x.dtype),
}


def _tanh(g: Tensor) -> Tensor:
    return 0.5 * g * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * torch.pow(g, 3.0))))


GATED: dict[str, tuple[str, Callable[..., Any]]] = {
    "silu": ("silu_mul", lambda g, u: F.silu(g) * u),
    "silu_last": ("silu_mul", lambda g, u: u * F.silu(g)),
    "sigmoid": ("silu_mul", lambda g, u: g * torch.sigmoid(g) * u),
    "sigmoid_method": ("silu_mul", lambda g, u: (u * g) * g.sigmoid()),
    "silu_other": ("silu_mul", lambda g, u: F.silu(u) * g),
    "silu_mul": ("silu_mul", lambda g, u: torch.mul(F.silu(g), u)),
    "tanh": ("gelu_mul", lambda g, u: F.gelu(g, approximate="tanh") * u),
    "tanh_written": ("gelu_mul", lambda g, u: _tanh(g) * u),
    "erf": ("gelu_mul", lambda g, u: F.gelu(g) * u),
    "erf_written": ("gelu_mul", lambda g, u: u * (g * 0.5 * (1.0 + torch.erf(g / math.sqrt(2.0))))),
    "erf_halved": ("gelu_mul", lambda g, u: 0.5 * g * (1 + torch.erf(g * 0.5**0.5)) * u),
}


def half(x: Tensor) -> Tensor:
    n = x.shape[-1] // 2
    return torch.cat((-x[..., n:], x[..., :n]), dim=-1)


def _chunked(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), -1)


def _narrowed(x: Tensor) -> Tensor:
    n = x.shape[-1] // 2
    return torch.cat([x.narrow(-1, n, n).neg(), x.narrow(-1, 0, n)], -1)


def _split(x: Tensor) -> Tensor:
    a, b = torch.split(x, x.shape[-1] // 2, dim=-1)
    return torch.cat((torch.neg(b), a), dim=3)


def _pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _turned(turn: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def rope(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> Any:
        c, s = c.unsqueeze(1), s.unsqueeze(1)
        return q * c + turn(q) * s, k * c + turn(k) * s

    return rope


def _partial(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> Any:
    n = c.shape[-1] // 2
    c, s = c[..., :n].unsqueeze(1), s[..., :n].unsqueeze(1)

    def one(x: Tensor) -> Tensor:
        first, rest = x[..., :n], x[..., n:]
        return torch.cat((first * c + half(first) * s, rest), -1)

    return one(q), one(k)


ROPE: dict[str, Callable[..., Any]] = {
    "sliced": _turned(half),
    "chunked": _turned(_chunked),
    "narrowed": _turned(_narrowed),
    "split": _turned(_split),
    "pairs": _turned(_pairs),
    "partial": _partial,
    "none_index": lambda q, k, c, s: (q * c[:, None] + half(q) * s[:, None], k * c[:, None] + half(k) * s[:, None]),
    "sine_first": lambda q, k, c, s: (half(q) * s[:, None] + c[:, None] * q, s[:, None] * half(k) + k * c[:, None]),
    "four_dims": lambda q, k, c, s: (lambda a, b: (q * a + half(q) * b, k * a + half(k) * b))(c[0], s[0]),
    "float": lambda q, k, c, s: (
        (q.float() * c[:, None] + half(q.float()) * s[:, None]).to(q.dtype),
        (k.float() * c[:, None] + half(k.float()) * s[:, None]).to(k.dtype),
    ),
}

ADDED: dict[str, Callable[..., Any]] = {
    "cast": lambda x, r, w: (_cast(x + r, w), x + r),
    "late": lambda x, r, w: (lambda h: (_late(h, w), h))(r + x),
    "offset": lambda x, r, w: (lambda h: (_offset(h, w), h * 2))(x + r),
    "unread": lambda x, r, w: _cast(torch.add(x, r), w),
}

# (op, function): none of these is the op, though each looks like it ------------------------------------------

X2 = tuple[str, Callable[..., Any]]
LOOKALIKE_RMS: dict[str, Callable[..., Any]] = {
    "eps_outside": lambda h, w: w * (h / (torch.sqrt(_ms(h)) + EPS)),
    "eps_after": lambda h, w: w * (h * (torch.rsqrt(_ms(h)) + EPS)),
    "eps_negative": lambda h, w: w * (h * torch.rsqrt(_ms(h) - EPS)),
    "eps_scaled": lambda h, w: w * (h * torch.rsqrt(EPS * _ms(h) + EPS)),
    "mean_subtracted": lambda h, w: w * ((h - h.mean(-1, keepdim=True)) * torch.rsqrt(_ms(h) + EPS)),
    "centred_power": lambda h, w: w * (h * torch.rsqrt(_ms(h - h.mean(-1, keepdim=True)) + EPS)),
    "variance": lambda h, w: w * (h * torch.rsqrt(h.var(-1, keepdim=True, unbiased=False) + EPS)),
    "sum": lambda h, w: w * (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + EPS)),
    "one_less": lambda h, w: w * (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / (h.shape[-1] - 1) + EPS)),
    "other_axis": lambda h, w: w * (h * torch.rsqrt(h.pow(2).mean(-2, keepdim=True) + EPS)),
    "two_axes": lambda h, w: w * (h * torch.rsqrt(h.pow(2).mean((-2, -1), keepdim=True) + EPS)),
    "absolute": lambda h, w: w * (h / (h.abs().mean(-1, keepdim=True) + EPS)),
    "cubed": lambda h, w: w * (h * torch.rsqrt(h.pow(3).mean(-1, keepdim=True).abs() + EPS)),
    "fourth": lambda h, w: w * (h * torch.rsqrt(h.pow(4).mean(-1, keepdim=True) + EPS)),
    "fourth_root": lambda h, w: w * (h * (_ms(h) + EPS) ** -0.25),
    "no_root": lambda h, w: w * (h * (_ms(h) + EPS) ** -1),
    "root_up": lambda h, w: w * (h * torch.sqrt(_ms(h) + EPS)),
    "no_scale": lambda h, w: w * torch.rsqrt(_ms(h) + EPS),
    "weight_added": lambda h, w: w + (h * torch.rsqrt(_ms(h) + EPS)),
    "divided_by_weight": lambda h, w: (h * torch.rsqrt(_ms(h) + EPS)) / w,
    "weight_squared": lambda h, w: w * w * (h * torch.rsqrt(_ms(w * h) + EPS)),
    "of_another": lambda h, w: w * (h * torch.rsqrt(_ms(h * 1.5) + EPS)),
    "of_the_weighted": lambda h, w: w * (h * torch.rsqrt(_ms(h * w) + EPS)),
    "twice": lambda h, w: w * (h * h * torch.rsqrt(_ms(h) + EPS)),
    "doubled": lambda h, w: 2.0 * h * torch.rsqrt(_ms(h) + EPS) * w * h,
    "norm_clamped": lambda h, w: w * F.normalize(h, dim=-1) * math.sqrt(h.shape[-1]),
    "clamped": lambda h, w: w * (h * torch.rsqrt(_ms(h).clamp_min(EPS))),
    "maximum": lambda h, w: w * (h * torch.rsqrt(torch.maximum(_ms(h), h.amax(-1, keepdim=True)) + EPS)),
    "shifted": lambda h, w: w * ((h + 0.5) * torch.rsqrt(_ms(h) + EPS)),
    "bias": lambda h, w: w * (h * torch.rsqrt(_ms(h) + EPS)) + w,
}
LOOKALIKE_LAYER: dict[str, Callable[..., Any]] = {
    "eps_outside": lambda h, w, b: (h - h.mean(-1, True)) / (h.std(-1, unbiased=False, keepdim=True) + EPS) * w + b,
    "unbiased": lambda h, w, b: (h - h.mean(-1, True)) * torch.rsqrt(h.var(-1, keepdim=True) + EPS) * w + b,
    "not_centred": lambda h, w, b: h * torch.rsqrt(h.var(-1, unbiased=False, keepdim=True) + EPS) * w + b,
    "plain_power": lambda h, w, b: (h - h.mean(-1, True)) * torch.rsqrt(_ms(h) + EPS) * w + b,
    "bias_first": lambda h, w, b: ((h - h.mean(-1, True)) * torch.rsqrt(_ms(h - h.mean(-1, True)) + EPS) + b) * w,
    "bias_subtracted": lambda h, w, b: (h - h.mean(-1, True)) * torch.rsqrt(_ms(h - h.mean(-1, True)) + EPS) * w - b,
    "mean_added": lambda h, w, b: (h + h.mean(-1, True)) * torch.rsqrt(_ms(h + h.mean(-1, True)) + EPS) * w + b,
    "two_axes": lambda h, w, b: F.layer_norm(h, h.shape[-2:], None, None, EPS) * w + b,
    "other_axis": lambda h, w, b: (h - h.mean(-2, True)) * torch.rsqrt(_ms(h - h.mean(-2, True)) + EPS) * w + b,
    "half_mean": lambda h, w, b: (h - 0.5 * h.mean(-1, True)) * torch.rsqrt(_ms(h - 0.5 * h.mean(-1, True)) + EPS) * w,
}
LOOKALIKE_GATED: dict[str, Callable[..., Any]] = {
    "sigmoid": lambda g, u: torch.sigmoid(g) * u,
    "sigmoid_of_up": lambda g, u: g * torch.sigmoid(u) * g,
    "silu_added": lambda g, u: F.silu(g) + u,
    "silu_squared": lambda g, u: F.silu(g) * F.silu(g) * u,
    "three": lambda g, u: torch.sigmoid(g) * torch.sigmoid(u),
    "quick": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    "swish_beta": lambda g, u: g * torch.sigmoid(1.5 * g) * u,
    "negative": lambda g, u: g * torch.sigmoid(-g) * u,
    "relu": lambda g, u: F.relu(g) * u,
    "relu_squared": lambda g, u: F.relu(g).square() * u,
    "tanh": lambda g, u: torch.tanh(g) * u,
    "gelu_added": lambda g, u: F.gelu(g) + u,
    "cube_less": lambda g, u: 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.0447 * g**3))) * u,
    "root_less": lambda g, u: 0.5 * g * (1 + torch.tanh(0.8 * (g + 0.044715 * g**3))) * u,
    "no_half": lambda g, u: g * (1 + torch.erf(g / math.sqrt(2))) * u,
    "no_one": lambda g, u: 0.5 * g * torch.erf(g / math.sqrt(2)) * u,
    "minus_one": lambda g, u: 0.5 * g * (torch.erf(g / math.sqrt(2)) - 1) * u,
    "erf_scale": lambda g, u: 0.5 * g * (1 + torch.erf(g / 1.5)) * u,
    "elu": lambda g, u: F.elu(g) * u,
    "mish": lambda g, u: F.mish(g) * u,
}


def _swapped(x: Tensor) -> Tensor:
    n = x.shape[-1] // 2
    return torch.cat((x[..., n:], x[..., :n]), dim=-1)


def _other_sign(x: Tensor) -> Tensor:
    n = x.shape[-1] // 2
    return torch.cat((x[..., n:], -x[..., :n]), dim=-1)


def _both_signs(x: Tensor) -> Tensor:
    n = x.shape[-1] // 2
    return torch.cat((-x[..., n:], -x[..., :n]), dim=-1)


def _unswapped(x: Tensor) -> Tensor:
    n = x.shape[-1] // 2
    return torch.cat((-x[..., :n], x[..., n:]), dim=-1)


def _third(x: Tensor) -> Tensor:
    n = x.shape[-1] // 4
    return torch.cat((-x[..., n:], x[..., :n]), dim=-1)


def _odd_first(x: Tensor) -> Tensor:
    return torch.stack((x[..., 1::2], -x[..., ::2]), -1).flatten(-2)


def _formula(of: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda q, k, c, s: (of(q, c[:, None], s[:, None]), of(k, c[:, None], s[:, None]))


LOOKALIKE_ROPE: dict[str, Callable[..., Any]] = {
    "swapped": _turned(_swapped),
    "other_sign": _turned(_other_sign),
    "both_signs": _turned(_both_signs),
    "unswapped": _turned(_unswapped),
    "third": _turned(_third),
    "odd_first": _turned(_odd_first),
    "minus": _formula(lambda x, c, s: x * c - half(x) * s),
    "sine_of_both": _formula(lambda x, c, s: x * s + half(x) * s),
    "cosine_twice": _formula(lambda x, c, s: x * c + half(x) * c),
    "no_cosine": _formula(lambda x, c, s: x + half(x) * s),
    "no_sine": _formula(lambda x, c, s: x * c + half(x)),
    "scaled": _formula(lambda x, c, s: x * c * 1.1 + half(x) * s),
    "of_a_product": _formula(lambda x, c, s: (x + half(x)) * c * s),
    "squared": _formula(lambda x, c, s: x * c * c + half(x) * s),
    "one_tensor": lambda q, k, c, s: (q * c[:, None] + half(q) * s[:, None], k),
    "other_angles": lambda q, k, c, s: (q * c[:, None] + half(q) * s[:, None], k * s[:, None] + half(k) * c[:, None]),
}
LOOKALIKE_SOFTMAX: dict[str, Callable[..., Any]] = {
    "other_axis": lambda x: torch.softmax(x, -2),
    "first_axis": lambda x: F.softmax(x, dim=0),
    "log": lambda x: F.log_softmax(x, dim=-1),
    "exp": lambda x: torch.exp(x) / (1.0 + torch.exp(x).sum(-1, keepdim=True)),
    "sigmoid": lambda x: torch.sigmoid(x),
    "normalised": lambda x: x / x.sum(-1, keepdim=True),
}
LOOKALIKE_LOSS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    "none": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "nll": lambda x, t: F.nll_loss(x, t),
    "weighted": lambda x, t: F.cross_entropy(x, t, weight=torch.arange(x.shape[-1], dtype=torch.float32)),
    "soft": lambda x, t: F.cross_entropy(x, F.softmax(x * 0.5, -1)),
}
LOOKALIKE_ATTENTION: dict[str, Callable[..., Any]] = {
    "top_left": lambda q, k: F.scaled_dot_product_attention(q[:, :, :5], k, k, is_causal=True),
    "dropout": lambda q, k: F.scaled_dot_product_attention(q, k, k, dropout_p=0.5),
    "three_dims": lambda q, k: F.scaled_dot_product_attention(q[0], k[0], k[0]),
    "wide_heads": lambda q, k: F.scaled_dot_product_attention(*(torch.cat([x] * 17, -1) for x in (q, k, k))),
}
