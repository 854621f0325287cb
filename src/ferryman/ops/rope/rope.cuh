// Rotary embedding of q and k in one launch. y = x*cos + rot(x)*sin on the first `rotary` dimensions, the rest
// copied. A block takes whole tokens: its threads are (token, head, unit), and a thread keeps its unit's cosines
// and sines in registers while it walks over the heads.
//
// A unit is what one thread handles of one head: two packs, at d and d + rotary/2; interleaved: one pack of
// neighbouring pairs, or two lone neighbours where memory is not aligned; beyond `rotary`: one pack to copy.

namespace ferryman {

struct RopeTensor {  // strides in elements; the last dimension has stride 1. out is contiguous (B, H, S, D), or data
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
    load<AGAIN>(pack, (const C*)table.data + offset);
    unpack(pack, out);
}

// OVER: the result goes where the input was. A thread loads both packs of a unit before it stores either, and no other
// thread has any of their elements; the rest, beyond `rotary`, stays.
template <typename T, typename C, int V, bool INTERLEAVED, bool OVER>
FERRYMAN_DEVICE void rope(RopeTensor q, RopeTensor k, RopeTable cos, RopeTable sin, i64 batches, i64 tokens,
                          i64 dim, i64 rotary, int units, int heads_at_once, int tokens_at_once, i64 blocks) {
    constexpr bool TWO = !INTERLEAVED || V == 1;  // a unit is two packs, `distance` apart
    constexpr int TOGETHER = 2;                   // heads: four loads of 16 bytes in flight
    constexpr Access READ = OVER ? WRITTEN : ONCE;
    const int half = (int)(rotary / 2), distance = INTERLEAVED ? 1 : half;
    const int step = INTERLEAVED && V == 1 ? 2 : V;
    const int rotated_units = (INTERLEAVED ? (int)rotary : half) / step;
    const int all_units = rotated_units + (OVER ? 0 : (int)((dim - rotary + V - 1) / V));
    const int q_heads = (int)q.heads, all_heads = (int)(q.heads + k.heads);
    const i64 out_head = tokens * dim;
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
            const int first = rotated ? unit * step : (int)rotary + (unit - rotated_units) * V;
            float cos_low[V], sin_low[V], cos_high[TWO ? V : 1], sin_high[TWO ? V : 1];
            if (rotated) {
                const i64 c = b * cos.batch + s * cos.token + first, d = b * sin.batch + s * sin.token + first;
                load_table<C>(cos_low, cos, c);
                load_table<C>(sin_low, sin, d);
                if constexpr (TWO) {
                    load_table<C>(cos_high, cos, c + distance);
                    load_table<C>(sin_high, sin, d + distance);
                }
            }
            const T* q_in = (const T*)q.data + b * q.batch + s * q.token + first;
            const T* k_in = (const T*)k.data + b * k.batch + s * k.token + first;
            T* q_out = OVER ? (T*)q_in : (T*)q.out + (b * q.heads * tokens + s) * dim + first;
            T* k_out = OVER ? (T*)k_in : (T*)k.out + (b * k.heads * tokens + s) * dim + first;
            for (int h = head_slot; h < all_heads; h += heads_at_once * TOGETHER) {
                Pack<T, V> low[TOGETHER], high[TOGETHER];
#pragma unroll
                for (int j = 0; j < TOGETHER; ++j) {
                    const int head = h + j * heads_at_once;
                    if (head >= all_heads) continue;
                    const T* in = head < q_heads ? q_in + head * q.head : k_in + (head - q_heads) * k.head;
                    load<READ>(low[j], in);
                    if (TWO && rotated) load<READ>(high[j], in + distance);
                }
#pragma unroll
                for (int j = 0; j < TOGETHER; ++j) {
                    const int head = h + j * heads_at_once;
                    if (head >= all_heads) continue;
                    const i64 q_step = OVER ? q.head : out_head, k_step = OVER ? k.head : out_head;
                    T* out = head < q_heads ? q_out + head * q_step : k_out + (head - q_heads) * k_step;
                    if (rotated) {
                        float a[V], c[V];
                        unpack(low[j], a);
                        if constexpr (TWO) {
                            unpack(high[j], c);
#pragma unroll
                            for (int i = 0; i < V; ++i) {
                                float x = a[i], y = c[i];
                                a[i] = x * cos_low[i] - y * sin_low[i];
                                c[i] = y * cos_high[i] + x * sin_high[i];
                            }
                            pack(high[j], c);
                            store(out + distance, high[j]);
                        } else {
#pragma unroll
                            for (int i = 0; i < V; i += 2) {
                                float x = a[i], y = a[i + 1];
                                a[i] = x * cos_low[i] - y * sin_low[i];
                                a[i + 1] = y * cos_low[i + 1] + x * sin_low[i + 1];
                            }
                        }
                        pack(low[j], a);
                    }
                    store(out, low[j]);
                }
            }
        }
    }
}

}  // namespace ferryman

#define FERRYMAN_ROPE(name, T, C, V, INTERLEAVED, THREADS, OVER)                                                 \
    FERRYMAN_KERNEL(THREADS, 640 / THREADS) /* 96 registers: at 80 the tables of two packs spill */              \
    void name(const ferryman::T* q, const ferryman::T* k, const ferryman::C* cos, const ferryman::C* sin,        \
              ferryman::T* q_out, ferryman::T* k_out, ferryman::i64 q_batch, ferryman::i64 q_head,               \
              ferryman::i64 q_token, ferryman::i64 k_batch, ferryman::i64 k_head, ferryman::i64 k_token,         \
              ferryman::i64 cos_batch, ferryman::i64 cos_token, ferryman::i64 sin_batch,                         \
              ferryman::i64 sin_token, ferryman::i64 q_heads, ferryman::i64 k_heads, ferryman::i64 batches,      \
              ferryman::i64 tokens, ferryman::i64 dim, ferryman::i64 rotary, ferryman::i64 units,                \
              ferryman::i64 heads_at_once, ferryman::i64 tokens_at_once, ferryman::i64 blocks) {                 \
        using namespace ferryman;                                                                                \
        rope<ferryman::T, ferryman::C, V, INTERLEAVED, OVER>(                                                    \
            RopeTensor{q, q_out, q_batch, q_head, q_token, q_heads},                                             \
            RopeTensor{k, k_out, k_batch, k_head, k_token, k_heads}, RopeTable{cos, cos_batch, cos_token},       \
            RopeTable{sin, sin_batch, sin_token}, batches, tokens, dim, rotary, (int)units, (int)heads_at_once,  \
            (int)tokens_at_once, blocks);                                                                        \
    }
