// Rotary embedding of q and k in one launch. y = x*cos + rot(x)*sin on the first `rotary` dimensions, the rest
// copied; BACKWARD, the transposed rotation. A thread keeps its cosines and sines in registers for several heads.
//
// `rope_packs`, where a head is whole packs: a thread has one, in some heads of some tokens, and gets the other of each
// pair from its own pack (interleaved) or by a shuffle. `rope`, for anything else: a thread walks over heads and has units
// of one: two packs, at d and d + rotary/2; interleaved, two lone neighbours; beyond `rotary`, one pack to copy.

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

// Which product is rounded is not left to the compiler: both kernels give the same bits, so `rope_` gives those of `rope`.
FERRYMAN_DEVICE float turned(float x, float cos, float other, float sin) { return platform::fma(x, cos, other * sin); }

// The sines of a pair, for the transposed rotation: x cos + rot(x) sin becomes x cos - rot(x) sin of the other.
FERRYMAN_DEVICE void transpose(float& first, float& second) {
    const float was = first;
    first = -second, second = -was;
}

// OVER: the result goes where the input was. A thread loads both packs of a unit before it stores either, and no other
// thread has any of their elements; the rest, beyond `rotary`, stays.
template <typename T, typename C, int V, bool INTERLEAVED, bool OVER, bool BACKWARD>
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
                    if constexpr (BACKWARD) {
#pragma unroll
                        for (int i = 0; i < V; ++i) transpose(sin_low[i], sin_high[i]);
                    }
                } else if constexpr (BACKWARD) {
#pragma unroll
                    for (int i = 0; i < V; i += 2) transpose(sin_low[i], sin_low[i + 1]);
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
                                a[i] = turned(x, cos_low[i], y, -sin_low[i]);
                                c[i] = turned(y, cos_high[i], x, sin_high[i]);
                            }
                            pack(high[j], c);
                            store(out + distance, high[j]);
                        } else {
#pragma unroll
                            for (int i = 0; i < V; i += 2) {
                                float x = a[i], y = a[i + 1];
                                a[i] = turned(x, cos_low[i], y, -sin_low[i]);
                                a[i + 1] = turned(y, cos_low[i + 1], x, sin_low[i + 1]);
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

// The other element of every pair: `across` lanes away, or the neighbour in the pack.
template <bool INTERLEAVED, typename T, int V> FERRYMAN_DEVICE Pack<T, V> partner(const Pack<T, V>& pack, int across) {
    Pack<T, V> other;
#pragma unroll
    for (int i = 0; i < Pack<T, V>::WORDS; ++i) {
        if constexpr (!INTERLEAVED) other.word[i] = platform::shuffle_xor(pack.word[i], across);
        else if constexpr (sizeof(T) == 4) other.word[i] = pack.word[i ^ 1];
        else other.word[i] = pack.word[i] << 16 | pack.word[i] >> 16;
    }
    return other;
}

// The factors of the others: the sines, negative for the first of each pair; BACKWARD, the others' sines, negative for the
// second.
template <bool INTERLEAVED, bool BACKWARD, typename C, int V>
FERRYMAN_DEVICE Pack<C, V> factors(const Pack<C, V>& sin, int across, bool first) {
    constexpr u32 ALL = sizeof(C) == 4 ? 0x80000000u : 0x80008000u;
    Pack<C, V> factor = sin;
    if constexpr (BACKWARD) factor = partner<INTERLEAVED>(sin, across);
#pragma unroll
    for (int i = 0; i < Pack<C, V>::WORDS; ++i) {
        if constexpr (!INTERLEAVED) factor.word[i] ^= first != BACKWARD ? ALL : 0u;
        else if constexpr (sizeof(C) == 4) factor.word[i] ^= (i % 2 == 0) != BACKWARD ? ALL : 0u;
        else factor.word[i] ^= BACKWARD ? 0x80000000u : 0x8000u;
    }
    return factor;
}

// Threads that should fit an SM: of 64 registers, or 80 where tables and heads are of different types.
template <typename T, typename C> struct PacksFitting { static constexpr int threads = 768; };
template <typename T> struct PacksFitting<T, T> { static constexpr int threads = 1024; };

// How blocks of `rope_packs` go over the work. The heads are q's, then k's. All places are found without a division, whose
// latency each block would wait for: numbers of bits, and 2^32 / n rounded up.
struct RopeWalk {
    int lane_bits, token_bits;  // lanes of a head; tokens that threads of a block have side by side
    int heads_at_once;          // heads that they have side by side
    u32 stretch, groups;        // tiles that follow one another; blocks for a tile's heads
    u64 stretch_inverse, groups_inverse, batches_inverse;
};

FERRYMAN_DEVICE u32 divided(u32 a, u64 inverse) { return (u32)(a * inverse >> 32); }  // exact where a * n < 2^32

// Where a head lies: what differs between q and k.
template <typename T> struct HeadsOf {
    const T* in;
    T* out;
    int in_head, in_token, out_head, out_token;

    template <bool OVER>
    static FERRYMAN_DEVICE HeadsOf at(const RopeTensor& x, int b, int s, int column, int tokens, int dim) {
        HeadsOf found;
        found.in_head = (int)x.head, found.in_token = (int)x.token;
        found.in = (const T*)x.data + (b * x.batch + (i64)s * found.in_token + column);
        if constexpr (OVER) {
            found.out = (T*)found.in, found.out_head = found.in_head, found.out_token = found.in_token;
        } else {
            found.out_head = tokens * dim, found.out_token = dim;
            found.out = (T*)x.out + ((i64)(b * (int)x.heads) * found.out_head + (i64)s * dim + column);
        }
        return found;
    }
};

// A block takes a tile of tokens of some heads; a thread, one pack in HEADS heads of each of TOKENS tokens, and all its loads
// at once. Blocks go over a stretch of tokens first, then over the heads, then over the batch, which may share the angles. So
// the result is written head by head, and the angles of the stretch stay in L2: heads first, an H200 read 6 MB more, and
// reading angles took 2.5 us of 87 (32 and 8 heads of 128, 4 x 4096 tokens).
template <typename T, typename C, int V, bool INTERLEAVED, bool OVER, bool BACKWARD, int TOKENS, int HEADS>
FERRYMAN_DEVICE void rope_packs(const RopeTensor& q, const RopeTensor& k, const RopeTable& cos, const RopeTable& sin,
                                u32 batches, int tokens, int dim, int rotary, const RopeWalk& walk) {
    constexpr Access READ = OVER ? WRITTEN : ONCE;
    const int thread = after_previous(platform::thread_index());
    const int column = (thread & ((1 << walk.lane_bits) - 1)) * V, slot = thread >> walk.lane_bits;
    const u32 item = (u32)platform::block_index();
    const u32 heads_item = divided(item, walk.stretch_inverse), rest = divided(heads_item, walk.groups_inverse);
    const u32 stretch = divided(rest, walk.batches_inverse);
    const int b = (int)(rest - stretch * batches), group = (int)(heads_item - rest * walk.groups);
    const int tile = (int)(stretch * walk.stretch + item - heads_item * walk.stretch), apart = 1 << walk.token_bits;
    const int s = (tile * TOKENS << walk.token_bits) + (slot & (apart - 1));
    const int q_heads = (int)q.heads, all_heads = q_heads + (int)k.heads;
    const int from = group * HEADS * walk.heads_at_once + (slot >> walk.token_bits);
    const bool rotated = column < rotary;
    const int across = rotary / 2 / V;
    Pack<C, V> c[TOKENS], f[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        zero(c[t]), zero(f[t]);
        if (s + t * apart < tokens && rotated) {
            load<AGAIN>(c[t], (const C*)cos.data + b * cos.batch + (s + t * apart) * cos.token + column);
            load<AGAIN>(f[t], (const C*)sin.data + b * sin.batch + (s + t * apart) * sin.token + column);
        }
    }
    const HeadsOf<T> of_q = HeadsOf<T>::template at<OVER>(q, b, s, column, tokens, dim);
    const HeadsOf<T> of_k = HeadsOf<T>::template at<OVER>(k, b, s, column, tokens, dim);
    Pack<T, V> x[HEADS][TOKENS];
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
        const int head = from + j * walk.heads_at_once;
        const T* in = head < q_heads ? of_q.in + (i64)head * of_q.in_head : of_k.in + (i64)(head - q_heads) * of_k.in_head;
        const i64 step = (i64)(head < q_heads ? of_q.in_token : of_k.in_token) * apart;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            zero(x[j][t]);
            if (head < all_heads && s + t * apart < tokens) load<READ>(x[j][t], in + t * step);
        }
    }
    // All threads stay for the shuffles.
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) f[t] = factors<INTERLEAVED, BACKWARD>(f[t], across, column < rotary / 2);
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
        const int head = from + j * walk.heads_at_once;
        T* out = head < q_heads ? of_q.out + (i64)head * of_q.out_head : of_k.out + (i64)(head - q_heads) * of_k.out_head;
        const i64 step = (i64)(head < q_heads ? of_q.out_token : of_k.out_token) * apart;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const Pack<T, V> other = partner<INTERLEAVED>(x[j][t], across);
            forget(c[t]), forget(f[t]);
            if (rotated) {
                float values[V], others[V], cosines[V], sines[V];
                unpack(x[j][t], values);
                unpack(other, others);
                unpack(c[t], cosines);
                unpack(f[t], sines);
#pragma unroll
                for (int i = 0; i < V; ++i) values[i] = turned(values[i], cosines[i], others[i], sines[i]);
                pack(x[j][t], values);
            }
            if (head < all_heads && s + t * apart < tokens) store(out + t * step, x[j][t]);
        }
    }
}

}  // namespace ferryman

