// softmax backward over rows: dx = y * (grad - sum(grad * y)). A row's packs of both tensors stay in registers from the sum
// to the product, so that memory is read once. FIT is EXACT, RAGGED or LONG, as in rows.cuh; what does not fit a LONG row's threads
// is read again through L2, last read first.

namespace ferryman {

template <typename L> struct SoftmaxBackward {
    typedef typename L::Type T;
    typedef Pack<T, L::V> P;

    const T* grad;  // of this row
    const T* y;
    T* out;
    int first, end;  // this block's columns
    int lane;

    FERRYMAN_DEVICE int column_of(int p) const { return first + (p * L::LANES + lane) * L::V; }
    FERRYMAN_DEVICE bool inside(int column) const { return L::FIT != RAGGED || column < end; }

    static FERRYMAN_DEVICE void add(float& sum, const P& g, const P& p) {
        float a[L::V], b[L::V];
        unpack(g, a);
        unpack(p, b);
#pragma unroll
        for (int i = 0; i < L::V; ++i) sum = platform::fma(a[i], b[i], sum);
    }
    FERRYMAN_DEVICE void emit(const P& g, const P& p, i64 column, float sum) const {
        float a[L::V], b[L::V];
        unpack(g, a);
        unpack(p, b);
#pragma unroll
        for (int i = 0; i < L::V; ++i) a[i] = b[i] * (a[i] - sum);
        P rounded;
        pack(rounded, a);
        store(out + column, rounded);
    }

    // The packs of a LONG row that no thread keeps: BATCH of each tensor are loaded before the first is used.
    template <bool EMIT> FERRYMAN_DEVICE void stream(i64 n, float& sum) const {
        constexpr int BATCH = L::BATCH / 2;
        const i64 packs = (n + L::LANES * L::V - 1) / (L::LANES * L::V) - L::PACKS;
        const i64 batches = packs > 0 ? (packs + BATCH - 1) / BATCH : 0;
        for (i64 b = 0; b < batches; ++b) {
            const i64 p0 = L::PACKS + (EMIT ? batches - 1 - b : b) * BATCH;
            P g[BATCH], p[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const i64 column = ((p0 + j) * L::LANES + lane) * L::V;
                if (column >= n) continue;
                load<AGAIN>(g[j], grad + column);
                load<AGAIN>(p[j], y + column);
            }
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const i64 column = ((p0 + j) * L::LANES + lane) * L::V;
                if (column >= n) continue;
                if constexpr (EMIT) emit(g[j], p[j], column, sum);
                else add(sum, g[j], p[j]);
            }
        }
    }
};

// `forget` is not enough between two passes over 16-bit elements: ptxas keeps the floats of the first for the second (up to
// 120 bytes spilled). `change` is 0, which the compiler cannot know, and is there when the sum is.
template <typename T, int V> FERRYMAN_DEVICE void disguise(Pack<T, V>& pack, u32 change) {
#pragma unroll
    for (int i = 0; i < Pack<T, V>::WORDS; ++i) {
        if constexpr (sizeof(T) == 2) pack.word[i] ^= change;
        else platform::opaque(pack.word[i]);
    }
}

// Adds over the threads of a row. Every thread of the block, or cluster, must call it.
template <typename L, int CLUSTER = L::CLUSTER> struct RowSum;
template <typename L> struct RowSum<L, 1> {
    typedef RowReduction<L::LANES, L::ROWS> Reduction;
    static constexpr int SCRATCH = Reduction::SCRATCH;
    Reduction reduction;
    FERRYMAN_DEVICE explicit RowSum(float* scratch) : reduction{scratch, 0} {}
    static FERRYMAN_DEVICE int rank() { return 0; }
    FERRYMAN_DEVICE float of(float value) { return reduction.template reduce<Sum>(value); }
};

