// silu(gate) * up and gelu(gate) * up, and their gradients. One read of each input, one write of each output; float
// arithmetic, one rounding.

namespace ferryman {

// 1 / (1 + exp(-v)) for a result rounded to T: without overflow, and without the cancellation of 1 + tanh for negative
// v. NaN stays NaN. The sum is in [1, 2], where the approximate reciprocal (1 ulp) has no special cases.
template <typename T> FERRYMAN_DEVICE float sigmoid(float v) {
    float e = exp_of<T>(v < 0.0f ? v : -v);
    return (v < 0.0f ? e : 1.0f) * platform::reciprocal(1.0f + e);
}

// The same, and its slope, sigmoid(v) (1 - sigmoid(v)), which does not cancel where the sigmoid is near 1.
template <typename T> FERRYMAN_DEVICE float sigmoid(float v, float& slope) {
    float e = exp_of<T>(v < 0.0f ? v : -v), large = platform::reciprocal(1.0f + e), small = e * large;
    slope = small * large;
    return v < 0.0f ? small : large;
}

// The standard normal's distribution and its density, `slope`, at v, both with a small relative error in both tails, from
// one exponential: the tail is exp(-v^2/2) q(t), t = 1 / (1 + 0.35 |v|), with the q of `triton_lang.normal`. With erfcf,
// which has an exponential of its own, memory did not hide the arithmetic (H200, 8192 x 8192 bf16: backward 182 us, 161 so).
template <typename T> FERRYMAN_DEVICE float normal(float v, float& slope) {
    const float far = v < 0.0f ? -v : v, a = far > 20.0f ? 20.0f : far;  // exp(-200) is 0; NaN stays
    const float square = a * a, lost = platform::fma(a, a, -square);
    const float bell = exp_of<T>(-0.5f * square) * (1.0f - 0.5f * lost);
    const float t = platform::reciprocal(1.0f + 0.35f * a);
    float q = 0.01836301200091839f;
    q = q * t - 0.10105621069669724f;
    q = q * t + 0.2124243825674057f;
    q = q * t - 0.18512718379497528f;
    q = q * t + 0.026084674522280693f;
    q = q * t + 0.0014171033399179578f;
    q = q * t + 0.035078298300504684f;
    q = q * t + 0.0916176289319992f;
    q = q * t + 0.12187554687261581f;
    q = q * t + 0.1396956890821457f;
    q = q * t + 0.13962705433368683f;
    const float tail = bell * (q * t);
    slope = 0.3989422804014327f * bell;
    return v < 0.0f ? tail : 1.0f - tail;
}

// Each has the activation v F(v) for a result rounded to T, and F(v) with F'(v).
struct Silu {  // -inf gives NaN (-inf * 0), as the definition does
    template <typename T> static FERRYMAN_DEVICE float apply(float v) { return v * sigmoid<T>(v); }
    template <typename T> static FERRYMAN_DEVICE float factor(float v, float& slope) { return sigmoid<T>(v, slope); }
};

struct GeluTanh {  // (1 + tanh(u)) / 2 == sigmoid(2u)
    template <typename T> static FERRYMAN_DEVICE float apply(float v) {
        float twice_u = v * (1.5957691216f + 0.0713548163f * (v * v));  // 2*sqrt(2/pi) * (1, 0.044715)
        return v * sigmoid<T>(twice_u);
    }
    template <typename T> static FERRYMAN_DEVICE float factor(float v, float& slope) {
        float square = v * v, result = sigmoid<T>(v * (1.5957691216f + 0.0713548163f * square), slope);
        // Past 1e4 the sigmoid's slope is 0, and the square must not become infinite: 0 * inf.
        slope *= 1.5957691216f + 0.214064449f * (square < 1e8f ? square : 1e8f);
        return result;
    }
};

struct GeluErf {
    template <typename T> static FERRYMAN_DEVICE float apply(float v) {
        float slope;
        return v * normal<T>(v, slope);
    }
    template <typename T> static FERRYMAN_DEVICE float factor(float v, float& slope) { return normal<T>(v, slope); }
};

// What a kernel reads and writes: rows of `width` elements, the inputs' with strides; of one row, strides do not matter.
template <typename Act, typename T> struct Gated {
    const T *gate, *up;
    T* y;
    i64 gate_stride, up_stride, width;

    template <int V> struct Packs { Pack<T, V> gate, up; };

    template <int V> FERRYMAN_DEVICE void read(Packs<V>& in, i64 row, i64 column) const {
        load<ONCE>(in.gate, gate + row * gate_stride + column);
        load<ONCE>(in.up, up + row * up_stride + column);
    }
    template <int V> FERRYMAN_DEVICE void write(Packs<V>& in, i64 row, i64 column) const {
        float a[V], b[V];
        unpack(in.gate, a);
        unpack(in.up, b);
#pragma unroll
        for (int i = 0; i < V; ++i) a[i] = Act::template apply<T>(a[i]) * b[i];
        pack(in.gate, a);
        store(y + row * width + column, in.gate);
    }
};

template <typename Act, typename T> struct GatedBackward {
    const T *grad, *gate, *up;
    T *grad_gate, *grad_up;
    i64 grad_stride, gate_stride, up_stride, width;

    template <int V> struct Packs { Pack<T, V> grad, gate, up; };

    template <int V> FERRYMAN_DEVICE void read(Packs<V>& in, i64 row, i64 column) const {
        load<ONCE>(in.grad, grad + row * grad_stride + column);
        load<ONCE>(in.gate, gate + row * gate_stride + column);
        load<ONCE>(in.up, up + row * up_stride + column);
    }
    template <int V> FERRYMAN_DEVICE void write(Packs<V>& in, i64 row, i64 column) const {
        float d[V], a[V], b[V];
        unpack(in.grad, d);
        unpack(in.gate, a);
        unpack(in.up, b);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            float slope, factor = Act::template factor<T>(a[i], slope);
            b[i] = d[i] * b[i] * (factor + a[i] * slope);
            a[i] = d[i] * (a[i] * factor);  // a large d times a large a would leave float32
        }
        pack(in.gate, b);
        pack(in.up, a);
        store(grad_gate + row * width + column, in.gate);
        store(grad_up + row * width + column, in.up);
    }
};