#define FERRYMAN_ROPE_TENSORS(T, C)                                                                                  \
    const ferryman::T *q, const ferryman::T *k, const ferryman::C *cos, const ferryman::C *sin, ferryman::T *q_out,  \
        ferryman::T *k_out, ferryman::i64 q_batch, ferryman::i64 q_head, ferryman::i64 q_token,                      \
        ferryman::i64 k_batch, ferryman::i64 k_head, ferryman::i64 k_token, ferryman::i64 cos_batch,                 \
        ferryman::i64 cos_token, ferryman::i64 sin_batch, ferryman::i64 sin_token, ferryman::i64 q_heads,            \
        ferryman::i64 k_heads, ferryman::i64 batches, ferryman::i64 tokens, ferryman::i64 dim, ferryman::i64 rotary
#define FERRYMAN_ROPE_ARGUMENTS                                                                                      \
    ferryman::RopeTensor{q, q_out, q_batch, q_head, q_token, q_heads},                                               \
        ferryman::RopeTensor{k, k_out, k_batch, k_head, k_token, k_heads},                                           \
        ferryman::RopeTable{cos, cos_batch, cos_token}, ferryman::RopeTable{sin, sin_batch, sin_token}

// 96 registers: at 80 the tables of two packs spill
#define FERRYMAN_ROPE(name, T, C, V, INTERLEAVED, OVER, BACKWARD, THREADS)                                           \
    FERRYMAN_KERNEL(THREADS, 640 / THREADS)                                                                          \
    void name(FERRYMAN_ROPE_TENSORS(T, C), ferryman::i64 units, ferryman::i64 heads_at_once,                         \
              ferryman::i64 tokens_at_once, ferryman::i64 blocks) {                                                  \
        ferryman::rope<ferryman::T, ferryman::C, V, INTERLEAVED, OVER, BACKWARD>(                                    \
            FERRYMAN_ROPE_ARGUMENTS, batches, tokens, dim, rotary, (int)units, (int)heads_at_once,                   \
            (int)tokens_at_once, blocks);                                                                            \
    }