#if defined(FERRYMAN_CLUSTER_KERNEL)
// A cluster has a row of its own, so there is one exchange: each wave posts its sum to all blocks.
template <typename L, int CLUSTER> struct RowSum {
    static constexpr int WAVES = L::LANES / WAVE, SCRATCH = WAVES * CLUSTER;
    float* parts;
    platform::Arrival* arrival;

    FERRYMAN_DEVICE explicit RowSum(float* scratch) : parts(scratch) {
        FERRYMAN_SHARED(platform::Arrival, place, 1);
        arrival = place;
        if (platform::thread_index() == 0) {
            platform::arrival_begin(arrival);
            platform::arrival_publish();
            platform::arrival_expect(arrival, SCRATCH * sizeof(float));
        }
        platform::cluster_arrive();
    }
    static FERRYMAN_DEVICE int rank() { return platform::cluster_rank(); }
    FERRYMAN_DEVICE float of(float value) {
        const int thread = platform::thread_index(), lane = thread & (WAVE - 1);
        value = wave_reduce<Sum, WAVE>(value);
        platform::cluster_wait();
        if (lane < CLUSTER) platform::cluster_post(parts + rank() * WAVES + thread / WAVE, lane, value, arrival);
        platform::arrival_wait(arrival, 0);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SCRATCH; i += WAVE)
            if (i + lane < SCRATCH) sum += parts[i + lane];
        return wave_reduce<Sum, WAVE>(sum);
    }
};
#endif

// EARLY: for few blocks, which may start before the kernel ahead of them has ended; to say so costs many blocks more.
template <typename L, bool EARLY>
FERRYMAN_DEVICE void softmax_backward(RowInput grad, RowInput y, typename L::Type* out, i64 rows, i64 n, i64 blocks) {
    typedef typename L::Type T;
    typedef Pack<T, L::V> P;
    FERRYMAN_SHARED(float, scratch, (RowSum<L>::SCRATCH));
    RowSum<L> row_sum(scratch);
    int thread = platform::thread_index();
    if constexpr (EARLY) thread = after_previous(thread);
    const int columns = columns_of_block<L>(n), first = RowSum<L>::rank() * columns;
    const int end = first + columns < (int)n ? first + columns : (int)n;
    const u32 nothing = (u32)(blocks >> 32);
    i64 base = platform::block_index() / L::CLUSTER * L::ROWS;  // the same for the whole block, so that barriers are met
    do {  // no more blocks than groups of rows: what the first of a block is need not be waited for
        const i64 row = L::ROWS == 1 ? base : base + thread / L::LANES;
        const bool live = L::ROWS == 1 || row < rows;
        const SoftmaxBackward<L> op{(const T*)grad.data + row * grad.stride, (const T*)y.data + row * y.stride,
                                    out + row * n, first, end, L::ROWS == 1 ? thread : thread % L::LANES};
        P g[L::PACKS], p[L::PACKS];
#pragma unroll
        for (int i = 0; i < L::PACKS; ++i) {
            const int column = op.column_of(i);
            if (live && op.inside(column)) {
                load<ONCE>(g[i], op.grad + column);
                load<ONCE>(p[i], op.y + column);
            } else {
                zero(g[i]), zero(p[i]);
            }
        }
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < L::PACKS; ++i) SoftmaxBackward<L>::add(sum, g[i], p[i]);
        if constexpr (L::FIT == LONG) op.template stream<false>(n, sum);
        sum = row_sum.of(sum);
        const u32 change = nothing & platform::bits_of(sum);
#pragma unroll
        for (int i = 0; i < L::PACKS; ++i) disguise(g[i], change), disguise(p[i], change);
        if constexpr (L::FIT == LONG) op.template stream<true>(n, sum);
#pragma unroll
        for (int i = 0; i < L::PACKS; ++i)
            if (live && op.inside(op.column_of(i))) op.emit(g[i], p[i], op.column_of(i), sum);
        base += blocks / L::CLUSTER * L::ROWS;
    } while (base < rows);
}

}  // namespace ferryman

#define FERRYMAN_SOFTMAX_BACKWARD(name, T, V, LANES, ROWS, PACKS, FIT, BLOCKS, CLUSTER, EARLY)                       \
    FERRYMAN_ROW_KERNEL(LANES * ROWS, BLOCKS, CLUSTER)                                                               \
    void name(const ferryman::T* grad, ferryman::i64 grad_stride, const ferryman::T* y, ferryman::i64 y_stride,      \
              ferryman::T* out, ferryman::i64 rows, ferryman::i64 n, ferryman::i64 blocks) {                         \
        using namespace ferryman;                                                                                    \
        softmax_backward<RowLayout<ferryman::T, V, LANES, ROWS, PACKS, FIT, CLUSTER>, EARLY>(                        \
            RowInput{grad, grad_stride}, RowInput{y, y_stride}, out, rows, n, blocks);                               \
    }
