// Rows on sm_90 and newer, a row to the blocks of a cluster: read from memory once, as much of it as all threads hold
// packed, one exchange between them, written once. After `cluster.cuh` and `rows.cuh`.
//
// Blocks take one row or two, and the hardware deals them out. Where blocks stay for all rows, those that memory serves late
// hold up the end: on an H200 such a loop took 10% longer than a copy even with no reduction to wait for and its loads
// always ahead, this takes 0 to 4%. What an SM does not load while its blocks reduce and write, L2 fetches in the
// meantime: it is told of the row `slots` further on (1 to 3%).
//
// Beside what rows.cuh says, an operation `Op` provides, instead of passes,
//   int PLACED                           bytes a column that it keeps in shared memory: its weights
//   bool PAIRS                           false
//   bool FROM_PACKS                      `emit` needs the pack; the next row then comes pack by pack into their registers
//   void place(memory, n, first, end)    once, before `prepare`: its part of shared memory. Columns of `merge` and `emit`
//                                        count from this thread's first, so that addresses take one register
//   void request(first, end, arrival)    one thread: has that part copied
//   void begin(row, n)                   the first row; `advance(n)`: the one after. Pointers are carried along: made anew
//                                        for each pack they take as many instructions as the arithmetic
//   void gather(packs, live)             this thread's part of a row's statistics; the first `live` packs are inside
//   void join(reduction)                 over the row's threads: one exchange
//   float result()                       something that `join` has made
//
// `PairDriver` takes two rows at once, for an `Op` that says PAIRS; what that provides instead stands there.

namespace ferryman {

#if !defined(FERRYMAN_EMULATED)
namespace platform {
// `bytes` and both addresses are multiples of 16.
FERRYMAN_DEVICE void copy_to_shared(void* to, const void* from, u32 bytes, Arrival* arrival) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(arrival))
                 : "memory");
}
// Keeps the compiler from making an address anew for each of its uses.
template <typename T> FERRYMAN_DEVICE void settle(T*& address) { asm volatile("" : "+l"(address)); }

// A wave's product of two matrices of 16-bit elements, added to `total` (mma.m16n8k16). The left one's rows are the two
// words of 4 lanes each, 8 rows, and then 8 of ones; the right one's columns are the same words. So squares come to
// stand on the diagonal, and below it sums.
template <typename T> FERRYMAN_DEVICE void add_products(float (&total)[4], u32 a, u32 b) {
    if constexpr (is_bf16<T>::value)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%4, %5}, "
            "{%0, %1, %2, %3};"
            : "+f"(total[0]), "+f"(total[1]), "+f"(total[2]), "+f"(total[3])
            : "r"(a), "r"(b), "r"(0x3f803f80u));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%4, %5}, "
            "{%0, %1, %2, %3};"
            : "+f"(total[0]), "+f"(total[1]), "+f"(total[2]), "+f"(total[3])
            : "r"(a), "r"(b), "r"(0x3c003c00u));
}
}  // namespace platform
#else
namespace platform {
template <typename T> FERRYMAN_DEVICE void settle(T*&) {}
}  // namespace platform
#endif

// The sum of a wave's elements, and of their squares, for every lane. A pack of 16-bit ones takes 6 instructions on tensor
// cores (two products, four moves), where unpacking and adding take 24. Products are exact; a step adds 16 of them to a
// float and cuts what is below its last bits: on an H200 squares come out 3 to 7 units of 2^-24 too small.
template <typename T, int V, int PACKS>
FERRYMAN_DEVICE void wave_moments(const Pack<T, V> (&packs)[PACKS], float& sum, float& squares) {
#if !defined(FERRYMAN_EMULATED)
    if constexpr (sizeof(T) == 2 && V == 8) {
        float total[2][4] = {};
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                platform::add_products<T>(total[i], packs[p].word[2 * i], packs[p].word[2 * i + 1]);
        }
        // A lane has rows lane / 4 and that + 8, columns lane % 4 * 2 and the next.
        const int lane = platform::thread_index() & (WAVE - 1), row = lane / 4;
        const float own = row & 1 ? total[0][1] + total[1][1] : total[0][0] + total[1][0];
        squares = wave_reduce<Sum, WAVE>((lane & 3) == row / 2 ? own : 0.0f);
        sum = wave_reduce<Sum, 4>((total[0][2] + total[1][2]) + (total[0][3] + total[1][3]));
        return;
    }
