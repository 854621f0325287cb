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

template <typename L>
FERRYMAN_DEVICE void softmax(RowInput x, typename L::Type* y, i64 rows, i64 n, i64 slots, i64 blocks) {
    Softmax<L> op;
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