// Tensors that are contiguous as a whole, n elements each: a block's tile is THREADS * PACKS * V of them. EXACT: n is whole
// tiles, and every tile has a block. Otherwise what is left of n beyond whole packs is the first block's, one by one.
template <int V, int THREADS, int PACKS, bool EXACT, typename Op> FERRYMAN_DEVICE void flat(const Op& op, i64 n, i64 blocks) {
    constexpr i64 TILE = (i64)THREADS * PACKS * V;
    const int thread = after_previous(platform::thread_index());
    i64 start = platform::block_index() * TILE + thread * V;
    do {
        typename Op::template Packs<V> in[PACKS];
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const i64 at = start + p * THREADS * V;
            if (!EXACT && at + V > n) continue;
            op.read(in[p], 0, at);
        }
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const i64 at = start + p * THREADS * V;
            if (!EXACT && at + V > n) continue;
            op.write(in[p], 0, at);
        }
        start += blocks * TILE;
    } while (!EXACT && start < n);
    if constexpr (!EXACT && V > 1) {
        const i64 at = n - n % V + thread;
        if (platform::block_index() == 0 && at < n) {
            typename Op::template Packs<1> in;
            op.read(in, 0, at);
            op.write(in, 0, at);
        }
    }
}

// Rows of a multiple of V elements, with strides: LANES threads on a row's chunk of LANES * PACKS * V elements, ROWS
// rows a block.
template <int V, int LANES, int ROWS, int PACKS, typename Op>
FERRYMAN_DEVICE void strided(const Op& op, i64 rows, i64 chunks, i64 blocks) {
    const int thread = after_previous(platform::thread_index()), lane = thread % LANES;
    const i64 work = (rows + ROWS - 1) / ROWS * chunks;
    for (i64 item = platform::block_index(); item < work; item += blocks) {
        i64 group, chunk;
        divide(item, chunks, group, chunk);
        const i64 row = group * ROWS + thread / LANES;
        if (row >= rows) continue;
        typename Op::template Packs<V> in[PACKS];
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            i64 column = ((chunk * PACKS + p) * LANES + lane) * V;
            if (column >= op.width) continue;
            op.read(in[p], row, column);
        }
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            i64 column = ((chunk * PACKS + p) * LANES + lane) * V;
            if (column >= op.width) continue;
            op.write(in[p], row, column);
        }
    }
}

}  // namespace ferryman

