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
// had everybody's partials of k + 1, so everybody has read those of k.
template <int WAVES, int SIZE> struct PostedReduction {
    static constexpr int PARTIALS = WAVES * SIZE, SCRATCH = 2 * PARTIALS;
    static constexpr int WIDTH = ceil_power_of_two(PARTIALS) < WAVE ? ceil_power_of_two(PARTIALS) : WAVE;
    static_assert(SIZE <= WAVE, "a lane posts to each block");
    float* scratch;
    platform::Arrival* arrivals;
    u32 count;

    // Every thread of the cluster gets the same bits, after `cluster_wait`.
    template <typename R> FERRYMAN_DEVICE float reduce(float value) {
        value = wave_reduce<R, WAVE>(value);
        const int thread = platform::thread_index(), lane = thread & (WAVE - 1), wave = thread / WAVE;
        float* partial = scratch + (count & 1) * PARTIALS;
        platform::Arrival* arrival = arrivals + (count & 1);
        if (thread == 0) platform::arrival_expect(arrival, PARTIALS * sizeof(float));
        if (lane < SIZE) platform::cluster_post(partial + platform::cluster_rank() * WAVES + wave, lane, value, arrival);
        platform::arrival_wait(arrival, count >> 1 & 1);
        ++count;
        float all = R::identity();
#pragma unroll
        for (int i = 0; i < PARTIALS; i += WIDTH) {
            const int part = i + (lane & (WIDTH - 1));
            if (part < PARTIALS) all = R::join(all, partial[part]);
        }
        return wave_reduce<R, WIDTH>(all);
    }
};

template <typename L, int CLUSTER> struct Share {
    typedef PostedReduction<L::LANES / WAVE, CLUSTER> Reduction;
    static FERRYMAN_DEVICE int rank() { return platform::cluster_rank(); }
    static FERRYMAN_DEVICE Reduction begin(float* scratch) {
        FERRYMAN_SHARED(platform::Arrival, arrivals, 2);
        if (platform::thread_index() == 0) {
            platform::arrival_begin(arrivals);
            platform::arrival_begin(arrivals + 1);
            platform::arrival_publish();
        }
        platform::cluster_arrive();
        return Reduction{scratch, arrivals, 0};
    }
    static FERRYMAN_DEVICE void meet() { platform::cluster_wait(); }
};

constexpr int MOST_STAGES = 16;

template <typename L, typename Op> struct RingDriver {
    typedef typename L::Type T;
    typedef Pack<T, L::V> P;
    typedef typename Share<L>::Reduction Reduction;
    static_assert(L::V > 1 && L::ROWS == 1 && L::LANES > WAVE, "the copy engine takes 16 bytes, a barrier frees a stage");

    Op& op;
    RowInput x, residual;
    i64 rows, n;
    int slots;  // stages
    P* shared;  // slots * INPUTS * packs
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

    template <int PASS> FERRYMAN_DEVICE void reduce(P (&held)[L::PACKS], int stage, i64 next, Reduction& reduction) {
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) {
            if (column_of(p) >= end) continue;
            float values[L::V];
            unpack(held[p], values);
            op.template add<PASS>(values);
        }
        op.template finish<PASS>(reduction);
        // its barrier: every thread has its part of the stage in registers
        if (PASS == 0 && lane == 0 && next < rows) request(stage, next);
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) forget(held[p]);
        if constexpr (PASS + 1 < Op::PASSES) reduce<PASS + 1>(held, stage, next, reduction);
    }

    FERRYMAN_DEVICE void run(i64 blocks, float* scratch) {
        FERRYMAN_SHARED(platform::Arrival, places, MOST_STAGES);
        arrivals = places;
        packs = columns_of_block<L>(n) / L::V;
        Reduction reduction = Share<L>::begin(scratch);
        const i64 step = blocks / L::CLUSTER;
        i64 row = platform::block_index() / L::CLUSTER;
        if (lane == 0) {
            for (int s = 0; s < slots; ++s) platform::arrival_begin(arrivals + s);
            platform::arrival_publish();
            for (int s = 0; s < slots && row + s * step < rows; ++s) request(s, row + s * step);
        }
        platform::barrier();
        op.prepare(n, first, end, lane);
        Share<L>::meet();
        int stage = 0;
        u32 parity = 0;
        for (; row < rows; row += step) {
            P held[L::PACKS];
            op.begin(row, n);
            if (end > first) platform::arrival_wait(arrivals + stage, parity);
            const P* from = stage_of(stage) + lane;
#pragma unroll
            for (int p = 0; p < L::PACKS; ++p)
                if (column_of(p) < end) held[p] = from[p * L::LANES];
            if constexpr (Op::INPUTS == 2) {
#pragma unroll
                for (int p = 0; p < L::PACKS; ++p)
                    if (column_of(p) < end) op.merge(held[p], from[packs + p * L::LANES], column_of(p));
            }
            reduce<0>(held, stage, row + slots * step, reduction);
#pragma unroll
            for (int p = 0; p < L::PACKS; ++p)
                if (column_of(p) < end) op.emit(held[p], column_of(p), p);
            if (++stage == slots) stage = 0, parity ^= 1;
        }
    }
};

template <typename L, typename Op> struct DriverOf<L, Op, RING> { typedef RingDriver<L, Op> Type; };

}  // namespace ferryman
