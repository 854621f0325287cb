"""Kernels of someone else: right ones, and ones that do everything that a kernel must not. See test_kernel.py."""

import ctypes
import multiprocessing
import os
import sys
import threading
import time

import torch


def rms_norm(x, weight, eps, cast_before_weight):
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return h.to(x.dtype).contiguous()
    if cast_before_weight:
        h = h.to(x.dtype).float()
    return (h * weight.float()).to(x.dtype).contiguous()


def other_names(hidden, w, epsilon):
    return rms_norm(hidden, w, epsilon, False)


def with_target(x, weight, eps, cast_before_weight, target):
    assert target.vendor == "cpu" and target.arch == "cpu"
    return rms_norm(x, weight, eps, cast_before_weight)


def twice(x, weight, eps, cast_before_weight):
    return rms_norm(x, weight, eps, cast_before_weight) * 2


def none(x, weight, eps, cast_before_weight):
    return None


def listed(x, weight, eps, cast_before_weight):
    return [rms_norm(x, weight, eps, cast_before_weight)]


def wide(x, weight, eps, cast_before_weight):
    return rms_norm(x.double(), weight, eps, cast_before_weight)


def flat(x, weight, eps, cast_before_weight):
    return rms_norm(x, weight, eps, cast_before_weight).reshape(-1)


def sparse(x, weight, eps, cast_before_weight):
    return rms_norm(x, weight, eps, cast_before_weight).to_sparse()


def meta(x, weight, eps, cast_before_weight):
    return rms_norm(x, weight, eps, cast_before_weight).to("meta")


def mutates(x, weight, eps, cast_before_weight):
    y = rms_norm(x, weight, eps, cast_before_weight)
    x.add_(1)
    return y


def overruns(x, weight, eps, cast_before_weight):
    """Writes one element behind its input, as a kernel with a wrong mask does."""
    y = rms_norm(x, weight, eps, cast_before_weight)
    extent = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    behind = x.storage_offset() + 1 + extent if x.numel() else 0
    torch.as_strided(x, (1,), (1,), behind).fill_(3)
    return y


_kept = {}


def stale(x, weight, eps, cast_before_weight):
    """The first result of each shape, for ever: its memory belongs to earlier results."""
    key = (x.shape, x.dtype)
    _kept[key] = _kept.get(key) if key in _kept else rms_norm(x, weight, eps, cast_before_weight)
    return _kept[key]


def raises(x, weight, eps, cast_before_weight):
    raise ValueError("no such tile")


def late_import(x, weight, eps, cast_before_weight):
    import a_library_that_is_not_here  # noqa: F401


def exits(x, weight, eps, cast_before_weight):
    sys.exit(3)


def refuses(x, weight, eps, cast_before_weight):
    raise NotImplementedError("only sm_90")


def refuses_wide(x, weight, eps, cast_before_weight):
    if x.shape[-1] > 1000:
        raise NotImplementedError(f"{x.shape[-1]} columns; at most 1000")
    return rms_norm(x, weight, eps, cast_before_weight)


def dies(x, weight, eps, cast_before_weight):
    if x.shape == (7, 257):
        sys.stderr.write("illegal instruction\n")
        os._exit(41)
    if x.shape == (3, 1):
        ctypes.string_at(0)
    if eps == 0.5:
        time.sleep(600)
    return rms_norm(x, weight, eps, cast_before_weight)


def always_dies(x, weight, eps, cast_before_weight):
    os._exit(9)


def leaves_children(x, weight, eps, cast_before_weight):
    if x.shape == (7, 257):
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
        os._exit(5)
    return rms_norm(x, weight, eps, cast_before_weight)


def chatty(x, weight, eps, cast_before_weight):
    print('{"cell": 1}' * 1000)  # noqa: T201
    os.write(1, b"not a message\n")
    return rms_norm(x, weight, eps, cast_before_weight)


def keeps_running(x, weight, eps, cast_before_weight):
    threading.Thread(target=time.sleep, args=(600,)).start()
    return rms_norm(x, weight, eps, cast_before_weight)


def no_such_order(hidden, eps, weight):
    return hidden


def demanding(x, weight, eps, cast_before_weight, block):
    return x


def rotated_in_place(q, k, cos, sin, *, interleaved):
    """As libraries write it: nothing is returned."""
    for x, turned in zip((q, k), rope(q, k, cos, sin, interleaved=interleaved), strict=True):
        x.copy_(turned)


def rotated_elsewhere(q, k, cos, sin, *, interleaved):
    """It forgets to write back, and says nothing."""
    rope(q, k, cos, sin, interleaved=interleaved)


def rope(q, k, cos, sin, *, interleaved):
    def turn(x):
        width = cos.shape[-1]
        h, c, s = x[..., :width].float(), cos.float().unsqueeze(1), sin.float().unsqueeze(1)
        if interleaved:
            other = torch.stack((-h[..., 1::2], h[..., 0::2]), -1).flatten(-2)
        else:
            other = torch.cat((-h[..., width // 2 :], h[..., : width // 2]), -1)
        return torch.cat(((h * c + other * s).to(x.dtype), x[..., width:]), -1).contiguous()

    return turn(q), turn(k)


def rope_q_only(q, k, cos, sin, *, interleaved):
    return rope(q, k, cos, sin, interleaved=interleaved)[0]


def random_rows(x):
    """Softmax whose sum is taken in another order each time."""
    order = torch.randperm(x.shape[-1])
    e = torch.exp(x.float() - x.float().amax(-1, keepdim=True)) if x.numel() else x.float()
    return (e / e[..., order].sum(-1, keepdim=True)).to(x.dtype).contiguous()


number = 3


def flushing(x, weight, eps, cast_before_weight):
    """Right, and leaves the process with subnormals flushed, float64 by default and tf32 products."""
    result = rms_norm(x, weight, eps, cast_before_weight)
    torch.set_flush_denormal(True)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    return result


def greedy(x, weight, eps, cast_before_weight):
    """Takes memory until something stops it."""
    kept = []
    while True:
        kept.append(torch.ones(1 << 25))
        time.sleep(0.05)


def spinning(x, weight, eps, cast_before_weight):
    while True:
        pass