#endif
    sum = squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        float values[V];
        unpack(packs[p], values);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            sum += values[i];
            squares += values[i] * values[i];
        }
    }
    sum = wave_reduce<Sum, WAVE>(sum), squares = wave_reduce<Sum, WAVE>(squares);
}

struct alignas(16) Partial {
    float value[4];
};
FERRYMAN_DEVICE void post(float* here, int rank, float value, platform::Arrival* arrival) {
    platform::cluster_post(here, rank, value, arrival);
}
FERRYMAN_DEVICE void post(Partial* here, int rank, const Partial& partial, platform::Arrival* arrival) {
    platform::cluster_post(here->value, rank, partial.value, arrival);
}

// `RowReduction` over the blocks of a cluster. A barrier of the cluster with release semantics waits until all that
// the block has stored in device memory has arrived there: the whole of the row before. So partials are posted: each store
// counts its bytes at an arrival of its destination. Two of these alternate: a block that posts for reduction k + 2 has
// had everybody's partials of k + 1, so everybody has read those of k.
template <int WAVES, int SIZE> struct PostedReduction {
    typedef ferryman::Partial Partial;
    static constexpr int PARTIALS = WAVES * SIZE;
    static constexpr int WIDTH = ceil_power_of_two(PARTIALS) < WAVE ? ceil_power_of_two(PARTIALS) : WAVE;
    static constexpr int EACH = (PARTIALS + WIDTH - 1) / WIDTH;  // partials that a lane takes up
    static_assert(SIZE <= WAVE, "a lane posts to each block");
    Partial* scratch;  // 2 * PARTIALS
    platform::Arrival* arrivals;
    u32 count;

    static FERRYMAN_DEVICE int part(int i) { return i * WIDTH + (platform::thread_index() & (WIDTH - 1)); }

    // Posts a wave's partial to all blocks, and returns all partials once they are here.
    template <typename V> FERRYMAN_DEVICE const V* share(const V& partial) {
        const int thread = platform::thread_index(), lane = thread & (WAVE - 1);
        V* partials = (V*)(scratch + (count & 1) * PARTIALS);
        platform::Arrival* arrival = arrivals + (count & 1);
        if (thread == 0) platform::arrival_expect(arrival, PARTIALS * sizeof(V));
        if (lane < SIZE) post(partials + platform::cluster_rank() * WAVES + thread / WAVE, lane, partial, arrival);
        platform::arrival_wait(arrival, count >> 1 & 1);
        ++count;
        return partials;
    }

    // Of `value(partial)` for every partial; `share` has returned these. Every thread of the cluster gets the same bits.
    template <typename R, typename V, typename F> static FERRYMAN_DEVICE float over_parts(const V* partials, F value) {
        float all = R::identity();
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (part(i) < PARTIALS) all = R::join(all, value(partials[part(i)]));
        return wave_reduce<R, WIDTH>(all);
    }
    // The sums over all partials of their first N values, N a power of two: an N-th of a wave adds each.
    template <int N> static FERRYMAN_DEVICE void sums_over_parts(const Partial* partials, float (&sums)[N]) {
        constexpr int SHARE = WAVE / N;
        const int lane = platform::thread_index() & (WAVE - 1), which = lane / SHARE;
        float all = 0.0f;
#pragma unroll
        for (int i = 0; i < PARTIALS; i += SHARE) {
            const int part = i + (lane & (SHARE - 1));
            if (part < PARTIALS) all += partials[part].value[which];
        }
        all = wave_reduce<Sum, SHARE>(all);
#pragma unroll
        for (int k = 0; k < N; ++k)  // sum number which ^ k
            sums[k] = k == 0 ? all : platform::float_of(platform::shuffle_xor(platform::bits_of(all), k * SHARE));
#pragma unroll
        for (int bit = 1; bit < N; bit *= 2) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
                if (k & bit) continue;
                const float low = sums[k], high = sums[k | bit];
                sums[k] = which & bit ? high : low, sums[k | bit] = which & bit ? low : high;
            }
        }
    }
    template <typename R> FERRYMAN_DEVICE float reduce(float value) {
        return over_parts<R>(share(over_wave<R>(value)), [](float partial) { return partial; });
    }
    template <typename R> static FERRYMAN_DEVICE float over_wave(float value) { return wave_reduce<R, WAVE>(value); }
};

