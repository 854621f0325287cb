// rms_norm, add_rms_norm and layer_norm over rows, forward. float arithmetic; one rounding to T, except the ones
// that the ops define (residual_out; the product before the weight when CAST).

namespace ferryman {

// Weights of a thread's register packs stay in registers across rows while they take at most this many words: with
// 16 words of x and 16 of weights a kernel stays within 64 registers, 1024 threads an SM.
constexpr int HELD_WEIGHT_WORDS = 16;

template <typename L, typename W, bool HOLD> struct Weights {
    typedef Pack<W, L::V> P;
    const W* data;
    P held[HOLD ? L::PACKS : 1];

    FERRYMAN_DEVICE void prepare(int first, int end, int lane) {
        if constexpr (HOLD) {
#pragma unroll
            for (int p = 0; p < L::PACKS; ++p) {
                int column = first + (p * L::LANES + lane) * L::V;
                if (L::FIT != RAGGED || column < end) load<AGAIN>(held[p], data + column);
                else zero(held[p]);
            }
        }
    }
    FERRYMAN_DEVICE void get(float (&out)[L::V], i64 column, int p) {
        if constexpr (HOLD) {
            if (p >= 0) {
                forget(held[p]);
                return unpack(held[p], out);
            }
        }
        P pack;
        load<AGAIN>(pack, data + column);
        unpack(pack, out);
    }
};

// Bytes of a column in shared memory.
template <typename W, int V> struct placed_bytes { static constexpr int value = V * sizeof(W) % 16 == 0 ? sizeof(W) : 0; };
template <int V> struct placed_bytes<none, V> { static constexpr int value = 0; };

template <typename L, typename W, bool HOLD, Fit FIT = L::FIT> struct WeightsOf { typedef Weights<L, W, HOLD> Type; };

#if defined(FERRYMAN_CLUSTERS)
// Where a row takes one exchange (whole.cuh): those of the block's columns come to shared memory while it waits for x, and
// stay for all its rows. 16-bit weights of float rows may be no whole words of 16 bytes: L1 has to do for those.
template <typename L, typename W> struct PlacedWeights {
    typedef Pack<W, L::V> P;
    static constexpr int BYTES = placed_bytes<W, L::V>::value;
    const W* data;
    P* placed;

    FERRYMAN_DEVICE void* place(void* memory, int first, int end) {
        placed = (P*)memory;
        if constexpr (BYTES == 0) data += first + platform::thread_index() * L::V;
        return (char*)memory + BYTES * (end - first);
    }
    template <typename A> FERRYMAN_DEVICE void request(int first, int end, A* arrival) const {
        if constexpr (BYTES > 0) platform::copy_to_shared(placed, data + first, (u32)(end - first) * BYTES, arrival);
    }
    FERRYMAN_DEVICE void prepare(int, int, int) {}
    FERRYMAN_DEVICE void get(float (&out)[L::V], i64 column, int p) const {
        if constexpr (BYTES > 0) {
            const P pack = placed[p * L::LANES + platform::thread_index()];
            unpack(pack, out);
        } else {
            P pack;
            load<AGAIN>(pack, data + column);
            unpack(pack, out);
        }
    }
};
template <typename L, typename W, bool HOLD> struct WeightsOf<L, W, HOLD, WHOLE> { typedef PlacedWeights<L, W> Type; };
#endif

// Rounds to T and back.
template <typename T, int V> FERRYMAN_DEVICE void round_to(float (&values)[V]) {
    Pack<T, V> rounded;
    pack(rounded, values);
    unpack(rounded, values);
}

template <typename L, typename W, bool CAST, int TENSORS = 1> struct RmsNorm {
    typedef typename L::Type T;
    static constexpr int PASSES = 1, INPUTS = 1, KEPT = L::FIT == WHOLE ? 1 : L::WORDS * TENSORS;
    static constexpr bool WEIGHTED = !is_none<W>::value;
    static constexpr bool HOLD =
        WEIGHTED && Pack<W, L::V>::WORDS * L::PACKS <= HELD_WEIGHT_WORDS / TENSORS && L::WORDS <= 16 && L::V > 1;

    T* y;
    typename WeightsOf<L, W, HOLD>::Type weights;
    float eps, count;
    T* out;
    float squares, scale;

    FERRYMAN_DEVICE void prepare(i64 n, int first, int end, int lane) {
        count = (float)n;
        if constexpr (WEIGHTED) weights.prepare(first, end, lane);
    }
    FERRYMAN_DEVICE void begin(i64 row, i64 n) {
        out = y + row * n;
        squares = 0.0f;
    }
    template <int PASS> FERRYMAN_DEVICE void add(const float (&values)[L::V]) {
#pragma unroll
        for (int i = 0; i < L::V; ++i) squares += values[i] * values[i];
    }
    template <int PASS, typename R> FERRYMAN_DEVICE void finish(R& reduction) {
        squares = reduction.template reduce<Sum>(squares);
        scale = inverse_root<KEPT>(divide<KEPT>(squares, count) + eps);
    }
    static constexpr int PLACED = placed_bytes<W, L::V>::value;
    static constexpr bool FROM_PACKS = true, PAIRS = false;
    FERRYMAN_DEVICE void place(void* memory, i64, int first, int end) {
        y += first + platform::thread_index() * L::V;
        if constexpr (WEIGHTED) weights.place(memory, first, end);
    }
    template <typename A> FERRYMAN_DEVICE void request(int first, int end, A* arrival) const {
        if constexpr (WEIGHTED) weights.request(first, end, arrival);
    }
    FERRYMAN_DEVICE void advance(i64 n) { out += n; }
    FERRYMAN_DEVICE void gather(Pack<T, L::V> (&x)[L::PACKS], int live) {
        squares = 0.0f;
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) {
            if (p >= live) continue;
            float values[L::V];
            unpack(x[p], values);
            add<0>(values);
        }
    }
    template <typename R> FERRYMAN_DEVICE void join(R& reduction) { finish<0>(reduction); }
    FERRYMAN_DEVICE float result() const { return scale; }
    FERRYMAN_DEVICE void emit(const Pack<T, L::V>& x, i64 column, int p) {
        float values[L::V];
        unpack(x, values);
#pragma unroll
        for (int i = 0; i < L::V; ++i) values[i] *= scale;
        if constexpr (WEIGHTED) {
            float w[L::V];
            weights.get(w, column, p);
            if constexpr (CAST) round_to<T>(values);
#pragma unroll
            for (int i = 0; i < L::V; ++i) values[i] *= w[i];
        }
        Pack<T, L::V> rounded;
        pack(rounded, values);
        store(out + column, rounded);
    }
};