// A launch has THREADS threads in a block, or fewer.
#define FERRYMAN_ROPE_PACKS(name, T, C, V, INTERLEAVED, OVER, BACKWARD, THREADS, TOKENS, HEADS)                      \
    FERRYMAN_KERNEL(THREADS, (ferryman::PacksFitting<ferryman::T, ferryman::C>::threads / THREADS))                  \
    void name(FERRYMAN_ROPE_TENSORS(T, C), ferryman::i64 lane_bits, ferryman::i64 token_bits,                        \
              ferryman::i64 heads_at_once, ferryman::i64 stretch, ferryman::i64 groups,                              \
              ferryman::i64 stretch_inverse, ferryman::i64 groups_inverse, ferryman::i64 batches_inverse) {          \
        using namespace ferryman;                                                                                    \
        const RopeWalk walk{(int)lane_bits, (int)token_bits, (int)heads_at_once, (u32)stretch, (u32)groups,          \
                            (u64)stretch_inverse, (u64)groups_inverse, (u64)batches_inverse};                        \
        rope_packs<ferryman::T, ferryman::C, V, INTERLEAVED, OVER, BACKWARD, TOKENS, HEADS>(                         \
            FERRYMAN_ROPE_ARGUMENTS, (u32)batches, (int)tokens, (int)dim, (int)rotary, walk);                        \
    }
