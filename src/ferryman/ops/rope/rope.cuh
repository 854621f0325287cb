// Rotary embedding of q and k in one launch. y = x*cos + rot(x)*sin on the first `rotary` dimensions, the rest
// copied. A block takes whole tokens: its threads are (token, head, unit), and a thread keeps its unit's cosines
// and sines in registers while it walks over the heads.
//
// A unit is what one thread handles of one head: two packs, at d and d + rotary/2; interleaved: one pack of
// neighbouring pairs; beyond `rotary`: one pack to copy.

namespace ferryman {

struct RopeTensor {  // strides in elements; the last dimension has stride 1. out is contiguous (B, H, S, D)
    const void* data;
    void* out;
    i64 batch, head, token;
    i64 heads;
};

struct RopeTable {
    const void* data;
    i64 batch, token;
};

template <typename C, int V> FERRYMAN_DEVICE void load_table(float (&out)[V], const RopeTable& table, i64 offset) {
    Pack<C, V> pack;
    load<false>(pack, (const C*)table.data + offset);
    unpack(pack, out);
}

template <typename T, typename C, int V, bool INTERLEAVED>
FERRYMAN_DEVICE void rope(RopeTensor q, RopeTensor k, RopeTable cos, RopeTable sin, i64 batches, i64 tokens,
                          i64 dim, i64 rotary, int units, int heads_at_once, int tokens_at_once, i64 blocks) {
    // Interleaved elements come in pairs even where memory is not aligned for more.
    constexpr int STEP = INTERLEAVED && V == 1 ? 2 : V;
    const int half = (int)(rotary / 2);
    const int rotated_units = (INTERLEAVED ? (int)rotary : half) / STEP;
    const int all_units = rotated_units + (int)((dim - rotary + V - 1) / V);
    const int thread = platform::thread_index();
    const int lane = thread % units, head_slot = thread / units % heads_at_once;
    const int token_slot = thread / units / heads_at_once;
    if (token_slot >= tokens_at_once) return;  // no barrier follows
    const i64 all_tokens = batches * tokens;
    for (i64 t = platform::block_index() * tokens_at_once + token_slot; t < all_tokens;
         t += blocks * tokens_at_once) {
        i64 b, s;
        divide(t, tokens, b, s);
        for (int unit = lane; unit < all_units; unit += units) {
            const bool rotated = unit < rotated_units;
            const int first = rotated ? unit * STEP : (int)rotary + (unit - rotated_units) * V;
            float cos_first[STEP], sin_first[STEP], cos_second[STEP], sin_second[STEP];
            if (rotated) {
                i64 c = b * cos.batch + s * cos.token + first, n = b * sin.batch + s * sin.token + first;
                if constexpr (INTERLEAVED && V == 1) {
                    float one[1];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        load_table<C, 1>(one, cos, c + i);
                        cos_first[i] = one[0];
                        load_table<C, 1>(one, sin, n + i);
                        sin_first[i] = one[0];
                    }
                } else {
                    load_table<C, STEP>(cos_first, cos, c);
                    load_table<C, STEP>(sin_first, sin, n);
                }
                if constexpr (!INTERLEAVED) {
                    load_table<C, STEP>(cos_second, cos, c + half);
                    load_table<C, STEP>(sin_second, sin, n + half);
                }
            }
            for (i64 h = head_slot; h < q.heads + k.heads; h += heads_at_once) {
                const bool is_q = h < q.heads;
                const i64 head = is_q ? h : h - q.heads;
                const RopeTensor& tensor = is_q ? q : k;
                const T* in = (const T*)tensor.data + b * tensor.batch + head * tensor.head + s * tensor.token + first;
                T* out = (T*)tensor.out + ((b * tensor.heads + head) * tokens + s) * dim + first;
                if constexpr (INTERLEAVED && V == 1) {
                    Pack<T, 1> low, high;
                    load<true>(low, in);
                    if (!rotated) {
                        store(out, low);
                        continue;
                    }
                    load<true>(high, in + 1);
                    float a[1], c[1], y[1];
                    unpack(low, a);
                    unpack(high, c);
                    y[0] = a[0] * cos_first[0] - c[0] * sin_first[0];
                    pack(low, y);
                    store(out, low);
                    y[0] = c[0] * cos_first[1] + a[0] * sin_first[1];
                    pack(high, y);
                    store(out + 1, high);
                } else if constexpr (INTERLEAVED) {
                    Pack<T, V> x;
                    load<true>(x, in);
                    if (rotated) {
                        float a[V], y[V];
                        unpack(x, a);
#pragma unroll
                        for (int i = 0; i < V; i += 2) {
                            y[i] = a[i] * cos_first[i] - a[i + 1] * sin_first[i];
                            y[i + 1] = a[i + 1] * cos_first[i + 1] + a[i] * sin_first[i + 1];
                        }
                        pack(x, y);
                    }
                    store(out, x);
                } else {
                    Pack<T, V> low, high;
                    load<true>(low, in);
                    if (!rotated) {
                        store(out, low);
                        continue;
                    }
                    load<true>(high, in + half);
                    float a[V], c[V], y[V];
                    unpack(low, a);
                    unpack(high, c);
#pragma unroll
                    for (int i = 0; i < V; ++i) y[i] = a[i] * cos_first[i] - c[i] * sin_first[i];
                    pack(low, y);
                    store(out, low);
#pragma unroll
                    for (int i = 0; i < V; ++i) y[i] = c[i] * cos_second[i] + a[i] * sin_second[i];
                    pack(high, y);
                    store(out + half, high);
                }
            }
        }
    }
}

}  // namespace ferryman

#define FERRYMAN_ROPE(name, T, C, V, INTERLEAVED, THREADS)                                                       \
    FERRYMAN_KERNEL(THREADS, 768 / THREADS) /* 80 registers: at 64 two packs with their tables spill */           \
    void name(const ferryman::T* q, const ferryman::T* k, const ferryman::C* cos, const ferryman::C* sin,        \
              ferryman::T* q_out, ferryman::T* k_out, ferryman::i64 q_batch, ferryman::i64 q_head,               \
              ferryman::i64 q_token, ferryman::i64 k_batch, ferryman::i64 k_head, ferryman::i64 k_token,         \
              ferryman::i64 cos_batch, ferryman::i64 cos_token, ferryman::i64 sin_batch,                         \
              ferryman::i64 sin_token, ferryman::i64 q_heads, ferryman::i64 k_heads, ferryman::i64 batches,      \
              ferryman::i64 tokens, ferryman::i64 dim, ferryman::i64 rotary, ferryman::i64 units,                \
              ferryman::i64 heads_at_once, ferryman::i64 tokens_at_once, ferryman::i64 blocks) {                 \
        using namespace ferryman;                                                                                \
        rope<ferryman::T, ferryman::C, V, INTERLEAVED>(                                                          \
            RopeTensor{q, q_out, q_batch, q_head, q_token, q_heads},                                             \
            RopeTensor{k, k_out, k_batch, k_head, k_token, k_heads}, RopeTable{cos, cos_batch, cos_token},       \
            RopeTable{sin, sin_batch, sin_token}, batches, tokens, dim, rotary, (int)units, (int)heads_at_once,  \
            (int)tokens_at_once, blocks);                                                                        \
    }