template <typename L, typename W, bool CAST> struct AddRmsNorm : RmsNorm<L, W, CAST, 2> {
    typedef typename L::Type T;
    static constexpr int INPUTS = 2;
    T* sums;
    T* sum_row;

    FERRYMAN_DEVICE void begin(i64 row, i64 n) {
        RmsNorm<L, W, CAST, 2>::begin(row, n);
        sum_row = sums + row * n;
    }
    FERRYMAN_DEVICE void advance(i64 n) {
        RmsNorm<L, W, CAST, 2>::advance(n);
        sum_row += n;
    }
    FERRYMAN_DEVICE const T* merged() const { return sum_row; }
    FERRYMAN_DEVICE void place(void* memory, i64 n, int first, int end) {
        sums += first + platform::thread_index() * L::V;
        RmsNorm<L, W, CAST, 2>::place(memory, n, first, end);
    }
    FERRYMAN_DEVICE void merge(Pack<T, L::V>& x, const Pack<T, L::V>& residual, i64 column) const {
        float a[L::V], b[L::V];
        unpack(x, a);
        unpack(residual, b);
#pragma unroll
        for (int i = 0; i < L::V; ++i) a[i] += b[i];
        pack(x, a);
        store(sum_row + column, x);
    }
};

template <typename L, typename W, typename B> struct LayerNorm {
    typedef typename L::Type T;
    static constexpr int PASSES = 2, INPUTS = 1, KEPT = L::WORDS;
    static constexpr bool WEIGHTED = !is_none<W>::value, BIASED = !is_none<B>::value;
    static constexpr bool HOLD =
        (Pack<W, L::V>::WORDS + Pack<B, L::V>::WORDS) * L::PACKS <= HELD_WEIGHT_WORDS && L::WORDS <= 16 && L::V > 1;

    T* y;
    typename WeightsOf<L, W, HOLD && WEIGHTED>::Type weights;
    typename WeightsOf<L, B, HOLD && BIASED>::Type biases;
    float eps, count;
    T* out;
    float sum, squares, mean, scale;

    FERRYMAN_DEVICE void prepare(i64 n, int first, int end, int lane) {
        count = (float)n;
        if constexpr (WEIGHTED) weights.prepare(first, end, lane);
        if constexpr (BIASED) biases.prepare(first, end, lane);
    }
    FERRYMAN_DEVICE void begin(i64 row, i64 n) {
        out = y + row * n;
        sum = squares = 0.0f;
    }
    template <int PASS> FERRYMAN_DEVICE void add(const float (&values)[L::V]) {
#pragma unroll
        for (int i = 0; i < L::V; ++i) {
            if constexpr (PASS == 0) {
                sum += values[i];
            } else {
                float centred = values[i] - mean;
                squares += centred * centred;
            }
        }
    }
    template <int PASS, typename R> FERRYMAN_DEVICE void finish(R& reduction) {
        if constexpr (PASS == 0) mean = divide<KEPT>(reduction.template reduce<Sum>(sum), count);
        else scale = inverse_root<KEPT>(divide<KEPT>(reduction.template reduce<Sum>(squares), count) + eps);
    }
    FERRYMAN_DEVICE void emit(const Pack<T, L::V>& x, i64 column, int p) {
        float values[L::V];
        unpack(x, values);
#pragma unroll
        for (int i = 0; i < L::V; ++i) values[i] = (values[i] - mean) * scale;
        if constexpr (WEIGHTED) {
            float w[L::V];
            weights.get(w, column, p);
#pragma unroll
            for (int i = 0; i < L::V; ++i) values[i] *= w[i];
        }
        if constexpr (BIASED) {
            float b[L::V];
            biases.get(b, column, p);
#pragma unroll
            for (int i = 0; i < L::V; ++i) values[i] += b[i];
        }
        Pack<T, L::V> rounded;
        pack(rounded, values);
        store(out + column, rounded);
    }
};

