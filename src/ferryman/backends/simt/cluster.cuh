// Thread block clusters: SIZE neighbouring blocks that run at once, and write into each other's shared memory. NVIDIA from
// sm_90 on, and the CPU emulation of the tests. After `portable.cuh`.
//
// What is written into another block's memory is posted: counted there by an mbarrier, whose block waits for all of it.
// `barrier.cluster` would order the writes too, but its release is a fence of the whole device (MEMBAR.ALL.GPU: about a
// microsecond). So a kernel
//   - begins and publishes its mbarriers, and arrives (`cluster_arrive`), before it loads anything,
//   - waits (`cluster_wait`) before it first posts: the other blocks have begun then,
//   - may leave when it has waited for all that others post to it.

#define FERRYMAN_CLUSTERS

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
// Every thread of every block of the cluster meets. It orders `arrival_publish`, and nothing else.
FERRYMAN_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
FERRYMAN_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

typedef u64 Arrival;  // an mbarrier: a phase ends when its one arrival and all expected bytes are there

FERRYMAN_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
FERRYMAN_DEVICE void arrival_begin(Arrival* arrival) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrival)) : "memory");
}
// After all `arrival_begin`, before the first copy.
FERRYMAN_DEVICE void arrival_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
FERRYMAN_DEVICE void arrival_expect(Arrival* arrival, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)), "r"(bytes)
                 : "memory");
}
FERRYMAN_DEVICE void arrival_wait(Arrival* arrival, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(arrival)), "r"(parity)
        : "memory");
}
// To the place of `here` in block `rank`, where it counts its 4 bytes at the place of `arrival`.
FERRYMAN_DEVICE void cluster_post(float* here, int rank, float value, Arrival* arrival) {
    asm volatile(
        "{\n.reg .b32 there, counter;\n"
        "mapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [counter];\n}" ::"r"(
            shared_address(here)),
        "r"(shared_address(arrival)), "r"(rank), "r"(__float_as_uint(value))
        : "memory");
}
FERRYMAN_DEVICE void cluster_post(float* here, int rank, const float (&four)[4], Arrival* arrival) {  // 16-byte aligned
    asm volatile(
        "{\n.reg .b32 there, counter;\n"
        "mapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counter];\n}" ::"r"(
            shared_address(here)),
        "r"(shared_address(arrival)), "r"(rank), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3])
        : "memory");
}

// The lanes of a wave meet, and see what each has written before.
FERRYMAN_DEVICE void wave_meet() { __syncwarp(); }

// Asks for memory to be brought into L2: whole words of 16 bytes.
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

template <typename T> struct is_bf16 { static constexpr bool value = false; };
template <> struct is_bf16<bf16> { static constexpr bool value = true; };

template <typename T> FERRYMAN_DEVICE constexpr u32 minus_infinities() { return 0xff800000u; }
template <> FERRYMAN_DEVICE constexpr u32 minus_infinities<bf16>() { return 0xff80ff80u; }
template <> FERRYMAN_DEVICE constexpr u32 minus_infinities<f16>() { return 0xfc00fc00u; }

// The larger of each pair of 16-bit elements, or of two floats; a NaN loses.
template <typename T> FERRYMAN_DEVICE u32 larger(u32 a, u32 b) {
#if defined(__CUDACC__)
    u32 result;
    if constexpr (sizeof(T) == 4) return platform::bits_of(platform::fmax(platform::float_of(a), platform::float_of(b)));
    else if constexpr (is_bf16<T>::value) asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    else asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#else
    if constexpr (sizeof(T) == 4) return platform::bits_of(platform::fmax(platform::float_of(a), platform::float_of(b)));
    else
        return Storage<T>::pair(platform::fmax(Storage<T>::low(a), Storage<T>::low(b)),
                                platform::fmax(Storage<T>::high(a), Storage<T>::high(b)));
#endif
}

template <typename T> FERRYMAN_DEVICE float largest_of(u32 word) {
    if constexpr (sizeof(T) == 4) return platform::float_of(word);
    else return platform::fmax(Storage<T>::low(word), Storage<T>::high(word));
}

// Hides from the compiler that registers still hold what they held. `forget` is not enough here: ptxas keeps the floats
// that one pass has unpacked for the next (360 bytes spilled, f16). `nothing` is 0, which only the launch knows, and
// `after` a value that must be there first, or the changed words would be made early and kept beside the others.
template <typename T, int V, int PACKS>
FERRYMAN_DEVICE void disguise(Pack<T, V> (&packs)[PACKS], u32 nothing, float after) {
    const u32 change = nothing & platform::bits_of(after);
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
        for (int i = 0; i < Pack<T, V>::WORDS; ++i) {
            if constexpr (sizeof(T) == 2) packs[p].word[i] ^= change;
            else platform::opaque(packs[p].word[i]);
        }
    }
}

}  // namespace ferryman