#define FERRYMAN_GATED_FLAT(name, ACT, T, V, THREADS, PACKS, EXACT)                                              \
    FERRYMAN_KERNEL(THREADS, 1024 / THREADS)                                                                     \
    void name(const ferryman::T* gate, const ferryman::T* up, ferryman::T* y, ferryman::i64 n,                   \
              ferryman::i64 blocks) {                                                                            \
        const ferryman::Gated<ferryman::ACT, ferryman::T> op{gate, up, y, 0, 0, n};                              \
        ferryman::flat<V, THREADS, PACKS, EXACT>(op, n, blocks);                                                 \
    }

#define FERRYMAN_GATED(name, ACT, T, V, LANES, ROWS, PACKS)                                                      \
    FERRYMAN_KERNEL(LANES * ROWS, 1024 / (LANES * ROWS))                                                         \
    void name(const ferryman::T* gate, ferryman::i64 gate_stride, const ferryman::T* up,                         \
              ferryman::i64 up_stride, ferryman::T* y, ferryman::i64 rows, ferryman::i64 n,                      \
              ferryman::i64 chunks, ferryman::i64 blocks) {                                                      \
        const ferryman::Gated<ferryman::ACT, ferryman::T> op{gate, up, y, gate_stride, up_stride, n};            \
        ferryman::strided<V, LANES, ROWS, PACKS>(op, rows, chunks, blocks);                                      \
    }

#define FERRYMAN_GATED_BACKWARD_FLAT(name, ACT, T, V, THREADS, PACKS, EXACT)                                     \
    FERRYMAN_KERNEL(THREADS, 1024 / THREADS)                                                                     \
    void name(const ferryman::T* grad, const ferryman::T* gate, const ferryman::T* up, ferryman::T* grad_gate,   \
              ferryman::T* grad_up, ferryman::i64 n, ferryman::i64 blocks) {                                     \
        const ferryman::GatedBackward<ferryman::ACT, ferryman::T> op{grad, gate, up, grad_gate, grad_up,         \
                                                                     0, 0, 0, n};                                \
        ferryman::flat<V, THREADS, PACKS, EXACT>(op, n, blocks);                                                 \
    }

#define FERRYMAN_GATED_BACKWARD(name, ACT, T, V, LANES, ROWS, PACKS)                                             \
    FERRYMAN_KERNEL(LANES * ROWS, 1024 / (LANES * ROWS))                                                         \
    void name(const ferryman::T* grad, ferryman::i64 grad_stride, const ferryman::T* gate,                       \
              ferryman::i64 gate_stride, const ferryman::T* up, ferryman::i64 up_stride,                         \
              ferryman::T* grad_gate, ferryman::T* grad_up, ferryman::i64 rows, ferryman::i64 n,                 \
              ferryman::i64 chunks, ferryman::i64 blocks) {                                                      \
        const ferryman::GatedBackward<ferryman::ACT, ferryman::T> op{grad, gate, up, grad_gate, grad_up,         \
                                                                     grad_stride, gate_stride, up_stride, n};    \
        ferryman::strided<V, LANES, ROWS, PACKS>(op, rows, chunks, blocks);                                      \
    }