template <typename L, typename W, typename B, Fit FIT = L::FIT> struct LayerNormOf { typedef LayerNorm<L, W, B> Type; };

#if defined(FERRYMAN_CLUSTERS)
// Two rows in one exchange, of sums and of squares. Where a mean is more than two deviations from 0, so that its square
// would take more than 2 bits of theirs, a second exchange sums squares about the means: all threads of the rows decide
// that from the same bits. Such rows take 1 to 8% longer (H200).
template <typename L, typename W, typename B> struct PairLayerNorm : LayerNorm<L, W, B> {
    typedef LayerNorm<L, W, B> Base;
    typedef typename L::Type T;
    typedef Pack<T, L::V> P;
    static constexpr float FAR = 4.0f;  // most of a mean's square, in variances

    T* outs[2];
    float totals[4];  // sum and squares of the one row, and of the other
    float scales[2], shifts[2];

    static constexpr int PLACED = placed_bytes<W, L::V>::value + placed_bytes<B, L::V>::value;
    static constexpr bool PAIRS = true;
    template <typename A> FERRYMAN_DEVICE void request(int first, int end, A* arrival) const {
        if constexpr (Base::WEIGHTED) Base::weights.request(first, end, arrival);
        if constexpr (Base::BIASED) Base::biases.request(first, end, arrival);
    }
    FERRYMAN_DEVICE void place(void* memory, i64, int first, int end) {
        if constexpr (Base::WEIGHTED) memory = Base::weights.place(memory, first, end);
        if constexpr (Base::BIASED) Base::biases.place(memory, first, end);
        Base::y += first + platform::thread_index() * L::V;
    }
    FERRYMAN_DEVICE void begin(i64 row, i64 step, i64 n) {
        outs[0] = Base::y + row * n, outs[1] = outs[0] + step;
        platform::settle(outs[0]), platform::settle(outs[1]);
    }
    FERRYMAN_DEVICE void gather(const P (&x)[2][L::PACKS]) {
        wave_moments(x[0], totals[0], totals[1]);
        wave_moments(x[1], totals[2], totals[3]);
    }
    // Of this thread, about a mean.
    static FERRYMAN_DEVICE float squares_about(float mean, P (&x)[L::PACKS], int live) {
        float squares = 0.0f;
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) {
            forget(x[p]);
            if (p >= live) continue;
            float values[L::V];
            unpack(x[p], values);
#pragma unroll
            for (int i = 0; i < L::V; ++i) squares += (values[i] - mean) * (values[i] - mean);
        }
        return squares;
    }
    template <typename R> FERRYMAN_DEVICE void join(R& reduction, P (&x)[2][L::PACKS], int live) {
        typename R::Partial wave{};
#pragma unroll
        for (int i = 0; i < 4; ++i) wave.value[i] = totals[i];
        R::sums_over_parts(reduction.share(wave), totals);
        float mean[2], variance[2];
        bool far[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            mean[r] = divide<1>(totals[2 * r], Base::count);
            const float square = mean[r] * mean[r];
            variance[r] = divide<1>(totals[2 * r + 1], Base::count) - square;
            far[r] = !(square <= FAR * variance[r]);  // or not a number
        }
        if (far[0] || far[1]) {
            typename R::Partial about{};
            float squares[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
                about.value[r] = R::template over_wave<Sum>(squares_about(mean[r], x[r], live));
            R::sums_over_parts(reduction.share(about), squares);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (far[r]) variance[r] = divide<1>(squares[r], Base::count);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scales[r] = inverse_root<1>(variance[r] + Base::eps);
            shifts[r] = -mean[r] * scales[r];
        }
    }
    FERRYMAN_DEVICE void emit(const P& x, const P& y, i64 column, int p) {
        float w[L::V], b[L::V];
        if constexpr (Base::WEIGHTED) Base::weights.get(w, column, p);
        if constexpr (Base::BIASED) Base::biases.get(b, column, p);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float values[L::V];
            unpack(r == 0 ? x : y, values);
#pragma unroll
            for (int i = 0; i < L::V; ++i) {
                values[i] = platform::fma(values[i], scales[r], shifts[r]);
                if constexpr (Base::WEIGHTED) values[i] *= w[i];
                if constexpr (Base::BIASED) values[i] += b[i];
            }
            P rounded;
            pack(rounded, values);
            store(outs[r] + column, rounded);
        }
    }
};
template <typename L, typename W, typename B> struct LayerNormOf<L, W, B, WHOLE> {
    typedef PairLayerNorm<L, W, B> Type;
};
#endif

