// softmax over rows: maximum, sum of exponentials, product with the reciprocal of the sum.

namespace ferryman {

template <typename L> struct Softmax {
    typedef typename L::Type T;
    static constexpr int PASSES = 2, INPUTS = 1;
    static constexpr bool HOLD = false;
    T* y;
    T* out;
    float largest, sum, reciprocal;

    // inf - inf and NaN give NaN, as torch does; so does a row of -inf alone.
    FERRYMAN_DEVICE float exponential(float v) const { return exp_of<T>(v - largest); }
    FERRYMAN_DEVICE void prepare(i64, int, int, int) {}
    FERRYMAN_DEVICE void begin(i64 row, i64 n) {
        out = y + row * n;
        largest = negative_infinity();
        sum = 0.0f;
    }
    template <int PASS> FERRYMAN_DEVICE void add(const float (&values)[L::V]) {
#pragma unroll
        for (int i = 0; i < L::V; ++i) {
            if constexpr (PASS == 0) largest = platform::fmax(largest, values[i]);
            else sum += exponential(values[i]);
        }
    }
    template <int PASS, typename R> FERRYMAN_DEVICE void finish(R& reduction) {
        if constexpr (PASS == 0) largest = reduction.template reduce<Max>(largest);
        else reciprocal = divide<L::WORDS>(1.0f, reduction.template reduce<Sum>(sum));
    }
    FERRYMAN_DEVICE void emit(const Pack<T, L::V>& x, i64 column, int) const {
        float values[L::V];
        unpack(x, values);
#pragma unroll
        for (int i = 0; i < L::V; ++i) values[i] = exponential(values[i]) * reciprocal;
        Pack<T, L::V> rounded;
        pack(rounded, values);
        store(out + column, rounded);
    }
};

template <typename L, Fit FIT = L::FIT> struct SoftmaxOf { typedef Softmax<L> Type; };

#if defined(FERRYMAN_CLUSTERS)
// The same in one exchange (whole.cuh): a thread's sum is relative to its own maximum, a wave's to that of the wave. A
// thread that keeps few words has room for their exponentials, too, and takes each once (H200, 32768 columns: 3% faster).
template <typename L> struct WholeSoftmax {
    typedef typename L::Type T;
    typedef Pack<T, L::V> P;
    static constexpr int INPUTS = 1, PLACED = 0;
    static constexpr bool HOLD = false, KEEP = L::WORDS <= 16, FROM_PACKS = !KEEP, PAIRS = false;
    T* y;
    T* out;
    float kept[KEEP ? L::PACKS : 1][L::V];
    float largest, sum, factor;  // of this thread; of the row once joined

    // What exponentials are relative to: with no element but -inf, anything finite.
    static FERRYMAN_DEVICE float base(float largest) { return largest == negative_infinity() ? 0.0f : largest; }

    FERRYMAN_DEVICE void place(void*, i64, int first, int) { y += first + platform::thread_index() * L::V; }
    FERRYMAN_DEVICE void prepare(i64, int, int, int) {}
    FERRYMAN_DEVICE void begin(i64 row, i64 n) { out = y + row * n; }
    FERRYMAN_DEVICE void advance(i64 n) { out += n; }
    FERRYMAN_DEVICE void gather(P (&x)[L::PACKS], int live) {
        sum = 0.0f;
        u32 pair = minus_infinities<T>();
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) {
#pragma unroll
            for (int i = 0; i < P::WORDS; ++i) {
                if (p >= live) x[p].word[i] = minus_infinities<T>();
                pair = larger<T>(pair, x[p].word[i]);
            }
        }
        largest = largest_of<T>(pair);
        const float from = base(largest);
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) {
            float (&values)[L::V] = kept[KEEP ? p : 0];
            unpack(x[p], values);
#pragma unroll
            for (int i = 0; i < L::V; ++i) sum += values[i] = exp_of<T>(values[i] - from);
        }
    }
    // NaN is in the sum, and so in all results; a row of -inf alone has the sum 0, and infinity for its reciprocal.
    template <typename R> FERRYMAN_DEVICE void join(R& reduction) {
        typedef typename R::Partial Partial;
        Partial own{};
        own.value[0] = R::template over_wave<Max>(largest);
        own.value[1] = R::template over_wave<Sum>(sum * exp_of<T>(largest - base(own.value[0])));
        const Partial* parts = reduction.share(own);
        const float peak = R::template over_parts<Max>(parts, [](const Partial& part) { return part.value[0]; });
        const float from = base(peak);
        factor = divide<1>(1.0f, R::template over_parts<Sum>(parts, [=](const Partial& part) {
            return part.value[1] * exp_of<T>(part.value[0] - from);
        }));
        if constexpr (KEEP) factor *= exp_of<T>(largest - from);
        largest = peak;
    }
    FERRYMAN_DEVICE float result() const { return factor; }
    FERRYMAN_DEVICE void emit(const P& x, i64 column, int p) const {
        float values[L::V];
        if constexpr (!KEEP) unpack(x, values);
#pragma unroll
        for (int i = 0; i < L::V; ++i) values[i] = (KEEP ? kept[p][i] : exp_of<T>(values[i] - largest)) * factor;
        P rounded;
        pack(rounded, values);
        store(out + column, rounded);
    }
};

template <typename L> struct SoftmaxOf<L, WHOLE> { typedef WholeSoftmax<L> Type; };
#endif

template <typename L>
FERRYMAN_DEVICE void softmax(RowInput x, typename L::Type* y, i64 rows, i64 n, i64 slots, i64 blocks) {
    typename SoftmaxOf<L>::Type op;
    op.y = y;
    for_each_row<L>(op, x, RowInput{}, rows, n, (int)slots, blocks);
}

}  // namespace ferryman

#define FERRYMAN_SOFTMAX(name, T, V, LANES, ROWS, PACKS, FIT, BLOCKS, CLUSTER)                                   \
    FERRYMAN_ROW_KERNEL(LANES * ROWS, BLOCKS, CLUSTER)                                                           \
    void name(const ferryman::T* x, ferryman::i64 x_stride, ferryman::T* y, ferryman::i64 rows, ferryman::i64 n, \
              ferryman::i64 slots, ferryman::i64 blocks) {                                                       \
        using namespace ferryman;                                                                                \
        softmax<RowLayout<ferryman::T, V, LANES, ROWS, PACKS, FIT, CLUSTER>>(RowInput{x, x_stride}, y, rows, n, slots,\
                                                                    blocks);                                     \
    }
