// Rows on sm_90 and newer: those that the blocks of a cluster share, and those that come through a ring of shared
// memory. After `cluster.cuh` and `rows.cuh`.
//
// RING: a block stays for many rows. The copy engine brings its columns of the next `slots` rows to shared memory, so
// that loads are in flight whatever the threads do: in the form that loads to registers, none is from the last load of
// a row to the end of its reduction, unless other blocks of the SM fill the gap.

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
}  // namespace platform
#endif

// `RowReduction` over the blocks of a cluster. A barrier of the cluster with release semantics waits until all that
// the block has stored in device memory has arrived there: the whole of the row before. So partials are posted: each store
// counts its bytes at an arrival of its destination. Two of these alternate: a block that posts for reduction k + 2 has
// had everybody's partials of k + 1, so everybody has read those of k. The groups of a block share no barrier this way.
template <int WAVES, int SIZE> struct PostedReduction {
    typedef Pair Partial;
    static constexpr int PARTIALS = WAVES * SIZE;
    static constexpr int WIDTH = ceil_power_of_two(PARTIALS) < WAVE ? ceil_power_of_two(PARTIALS) : WAVE;
    static constexpr int EACH = (PARTIALS + WIDTH - 1) / WIDTH;  // partials that a lane takes up
    static_assert(SIZE <= WAVE, "a lane posts to each block");
    Pair* scratch;  // 2 * PARTIALS
    platform::Arrival* arrivals;
    int thread, group;  // of the row's threads in this block; which row's they are
    u32 count;

    FERRYMAN_DEVICE int part(int i) const { return i * WIDTH + (thread & (WIDTH - 1)); }

    // Posts a wave's partial to all blocks, and returns all partials once they are here.
    template <typename V> FERRYMAN_DEVICE const V* post(const V& partial) {
        const int lane = thread & (WAVE - 1);
        V* partials = (V*)(scratch + (count & 1) * PARTIALS);
        if constexpr (SIZE == 1) {
            if (lane == 0) partials[thread / WAVE] = partial;
            platform::group_barrier<WAVES * WAVE>(group);
            ++count;
            return partials;
        }
        platform::Arrival* arrival = arrivals + (count & 1);
        if (thread == 0) platform::arrival_expect(arrival, PARTIALS * sizeof(V));
        if (lane < SIZE)
            platform::cluster_post(partials + platform::cluster_rank() * WAVES + thread / WAVE, lane, partial, arrival);
        platform::arrival_wait(arrival, count >> 1 & 1);
        ++count;
        return partials;
    }

    // Every thread of the cluster gets the same bits, after `cluster_wait`.
    template <typename R> FERRYMAN_DEVICE float reduce(float value) {
        const float* partials = post(wave_reduce<R, WAVE>(value));
        float all = R::identity();
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (part(i) < PARTIALS) all = R::join(all, partials[part(i)]);
        return wave_reduce<R, WIDTH>(all);
    }

    // Every wave's pair: those that this lane takes up, `absent` beyond the last.
    FERRYMAN_DEVICE void exchange(const Pair& own, const Pair& absent, Pair (&pairs)[EACH]) {
        const Pair* partials = post(own);
#pragma unroll
        for (int i = 0; i < EACH; ++i) pairs[i] = part(i) < PARTIALS ? partials[part(i)] : absent;
    }
    template <typename R> static FERRYMAN_DEVICE float over_wave(float value) { return wave_reduce<R, WAVE>(value); }
    template <typename R> static FERRYMAN_DEVICE float over_parts(float value) { return wave_reduce<R, WIDTH>(value); }
};