template <typename L, int CLUSTER> struct Share {
    typedef PostedReduction<L::LANES / WAVE, CLUSTER> Reduction;
    typedef ferryman::Partial Partial;
    static constexpr int SCRATCH = 2 * Reduction::PARTIALS;
    static FERRYMAN_DEVICE int rank() { return platform::cluster_rank(); }
    static FERRYMAN_DEVICE Reduction begin(Partial* scratch) {
        FERRYMAN_SHARED(platform::Arrival, arrivals, 3);  // the last is for what is copied to shared memory
        if (platform::thread_index() == 0) {
            for (int i = 0; i < 3; ++i) platform::arrival_begin(arrivals + i);
            platform::arrival_publish();
        }
        platform::cluster_arrive();
        return Reduction{scratch, arrivals, 0};
    }
    static FERRYMAN_DEVICE void meet() { platform::cluster_wait(); }
};

template <typename L, typename Op> struct WholeDriver {
    typedef typename L::Type T;
    typedef Pack<T, L::V> P;
    typedef typename Share<L>::Reduction Reduction;
    static_assert(L::CLUSTER > 1, "blocks share a row");

    Op& op;
    RowInput x, residual;
    i64 rows, n;
    int slots;  // rows ahead that L2 fetches, 0: none
    P* shared;
    int lane;
    int first, end;

    FERRYMAN_DEVICE const T* at(const RowInput& in, i64 row) const { return (const T*)in.data + row * in.stride + first; }
    static FERRYMAN_DEVICE constexpr int offset(int p) { return p * L::LANES * L::V; }
    FERRYMAN_DEVICE void fetch_ahead(i64 row) const {  // one thread
        const int bytes = (end - first) * (int)sizeof(T);
        if (row >= rows || bytes <= 0) return;
        platform::prefetch(at(x, row), bytes);
        if constexpr (Op::INPUTS == 2) platform::prefetch(at(residual, row), bytes);
    }

    FERRYMAN_DEVICE void run(i64 blocks, Partial* scratch) {
        Reduction reduction = Share<L>::begin(scratch);
        i64 each = 1;  // rows of a block: 1 or 2, unless there are more than a grid has blocks
        while (each * (blocks / L::CLUSTER) < rows) ++each;
        i64 row = platform::block_index() / L::CLUSTER * each;
        const i64 last = (row + each < rows ? row + each : rows) - 1;
        int live = 0;
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) live += first + (p * L::LANES + lane) * L::V < end;
        P held[L::PACKS], other[Op::INPUTS == 2 ? L::PACKS : 1];
        const T *from = at(x, row) + lane * L::V, *with = Op::INPUTS == 2 ? at(residual, row) + lane * L::V : nullptr;
        // Zeros where there is nothing to load: the first time, and wherever registers should be free in between.
        auto fetch = [&](int p, bool wanted, bool zeros) {
            if (wanted) load<ONCE>(held[p], from + offset(p));
            else if (zeros) zero(held[p]);
            if constexpr (Op::INPUTS == 2) {
                if (wanted) load<ONCE>(other[p], with + offset(p));
                else if (zeros) zero(other[p]);
            }
        };
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) fetch(p, p < live && row <= last, true);
        op.place(shared, n, first, end);
        if constexpr (Op::PLACED > 0) {
            if (lane == 0 && end > first && row <= last) {
                platform::arrival_expect(reduction.arrivals + 2, (u32)(end - first) * Op::PLACED);
                op.request(first, end, reduction.arrivals + 2);
            }
        }
        op.prepare(n, first, end, lane);
        op.begin(row, n);
        for (bool met = false; row <= last; ++row, met = true) {
            if (slots > 0 && lane == L::LANES - WAVE) fetch_ahead(row + slots);
            if constexpr (Op::INPUTS == 2) {
#pragma unroll
                for (int p = 0; p < L::PACKS; ++p)
                    if (p < live) op.merge(held[p], other[p], offset(p));
            }
            op.gather(held, live);
            if (!met) Share<L>::meet();  // as late as can be: ptxas has the first loads wait for it
            op.join(reduction);
            if constexpr (Op::FROM_PACKS) disguise(held, (u32)(n >> 32), op.result());
            if (Op::PLACED > 0 && end > first) platform::arrival_wait(reduction.arrivals + 2, 0);
            from += x.stride;
            if constexpr (Op::INPUTS == 2) with += residual.stride;
            const int more = row < last ? live : 0;
#pragma unroll
            for (int p = 0; p < L::PACKS; ++p) {
                if (p < live) op.emit(held[p], offset(p), p);
                if constexpr (Op::FROM_PACKS) fetch(p, p < more, false);
            }
            if constexpr (!Op::FROM_PACKS) {
#pragma unroll
                for (int p = 0; p < L::PACKS; ++p) fetch(p, p < more, true);
            }
            op.advance(n);
        }
    }
};

