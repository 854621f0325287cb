// Thread block clusters: SIZE neighbouring blocks that run at once, and write into each other's shared memory. NVIDIA from
// sm_90 on, and the CPU emulation of the tests. After `portable.cuh`.
//
// What is written into another block's memory is counted there by a gate (an mbarrier), whose block waits for all of it.
// `barrier.cluster` would order the writes too, but its release is a fence of the whole device (MEMBAR.ALL.GPU: about a
// microsecond). So a kernel
//   - sets its gates up (`Gate::open`) and arrives (`cluster_arrive`), before it loads anything,
//   - waits (`cluster_wait`) before its first write to others: they have begun then, and their gates are set up,
//   - may leave when it has seen all gates that others write to pass.

namespace ferryman {

#if defined(FERRYMAN_EMULATED)
// tests/unit/simt_emulation.h defines FERRYMAN_CLUSTER_KERNEL, `words2` and the functions of `platform`.
#elif defined(__CUDACC__)

#define FERRYMAN_CLUSTER_KERNEL(threads, blocks, size) \
    extern "C" __global__ __cluster_dims__(size, 1, 1) __launch_bounds__(threads, blocks)

namespace platform {
FERRYMAN_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

FERRYMAN_DEVICE int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Every thread of every block of the cluster meets. It orders the gates' set-up, and nothing else.
FERRYMAN_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
FERRYMAN_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A gate passes when its one arrival and as many bytes as that announced have come. By one thread.
FERRYMAN_DEVICE void gate_open(u64* gate) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;"
                 :
                 : "r"(shared_address(gate))
                 : "memory");
}
FERRYMAN_DEVICE void gate_expect(u64* gate, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(shared_address(gate)), "r"(bytes) : "memory");
}
FERRYMAN_DEVICE void gate_wait(u64* gate, int parity) {
    u32 passed = 0;
    while (!passed)
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(passed)
            : "r"(shared_address(gate)), "r"(parity)
            : "memory");
}

// Into block `rank`'s shared memory, at the place of `here` in this block's; its gate at the place of `gate` counts them.
FERRYMAN_DEVICE void cluster_store(float* here, int rank, float value, u64* gate) {
    asm volatile(
        "{\n.reg .b32 there, counted;\n"
        "mapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 counted, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [counted];\n}"
        :
        : "r"(shared_address(here)), "r"(shared_address(gate)), "r"(rank), "f"(value)
        : "memory");
}
FERRYMAN_DEVICE void cluster_store(float* here, int rank, const float (&four)[4], u64* gate) {  // `here`: 16-byte aligned
    asm volatile(
        "{\n.reg .b32 there, counted;\n"
        "mapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 counted, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counted];\n}"
        :
        : "r"(shared_address(here)), "r"(shared_address(gate)), "r"(rank), "f"(four[0]), "f"(four[1]), "f"(four[2]),
          "f"(four[3])
        : "memory");
}

// Asks for memory to be brought into L2: whole packs of 16 bytes.
FERRYMAN_DEVICE void prefetch(const void* p, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(p), "r"(bytes) : "memory");
}

// Adds 1 and returns what was there. Whoever gets the last number sees what the others wrote before theirs.
FERRYMAN_DEVICE u32 take_number(u32* counter) {
    u32 number;
    asm volatile("atom.global.add.acq_rel.gpu.u32 %0, [%1], 1;" : "=r"(number) : "l"(counter) : "memory");
    return number;
}
}  // namespace platform

#else
#error "thread block clusters need NVIDIA sm_90 or later"
#endif

// `RowReduction` of a row that the blocks of a cluster share, or one block alone (SIZE 1). Every wave writes its partial to
// every block. Successive reductions alternate between two halves of the scratch memory and two gates: whoever starts
// reduction k + 2 has got every wave's partial of k + 1, so all have read those of k. WAVES: of a block.
template <int WAVES, int SIZE> struct ClusterReduction {
    static constexpr int PARTIALS = WAVES * SIZE, SCRATCH = 2 * PARTIALS, GATES = 2;
    static constexpr int WIDTH = ceil_power_of_two(PARTIALS) < WAVE ? ceil_power_of_two(PARTIALS) : WAVE;
    static_assert(SIZE <= WAVE, "a lane writes to each block");
    float* scratch;
    u64* gates;
    int number;  // of reductions so far

    // Both by every thread: before the kernel's loads, and after them.
    FERRYMAN_DEVICE void begin() const {
        if constexpr (SIZE > 1) {
            if (platform::thread_index() == 0) platform::gate_open(gates), platform::gate_open(gates + 1);
            platform::cluster_arrive();
        }
    }
    FERRYMAN_DEVICE void meet() const {
        if constexpr (SIZE > 1) platform::cluster_wait();
    }

    // Every thread of the cluster must call it, and gets the same bits.
    template <typename R> FERRYMAN_DEVICE float reduce(float value) {
        value = wave_reduce<R, WAVE>(value);
        const int thread = platform::thread_index(), lane = thread & (WAVE - 1), wave = thread / WAVE;
        float* partial = scratch + (number & 1) * PARTIALS;
        if constexpr (SIZE == 1) {
            if (lane == 0) partial[wave] = value;
            platform::barrier();
        } else {
            u64* gate = gates + (number & 1);
            if (thread == 0) platform::gate_expect(gate, PARTIALS * 4);
            if (lane < SIZE) platform::cluster_store(partial + platform::cluster_rank() * WAVES + wave, lane, value, gate);
            platform::gate_wait(gate, number / 2 & 1);
        }
        ++number;
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