template <typename L> struct Posted {
    typedef PostedReduction<L::LANES / WAVE, L::CLUSTER> Reduction;
    static FERRYMAN_DEVICE int rank() { return L::CLUSTER == 1 ? 0 : platform::cluster_rank(); }
    typedef Pair Partial;
    static constexpr int SCRATCH = L::ROWS * 2 * Reduction::PARTIALS;
    static FERRYMAN_DEVICE Reduction begin(Partial* scratch) {
        FERRYMAN_SHARED(platform::Arrival, arrivals, (2 * L::ROWS));
        const int thread = platform::thread_index(), group = thread / L::LANES;
        if (L::CLUSTER > 1 && thread == 0) {
            for (int i = 0; i < 2 * L::ROWS; ++i) platform::arrival_begin(arrivals + i);
            platform::arrival_publish();
        }
        if constexpr (L::CLUSTER > 1) platform::cluster_arrive();
        return Reduction{scratch + group * 2 * Reduction::PARTIALS, arrivals + 2 * group, thread % L::LANES, group, 0};
    }
    static FERRYMAN_DEVICE void meet() {
        if constexpr (L::CLUSTER > 1) platform::cluster_wait();
    }
};
template <typename L, int CLUSTER> struct Share<L, CLUSTER, false> : Posted<L> {};
template <typename L> struct Share<L, 1, true> : Posted<L> {};
template <typename L, int CLUSTER> struct Share<L, CLUSTER, true> : Posted<L> {};

constexpr int MOST_STAGES = 16;

// ROWS groups of LANES threads, each with rows and stages of its own: while one waits for its partials another writes.
// An operation keeps what it needs of its weights in shared memory, for all groups.
//
// Beside what rows.cuh says, an operation `Op` provides
//   void place(memory, n, first, end)    once, before `prepare`: its part of shared memory, after the stages. Columns of
//                                        `merge` and `emit` count from this thread's first: of a register each, not two
//   void gather(packs, live)             this thread's part of a row's statistics; the first `live` packs are inside
//   void join(reduction)                 over the row's threads: one exchange
//   float result()                       something that `join` has made
template <typename L, typename Op> struct RingDriver {
    typedef typename L::Type T;
    typedef Pack<T, L::V> P;
    typedef typename Share<L>::Reduction Reduction;
    static_assert(L::V > 1 && L::LANES > WAVE, "the copy engine takes 16 bytes");

    Op& op;
    RowInput x, residual;
    i64 rows, n;
    int slots;  // stages of a group
    P* shared;  // ROWS * slots * INPUTS * packs
    int lane;
    int first, end;
    platform::Arrival* arrivals;
    int packs;  // of this block in a row

    FERRYMAN_DEVICE int column_of(int p) const { return first + (p * L::LANES + lane) * L::V; }
    FERRYMAN_DEVICE P* stage_of(int stage) const { return shared + stage * Op::INPUTS * packs; }

    // One thread.
    FERRYMAN_DEVICE void request(int stage, i64 row) const {
        if (end <= first) return;
        u32 bytes = (u32)(end - first) * (u32)sizeof(T);
        platform::arrival_expect(arrivals + stage, bytes * Op::INPUTS);
        P* to = stage_of(stage);
        platform::copy_to_shared(to, (const T*)x.data + row * x.stride + first, bytes, arrivals + stage);
        if constexpr (Op::INPUTS == 2)
            platform::copy_to_shared(to + packs, (const T*)residual.data + row * residual.stride + first, bytes,
                                     arrivals + stage);
    }

    FERRYMAN_DEVICE void run(i64 blocks, Pair* scratch) {
        FERRYMAN_SHARED(platform::Arrival, places, (L::ROWS * MOST_STAGES));
        packs = columns_of_block<L>(n) / L::V;
        Reduction reduction = Share<L>::begin(scratch);
        const int group = platform::thread_index() / L::LANES;
        const i64 step = blocks / L::CLUSTER * L::ROWS;
        i64 row = platform::block_index() / L::CLUSTER * L::ROWS + group;
        op.place(shared + L::ROWS * slots * Op::INPUTS * packs, n, first, end);
        arrivals = places + group * MOST_STAGES;
        shared = stage_of(group * slots);
        if (lane == 0) {
            for (int s = 0; s < slots; ++s) platform::arrival_begin(arrivals + s);
            platform::arrival_publish();
            for (int s = 0; s < slots && row + s * step < rows; ++s) request(s, row + s * step);
        }
        platform::barrier();
        op.prepare(n, first, end, lane);
        Share<L>::meet();
        int live = 0;
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) live += column_of(p) < end;
        int stage = 0;
        u32 parity = 0;
        for (; row < rows; row += step) {
            P held[L::PACKS];
            op.begin(row, n);
            if (end > first) platform::arrival_wait(arrivals + stage, parity);
            const P* from = stage_of(stage) + (live > 0 ? lane : 0);
#pragma unroll
            for (int p = 0; p < L::PACKS; ++p) held[p] = from[p < live ? p * L::LANES : 0];
            if constexpr (Op::INPUTS == 2) {
#pragma unroll
                for (int p = 0; p < L::PACKS; ++p)
                    if (p < live) op.merge(held[p], from[packs + p * L::LANES], p * L::LANES * L::V);
            }
            op.gather(held, live);
            op.join(reduction);
            // all partials are here: every thread of the group has its part of the stage in registers
            if (lane == 0 && row + slots * step < rows) request(stage, row + slots * step);
#pragma unroll
            for (int p = 0; p < L::PACKS; ++p)
                if (p < live) op.emit(held[p], p * L::LANES * L::V, p);
            if (++stage == slots) stage = 0, parity ^= 1;
        }
    }
};