template <typename L, typename W, bool CAST>
FERRYMAN_DEVICE void rms_norm(RowInput x, const W* weight, typename L::Type* y, i64 rows, i64 n, i64 slots,
                              i64 blocks, float eps) {
    RmsNorm<L, W, CAST> op;
    op.y = y, op.weights.data = weight, op.eps = eps;
    for_each_row<L>(op, x, RowInput{}, rows, n, (int)slots, blocks);
}

template <typename L, typename W, bool CAST>
FERRYMAN_DEVICE void add_rms_norm(RowInput x, RowInput residual, const W* weight, typename L::Type* y,
                                  typename L::Type* sums, i64 rows, i64 n, i64 slots, i64 blocks, float eps) {
    AddRmsNorm<L, W, CAST> op;
    op.y = y, op.sums = sums, op.weights.data = weight, op.eps = eps;
    for_each_row<L>(op, x, residual, rows, n, (int)slots, blocks);
}

template <typename L, typename W, typename B>
FERRYMAN_DEVICE void layer_norm(RowInput x, const W* weight, const B* bias, typename L::Type* y, i64 rows, i64 n,
                                i64 slots, i64 blocks, float eps) {
    typename LayerNormOf<L, W, B>::Type op;
    op.y = y, op.weights.data = weight, op.biases.data = bias, op.eps = eps;
    for_each_row<L>(op, x, RowInput{}, rows, n, (int)slots, blocks);
}

}  // namespace ferryman

