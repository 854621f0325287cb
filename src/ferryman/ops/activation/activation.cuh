// silu(gate) * up and gelu(gate) * up. Two reads, one write; float arithmetic, one rounding.

namespace ferryman {

// 1 / (1 + exp(-v)) for a result rounded to T: without overflow, and without the cancellation of 1 + tanh for negative
// v. NaN stays NaN. The sum is in [1, 2], where the approximate reciprocal (1 ulp) has no special cases.
template <typename T> FERRYMAN_DEVICE float sigmoid(float v) {
    float e = exp_of<T>(v < 0.0f ? v : -v);
    return (v < 0.0f ? e : 1.0f) * platform::reciprocal(1.0f + e);
}

struct Silu {  // -inf gives NaN (-inf * 0), as the definition does
    template <typename T> static FERRYMAN_DEVICE float apply(float v) { return v * sigmoid<T>(v); }
};

struct GeluTanh {  // (1 + tanh(u)) / 2 == sigmoid(2u)
    template <typename T> static FERRYMAN_DEVICE float apply(float v) {
        float twice_u = v * (1.5957691216f + 0.0713548163f * (v * v));  // 2*sqrt(2/pi) * (1, 0.044715)
        return v * sigmoid<T>(twice_u);
    }
};

struct GeluErf {  // (1 + erf(t)) / 2 == erfc(-t) / 2
    template <typename T> static FERRYMAN_DEVICE float apply(float v) {
        return v * (0.5f * platform::erfc(v * -0.70710678119f));
    }
};

template <typename Act, typename T, int V> FERRYMAN_DEVICE void gate_pack(Pack<T, V>& g, const Pack<T, V>& u) {
    float a[V], b[V];
    unpack(g, a);
    unpack(u, b);
#pragma unroll
    for (int i = 0; i < V; ++i) a[i] = Act::template apply<T>(a[i]) * b[i];
    pack(g, a);
}

// Tensors that are contiguous as a whole, n elements each: a block's tile is THREADS * PACKS * V of them. EXACT: n is whole
// tiles, and every tile has a block. Otherwise what is left of n beyond whole packs is the first block's, one by one.
template <typename Act, typename T, int V, int THREADS, int PACKS, bool EXACT>
FERRYMAN_DEVICE void gated_flat(const T* gate, const T* up, T* y, i64 n, i64 blocks) {
    constexpr i64 TILE = (i64)THREADS * PACKS * V;
    const int thread = after_previous(platform::thread_index());
    i64 start = platform::block_index() * TILE + thread * V;
    do {
        Pack<T, V> g[PACKS], u[PACKS];
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const i64 at = start + p * THREADS * V;
            if (!EXACT && at + V > n) continue;
            load<ONCE>(g[p], gate + at);
            load<ONCE>(u[p], up + at);
        }
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const i64 at = start + p * THREADS * V;
            if (!EXACT && at + V > n) continue;
            gate_pack<Act>(g[p], u[p]);
            store(y + at, g[p]);
        }
        start += blocks * TILE;
    } while (!EXACT && start < n);
    if constexpr (!EXACT && V > 1) {
        const i64 at = n - n % V + thread;
        if (platform::block_index() == 0 && at < n) {
            Pack<T, 1> g, u;
            load<ONCE>(g, gate + at);
            load<ONCE>(u, up + at);
            gate_pack<Act>(g, u);
            store(y + at, g);
        }
    }
}

// Rows of n elements, a multiple of V, with strides: LANES threads on a row's chunk of LANES * PACKS * V elements, ROWS
// rows a block.
template <typename Act, typename T, int V, int LANES, int ROWS, int PACKS>
FERRYMAN_DEVICE void gated(const T* gate, i64 gate_stride, const T* up, i64 up_stride, T* y, i64 rows, i64 n,
                           i64 chunks, i64 blocks) {
    const int thread = after_previous(platform::thread_index()), lane = thread % LANES;
    const i64 work = (rows + ROWS - 1) / ROWS * chunks;
    for (i64 item = platform::block_index(); item < work; item += blocks) {
        i64 group, chunk;
        divide(item, chunks, group, chunk);
        const i64 row = group * ROWS + thread / LANES;
        if (row >= rows) continue;
        Pack<T, V> g[PACKS], u[PACKS];
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            i64 column = ((chunk * PACKS + p) * LANES + lane) * V;
            if (column >= n) continue;
            load<ONCE>(g[p], gate + row * gate_stride + column);
            load<ONCE>(u[p], up + row * up_stride + column);
        }
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            i64 column = ((chunk * PACKS + p) * LANES + lane) * V;
            if (column >= n) continue;
            gate_pack<Act>(g[p], u[p]);
            store(y + row * n + column, g[p]);
        }
    }
}

}  // namespace ferryman

#define FERRYMAN_GATED_FLAT(name, ACT, T, V, THREADS, PACKS, EXACT)                                              \
    FERRYMAN_KERNEL(THREADS, 1024 / THREADS)                                                                     \
    void name(const ferryman::T* gate, const ferryman::T* up, ferryman::T* y, ferryman::i64 n,                   \
              ferryman::i64 blocks) {                                                                            \
        ferryman::gated_flat<ferryman::ACT, ferryman::T, V, THREADS, PACKS, EXACT>(gate, up, y, n, blocks);      \
    }

#define FERRYMAN_GATED(name, ACT, T, V, LANES, ROWS, PACKS)                                                      \
    FERRYMAN_KERNEL(LANES * ROWS, 1024 / (LANES * ROWS))                                                         \
    void name(const ferryman::T* gate, ferryman::i64 gate_stride, const ferryman::T* up,                         \
              ferryman::i64 up_stride, ferryman::T* y, ferryman::i64 rows, ferryman::i64 n,                      \
              ferryman::i64 chunks, ferryman::i64 blocks) {                                                      \
        ferryman::gated<ferryman::ACT, ferryman::T, V, LANES, ROWS, PACKS>(                                      \
            gate, gate_stride, up, up_stride, y, rows, n, chunks, blocks);                                       \
    }