// Two rows at once: weights are unpacked for both, one exchange serves both, and a launch has blocks for all pairs, so that
// nothing is kept for a next one. Of layer_norm that is 11 instructions an element, where row by row takes 15.
// `Op` provides `place`, `request`, `prepare` and
//   void begin(row, step, n)          the rows are `row`, and the one that is written `step` elements further on
//   void gather(packs)                their part of both rows' statistics; packs that are not live are zeros
//   void join(reduction, packs, live) over the rows' threads
//   void emit(x, y, column, p)        a pack of each
template <typename L, typename Op> struct PairDriver {
    typedef typename L::Type T;
    typedef Pack<T, L::V> P;
    typedef typename Share<L>::Reduction Reduction;
    static_assert(L::CLUSTER > 1 && Op::INPUTS == 1, "blocks share a row of one tensor");

    Op& op;
    RowInput x, residual;
    i64 rows, n;
    int slots;
    P* shared;
    int lane;
    int first, end;

    FERRYMAN_DEVICE const T* at(i64 row) const { return (const T*)x.data + row * x.stride + first; }
    static FERRYMAN_DEVICE constexpr int offset(int p) { return p * L::LANES * L::V; }
    FERRYMAN_DEVICE void fetch_ahead(i64 row) const {  // one thread
        if (row < rows) platform::prefetch(at(row), (end - first) * (int)sizeof(T));
    }

    FERRYMAN_DEVICE void run(i64, Partial* scratch) {
        Reduction reduction = Share<L>::begin(scratch);
        constexpr int STEP = L::LANES * L::V;
        const int thread = platform::thread_index(), beyond = end - first - thread * L::V + STEP - 1;
        const int inside = beyond < STEP ? 0 : (int)((u32)beyond / STEP), live = inside < L::PACKS ? inside : L::PACKS;
        const i64 row = platform::block_index() / L::CLUSTER * 2;
        const bool two = row + 1 < rows;  // or the one is taken twice, and written twice
        auto ask_for_weights = [&] {
            op.place(shared, n, first, end);
            if constexpr (Op::PLACED > 0) {
                if (thread == 0 && end > first) {
                    platform::arrival_expect(reduction.arrivals + 2, (u32)(end - first) * Op::PLACED);
                    op.request(first, end, reduction.arrivals + 2);
                }
            }
        };
        // Which of the two is asked for first: 8 packs a thread, two blocks an SM, gain 1% (H200), others lose 0.5%.
        constexpr bool WEIGHTS_FIRST = L::WORDS > 16 && L::LANES <= 256;
        if constexpr (WEIGHTS_FIRST) ask_for_weights();
        P held[2][L::PACKS];
        const T* from = at(row) + thread * L::V;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            platform::settle(from);
#pragma unroll
            for (int p = 0; p < L::PACKS; ++p) {
                zero(held[r][p]);
                if (p < live) load<ONCE>(held[r][p], from + offset(p));
            }
            if (two) from += x.stride;
        }
        if constexpr (!WEIGHTS_FIRST) ask_for_weights();
        op.prepare(n, first, end, thread);
        if (slots > 0 && thread == L::LANES - WAVE && end > first) fetch_ahead(row + slots), fetch_ahead(row + slots + 1);
        op.begin(row, two ? n : 0, n);
        op.gather(held);
        Share<L>::meet();
        op.join(reduction, held, live);
        if constexpr (Op::PLACED > 0) {
            if (end > first) platform::arrival_wait(reduction.arrivals + 2, 0);
        }
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p)
            if (p < live) op.emit(held[0][p], held[1][p], offset(p), p);
    }
};

template <typename L, typename Op, bool PAIRS = Op::PAIRS> struct WholeDriverOf { typedef WholeDriver<L, Op> Type; };
template <typename L, typename Op> struct WholeDriverOf<L, Op, true> { typedef PairDriver<L, Op> Type; };
template <typename L, typename Op> struct DriverOf<L, Op, WHOLE> { typedef typename WholeDriverOf<L, Op>::Type Type; };

}  // namespace ferryman
