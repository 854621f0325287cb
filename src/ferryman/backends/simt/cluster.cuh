// Thread block clusters: SIZE neighbouring blocks that run at once, and write into each other's shared memory. NVIDIA from
// sm_90 on, and the CPU emulation of the tests. After `portable.cuh`.
//
// A block may write to another's memory once that one has begun: `cluster_arrive` first, `cluster_wait` before the
// first exchange, so that the loads between them hide the wait. The last `cluster_sync` of a block must follow every
// write to its memory; after that it may leave.

namespace ferryman {

#if defined(FERRYMAN_EMULATED)
// tests/unit/simt_emulation.h defines FERRYMAN_CLUSTER_KERNEL and the functions of `platform`.
#elif defined(__CUDACC__)

#define FERRYMAN_CLUSTER_KERNEL(threads, blocks, size) \
    extern "C" __global__ __cluster_dims__(size, 1, 1) __launch_bounds__(threads, blocks)

namespace platform {
FERRYMAN_DEVICE int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Every thread of every block of the cluster; what was written before the arrival is seen after the wait.
FERRYMAN_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
FERRYMAN_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// To the place of `here`, a pointer into this block's shared memory, in that of block `rank`.
FERRYMAN_DEVICE void cluster_store(float* here, int rank, float value) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.f32 [there], %2;\n}"
        :
        : "r"((u32)__cvta_generic_to_shared(here)), "r"(rank), "f"(value)
        : "memory");
}
}  // namespace platform

#else
#error "thread block clusters need NVIDIA sm_90 or later"
#endif

FERRYMAN_DEVICE void cluster_sync() {
    platform::cluster_arrive();
    platform::cluster_wait();
}

// `RowReduction` of a row that the blocks of a cluster share, or one block alone (SIZE 1): one partial per wave, written to
// every block, and one barrier. Successive reductions alternate between two halves of the scratch memory, as there.
// WAVES: of a block.
template <int WAVES, int SIZE> struct ClusterReduction {
    static constexpr int PARTIALS = WAVES * SIZE, SCRATCH = 2 * PARTIALS;
    static constexpr int WIDTH = ceil_power_of_two(PARTIALS) < WAVE ? ceil_power_of_two(PARTIALS) : WAVE;
    static_assert(SIZE <= WAVE, "a lane writes to each block");
    float* scratch;
    int half;

    // Every thread of the cluster must call it, and gets the same bits. Before the first call, with SIZE > 1, `cluster_arrive`
    // and `cluster_wait`.
    template <typename R> FERRYMAN_DEVICE float reduce(float value) {
        value = wave_reduce<R, WAVE>(value);
        const int thread = platform::thread_index(), lane = thread & (WAVE - 1), wave = thread / WAVE;
        float* partial = scratch + half * PARTIALS;
        half ^= 1;
        if constexpr (SIZE == 1) {
            if (lane == 0) partial[wave] = value;
            platform::barrier();
        } else {
            if (lane < SIZE) platform::cluster_store(partial + platform::cluster_rank() * WAVES + wave, lane, value);
            cluster_sync();
        }
        float all = R::identity();
#pragma unroll
        for (int i = 0; i < PARTIALS; i += WIDTH) {
            const int part = i + (lane & (WIDTH - 1));
            if (part < PARTIALS) all = R::join(all, partial[part]);
        }
        return wave_reduce<R, WIDTH>(all);
    }
};

}  // namespace ferryman