#define FERRYMAN_RMS_NORM(name, T, W, CAST, V, LANES, ROWS, PACKS, FIT, BLOCKS, CLUSTER)                         \
    FERRYMAN_ROW_KERNEL(LANES * ROWS, BLOCKS, CLUSTER)                                                           \
    void name(const ferryman::T* x, ferryman::i64 x_stride, const ferryman::W* weight, ferryman::T* y,           \
              ferryman::i64 rows, ferryman::i64 n, ferryman::i64 slots, ferryman::i64 blocks, float eps) {       \
        using namespace ferryman;                                                                                \
        rms_norm<RowLayout<ferryman::T, V, LANES, ROWS, PACKS, FIT, CLUSTER>, ferryman::W, CAST>(                \
            RowInput{x, x_stride}, weight, y, rows, n, slots, blocks, eps);                                      \
    }

#define FERRYMAN_ADD_RMS_NORM(name, T, W, CAST, V, LANES, ROWS, PACKS, FIT, BLOCKS, CLUSTER)                     \
    FERRYMAN_ROW_KERNEL(LANES * ROWS, BLOCKS, CLUSTER)                                                           \
    void name(const ferryman::T* x, ferryman::i64 x_stride, const ferryman::T* residual,                         \
              ferryman::i64 residual_stride, const ferryman::W* weight, ferryman::T* y, ferryman::T* sums,       \
              ferryman::i64 rows, ferryman::i64 n, ferryman::i64 slots, ferryman::i64 blocks, float eps) {       \
        using namespace ferryman;                                                                                \
        add_rms_norm<RowLayout<ferryman::T, V, LANES, ROWS, PACKS, FIT, CLUSTER>, ferryman::W, CAST>(            \
            RowInput{x, x_stride}, RowInput{residual, residual_stride}, weight, y, sums, rows, n, slots, blocks, eps);\
    }

#define FERRYMAN_LAYER_NORM(name, T, W, B, V, LANES, ROWS, PACKS, FIT, BLOCKS, CLUSTER)                          \
    FERRYMAN_ROW_KERNEL(LANES * ROWS, BLOCKS, CLUSTER)                                                           \
    void name(const ferryman::T* x, ferryman::i64 x_stride, const ferryman::W* weight, const ferryman::B* bias,  \
              ferryman::T* y, ferryman::i64 rows, ferryman::i64 n, ferryman::i64 slots, ferryman::i64 blocks,    \
              float eps) {                                                                                       \
        using namespace ferryman;                                                                                \
        layer_norm<RowLayout<ferryman::T, V, LANES, ROWS, PACKS, FIT, CLUSTER>, ferryman::W, ferryman::B>(       \
            RowInput{x, x_stride}, weight, bias, y, rows, n, slots, blocks, eps);                                \
    }