template <typename L, typename Op> struct DriverOf<L, Op, RING> { typedef RingDriver<L, Op> Type; };

// A row to a cluster, or to a block: the hardware deals them, so that no SM waits for another. What an SM does not load
// while its blocks reduce and write is fetched by L2 in the meantime.
template <typename L, typename Op> struct WholeDriver {
    typedef typename L::Type T;
    typedef Pack<T, L::V> P;
    typedef typename Share<L>::Reduction Reduction;
    static_assert(L::ROWS == 1 && L::LANES > WAVE, "a block has part of one row");

    Op& op;
    RowInput x, residual;
    i64 rows, n;
    int slots;  // rows ahead, 0: none
    P* shared;
    int lane;
    int first, end;

    FERRYMAN_DEVICE const T* at(const RowInput& in, i64 row) const { return (const T*)in.data + row * in.stride + first; }

    FERRYMAN_DEVICE void fetch(P (&held)[L::PACKS], const RowInput& in, i64 row, int live) const {
        const T* from = at(in, row) + lane * L::V;
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) {
            if (p < live) load<ONCE>(held[p], from + p * L::LANES * L::V);
            else zero(held[p]);
        }
    }

    FERRYMAN_DEVICE void run(i64 blocks, Pair* scratch) {
        Reduction reduction = Share<L>::begin(scratch);
        const i64 step = blocks / L::CLUSTER;
        int live = 0;
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) live += first + (p * L::LANES + lane) * L::V < end;
        P held[L::PACKS], other[Op::INPUTS == 2 ? L::PACKS : 1];
        i64 row = platform::block_index() / L::CLUSTER;
        fetch(held, x, row, live);
        if constexpr (Op::INPUTS == 2) fetch(other, residual, row, live);
        op.place(nullptr, n, first, end);
        op.prepare(n, first, end, lane);
        Share<L>::meet();
        for (;;) {
            if (slots > 0 && lane == L::LANES - WAVE && row + slots < rows && end > first) {
                platform::prefetch(at(x, row + slots), (end - first) * (int)sizeof(T));
                if constexpr (Op::INPUTS == 2)
                    platform::prefetch(at(residual, row + slots), (end - first) * (int)sizeof(T));
            }
            op.begin(row, n);
            if constexpr (Op::INPUTS == 2) {
#pragma unroll
                for (int p = 0; p < L::PACKS; ++p)
                    if (p < live) op.merge(held[p], other[p], p * L::LANES * L::V);
            }
            op.gather(held, live);
            op.join(reduction);
            disguise(held, (u32)(n >> 32), op.result());
#pragma unroll
            for (int p = 0; p < L::PACKS; ++p)
                if (p < live) op.emit(held[p], p * L::LANES * L::V, p);
            row += step;
            if (row >= rows) break;
            fetch(held, x, row, live);
            if constexpr (Op::INPUTS == 2) fetch(other, residual, row, live);
        }
    }
};

template <typename L, typename Op> struct DriverOf<L, Op, WHOLE> { typedef WholeDriver<L, Op> Type; };

}  // namespace ferryman
