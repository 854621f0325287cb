# ruff: noqa: E501
"""The tenth set: attention whose bias and masks come in two or three steps, written before the porting code was read."""

from __future__ import annotations

TENTH = r'''
W, H, D, S = 64, 4, 16, 9
PAD = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])


# ---- language
@case("attention", lambda c: (c(), T(2, S, W)))
class TenAlibi(nn.Module):
    """BLOOM's and MPT's: slopes times keys' positions, and a triangle of infinities that is added."""

    def __init__(self):
        super().__init__()
        self.Wqkv, self.out_proj = nn.Linear(W, 3 * W, bias=False), nn.Linear(W, W, bias=False)
        slopes = torch.tensor([2.0 ** (-(i + 1) * 8 / H) for i in range(H)])
        self.register_buffer("slopes", slopes.view(1, H, 1, 1), persistent=False)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.Wqkv(x).view(b, n, 3, H, D).permute(2, 0, 3, 1, 4)
        w = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(D)
        w = w + self.slopes * torch.arange(1 - n, 1, device=x.device).view(1, 1, 1, n)
        w = w + torch.full((n, n), float("-inf"), device=x.device, dtype=w.dtype).triu(1)
        p = w.softmax(dim=-1)
        return self.out_proj((p @ v).transpose(1, 2).reshape(b, n, c))


@case("attention", lambda c: (c(), T(2, S, W), PAD))
class TenNano(nn.Module):
    """nanoGPT's, with padding: two masked_fills of infinity."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x, mask):
        B, N, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, N, H, C // H).transpose(1, 2)
        q = q.view(B, N, H, C // H).transpose(1, 2)
        v = v.view(B, N, H, C // H).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :N, :N] == 0, float("-inf"))
        att = att.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, N, C)
        return self.c_proj(y)


@case("attention", lambda c: (c(), T(2, S, W), PAD.bool()))
class TenX(nn.Module):
    """x-transformers': einsums, the padding first, then a triangle, with the most negative number."""

    def __init__(self):
        super().__init__()
        self.scale = D**-0.5
        self.to_q, self.to_k, self.to_v = (nn.Linear(W, W, bias=False) for _ in range(3))
        self.to_out = nn.Linear(W, W, bias=False)

    def forward(self, x, mask):
        n = x.shape[1]
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        mask_value = -torch.finfo(sim.dtype).max
        sim = sim.masked_fill(~mask[:, None, None, :], mask_value)
        causal = torch.ones((n, n), dtype=torch.bool, device=x.device).triu(1)
        sim = sim.masked_fill(causal, mask_value)
        attn = sim.softmax(dim=-1, dtype=torch.float32).to(sim.dtype)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


@case("attention", lambda c: (c(), T(2, S, W), PAD))
class TenFive(nn.Module):
    """T5's: no scale, buckets of distances in an embedding, and a mask of its own that is added to them first."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(W, W, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(8, H)

    def compute_bias(self, n, device):
        far = torch.arange(n, device=device)[None, :] - torch.arange(n, device=device)[:, None]
        return self.relative_attention_bias(far.clamp(-4, 3) + 4).permute([2, 0, 1]).unsqueeze(0)

    def forward(self, hidden_states, attention_mask):
        b, n, _ = hidden_states.shape
        q, k, v = (p(hidden_states).view(b, -1, H, D).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2))
        extended = (1.0 - attention_mask[:, None, None, :].to(scores.dtype)) * torch.finfo(scores.dtype).min
        position_bias = self.compute_bias(n, scores.device) + extended
        scores += position_bias
        w = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o(torch.matmul(w, v).transpose(1, 2).contiguous().view(b, -1, W))


@case("attention", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D), PAD))
class TenHeads(nn.Module):
    """Of heads that are given: a window and a padding mask, by where."""

    def __init__(self, window=4):
        super().__init__()
        self.window = window

    def forward(self, q, k, v, keep):
        n = q.shape[-2]
        s = torch.einsum("bhqd,bhkd->bhqk", q, k) / D**0.5
        i = torch.arange(n, device=q.device)
        near = (i[:, None] - i[None, :]).abs() < self.window
        s = torch.where(near, s, torch.tensor(float("-inf"), dtype=s.dtype, device=s.device))
        s = torch.where(keep[:, None, None, :].bool(), s, torch.tensor(-1e9, dtype=s.dtype, device=s.device))
        return torch.einsum("bhqk,bhkd->bhqd", s.softmax(-1), v)


@case("attention", lambda c: (c(), T(2, S, W), PAD))
class TenBertCausal(nn.Module):
    """BERT's as a decoder: the two masks are one, which is made of numbers and added."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)

    def transpose_for_scores(self, x):
        return x.view(x.size()[:-1] + (H, D)).permute(0, 2, 1, 3)

    def forward(self, x, attention_mask):
        n = x.shape[1]
        q, k, v = (self.transpose_for_scores(p(x)) for p in (self.query, self.key, self.value))
        ids = torch.arange(n, device=x.device)
        causal = ids[None, None, :].repeat(x.shape[0], n, 1) <= ids[None, :, None]
        extended = causal[:, None, :, :].to(x.dtype) * attention_mask[:, None, None, :].to(x.dtype)
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(D)
        scores = scores + (1.0 - extended) * -10000.0
        context = torch.matmul(nn.functional.softmax(scores, dim=-1), v).permute(0, 2, 1, 3).contiguous()
        return context.view(context.size()[:-2] + (W,))


# ---- speech
@case("attention", lambda c: (c(), T(2, S, W), PAD == 0))
class TenSpeech(nn.Module):
    """A speech encoder's: padding and a look-ahead of two frames, and a bias of distances that is no parameter."""

    def __init__(self, ahead=2):
        super().__init__()
        self.ahead = ahead
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(W, W) for _ in range(4))
        self.register_buffer("decay", torch.linspace(0.02, 0.3, H))

    def forward(self, x, padding):
        b, t, _ = x.shape
        q = self.linear_q(x).view(b, t, H, D).transpose(1, 2)
        k = self.linear_k(x).view(b, t, H, D).transpose(1, 2)
        v = self.linear_v(x).view(b, t, H, D).transpose(1, 2)
        scores = torch.matmul(q * D**-0.5, k.transpose(-2, -1))
        gap = torch.arange(t, device=x.device).view(1, -1) - torch.arange(t, device=x.device).view(-1, 1)
        scores = scores - self.decay.view(1, -1, 1, 1) * gap.abs()
        scores = scores.masked_fill(gap > self.ahead, float("-inf"))
        scores = scores.masked_fill(padding.unsqueeze(1).unsqueeze(2), float("-inf"))
        return self.linear_out(torch.matmul(scores.softmax(-1), v).transpose(1, 2).contiguous().view(b, -1, W))


@case("attention", lambda c: (c(), T(S, 2, W), PAD == 0))
class TenFairseq(nn.Module):
    """fairseq's: time first, heads in the batch, a triangle that is added, and padding of sequences."""

    def __init__(self):
        super().__init__()
        self.scaling = D**-0.5
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(W, W) for _ in range(4))

    def forward(self, query, key_padding_mask):
        tgt_len, bsz, embed_dim = query.size()
        q = self.q_proj(query) * self.scaling
        k, v = self.k_proj(query), self.v_proj(query)
        q = q.contiguous().view(tgt_len, bsz * H, D).transpose(0, 1)
        k = k.contiguous().view(-1, bsz * H, D).transpose(0, 1)
        v = v.contiguous().view(-1, bsz * H, D).transpose(0, 1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        future = torch.triu(torch.full((tgt_len, tgt_len), float("-inf"), device=q.device, dtype=q.dtype), 1)
        attn_weights = attn_weights + future.unsqueeze(0)
        attn_weights = attn_weights.view(bsz, H, tgt_len, tgt_len)
        attn_weights = attn_weights.masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2).to(torch.bool), float("-inf"))
        attn_weights = attn_weights.view(bsz * H, tgt_len, tgt_len)
        attn = torch.bmm(F.softmax(attn_weights, dim=-1), v)
        return self.out_proj(attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim))


# ---- vision
@case("attention", lambda c: (c(), T(4, 9, W), (torch.rand(2, 9, 9) < 0.4).float() * -100.0))
class TenSwin(nn.Module):
    """Swin's: a learned table of relative places, and a mask of each window that is added in another view."""

    def __init__(self, side=3):
        super().__init__()
        self.qkv, self.proj, self.scale = nn.Linear(W, 3 * W), nn.Linear(W, W), D**-0.5
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * side - 1) ** 2, H) / 4)
        at = torch.stack(torch.meshgrid([torch.arange(side), torch.arange(side)], indexing="ij")).flatten(1)
        far = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + side - 1
        self.register_buffer("relative_position_index", far[..., 0] * (2 * side - 1) + far[..., 1])

    def forward(self, x, mask):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, H, C // H).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        nW = mask.shape[0]
        attn = attn.view(B_ // nW, nW, H, N, N) + mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, H, N, N)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))


@case("attention", lambda c: (c(), T(2, 12, W), T(2, S, 48), PAD.bool(), T(2, 12, S)))
class TenPairs(nn.Module):
    """Pairs of objects have a bias of their own, which comes with the call; text is padded."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = nn.Linear(W, W), nn.Linear(48, W), nn.Linear(48, W), nn.Linear(W, W)

    def forward(self, x, text, text_mask, pair_bias):
        q = self.to_q(x).unflatten(-1, (H, D)).transpose(1, 2)
        k = self.to_k(text).unflatten(-1, (H, D)).transpose(1, 2)
        v = self.to_v(text).unflatten(-1, (H, D)).transpose(1, 2)
        logits = q @ k.mT * D**-0.5
        logits = logits + pair_bias.unsqueeze(1)
        logits = logits.masked_fill(~text_mask[:, None, None], torch.finfo(logits.dtype).min)
        return self.to_out((logits.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


@case("attention", lambda c: (c(), T(2, S, W), PAD))
class TenThree(nn.Module):
    """A window, a triangle and padding, each in place."""

    def __init__(self, window=5):
        super().__init__()
        self.window = window
        self.qkv, self.out = nn.Linear(W, 3 * W, bias=False), nn.Linear(W, W, bias=False)

    def forward(self, x, mask):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, H, D).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        s = torch.matmul(q, k.transpose(2, 3)).mul(D**-0.5)
        ones = torch.ones(n, n, dtype=torch.bool, device=x.device)
        s.masked_fill_(ones.triu(1), -1e9)
        s.masked_fill_(ones.tril(-self.window), -1e9)
        s.masked_fill_((mask == 0)[:, None, None, :], -1e9)
        return self.out(torch.softmax(s, dim=-1).matmul(v).transpose(1, 2).reshape(b, n, -1))


@case("attention", lambda c: (c(), T(2, S, W), torch.tensor([[0] * 4 + [1] * 5, [0] * 3 + [1] * 3 + [2] * 3]), PAD))
class TenPacked(nn.Module):
    """Packed documents: another document, a later token, and padding, joined by and; then one fill."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W, bias=False), nn.Linear(W, W, bias=False)

    def forward(self, x, segments, mask):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, H, D).transpose(1, 3).unbind(2)
        same = segments[:, :, None] == segments[:, None, :]
        seen = torch.tril(torch.ones(n, n, dtype=torch.bool, device=x.device))[None] & same
        logits = (q @ k.transpose(-1, -2)) * D**-0.5
        logits = logits.masked_fill(~seen[:, None], -1e4)
        logits = logits.masked_fill(mask[:, None, None, :].eq(0), -1e4)
        return self.out((F.softmax(logits, -1) @ v).transpose(1, 2).flatten(2))
'''
