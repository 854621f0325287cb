// Hopper's own instructions (sm_90a), as PTX: mbarriers, bulk and tensor copies, clusters, warpgroup products. NVIDIA
// alone, so this is beside the portable dialect and not of it. No header is included (NVRTC is given no include path).

namespace ferryman {

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define FERRYMAN_DEVICE __device__ __forceinline__

constexpr int WARP = 32;
constexpr int GROUP_THREADS = 128;  // a warpgroup

FERRYMAN_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

FERRYMAN_DEVICE int ceil_div(i64 a, int b) { return (int)((a + b - 1) / b); }

// ------------------------------------------------------------------------------------------------ mbarriers

FERRYMAN_DEVICE void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
FERRYMAN_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
FERRYMAN_DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
FERRYMAN_DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same barrier of block `rank` of the cluster. At block scope, as the wait: what it orders are the tensor cores' reads
// and the copy engine's writes, and cluster scope would cost a fence of the whole device (950 ns a stage, measured).
FERRYMAN_DEVICE void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
}
FERRYMAN_DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// A ring of stages: where the next one lies, and the parity of the round.
template <int STAGES> struct Ring {
    int stage = 0;
    u32 parity = 0;
    static FERRYMAN_DEVICE Ring after(int filled) {  // at most all
        Ring ring;
        ring.stage = filled % STAGES;
        ring.parity = filled / STAGES;
        return ring;
    }
    FERRYMAN_DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// --------------------------------------------------------------------------------------------------- copies

// Of 16 bytes, or zeros if bytes is 0.
FERRYMAN_DEVICE void copy_or_zero(u32 to, const u16* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// For a weight with few rows of x: nothing reads it again, so it leaves L2 before what others may read.
FERRYMAN_DEVICE u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
FERRYMAN_DEVICE void copy_once(u32 to, const u16* from, int bytes, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 ::"r"(to), "l"(from), "r"(bytes), "l"(policy) : "memory");
}
// Arrives once this thread's copies so far have landed.
FERRYMAN_DEVICE void arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---------------------------------------------------------------------------------------------------- order

// As in portable.cuh: waits for the kernel before this one in its stream, and lets the next one's blocks start.
FERRYMAN_DEVICE void after_previous() {
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ------------------------------------------------------------------------------------------------- clusters

FERRYMAN_DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
FERRYMAN_DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Before a block uses another's barriers: both have started, and what `barrier_init_fence` published is seen.
FERRYMAN_DEVICE void cluster_start() {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Into block `rank`'s memory, where it counts 16 bytes of what the barrier of the same place expects.
FERRYMAN_DEVICE void send_four(u32 to, u32 barrier, u32 rank, float a, float b, float c, float d) {
    asm volatile(
        "{\n.reg .b32 there, counted;\n"
        "mapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 counted, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counted];\n}"
        ::"r"(to), "r"(barrier), "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
FERRYMAN_DEVICE void load_four(float* to, u32 address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(address) : "memory");
}

FERRYMAN_DEVICE void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --------------------------------------------------------------------------------------------- 16-bit types

#if FERRYMAN_BF16
#define FERRYMAN_MMA_TYPE "bf16"
FERRYMAN_DEVICE u32 round_pair(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
FERRYMAN_DEVICE u16 round_one(float value) {
    u16 packed;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(packed) : "f"(value));
    return packed;
}
FERRYMAN_DEVICE float widen(u16 bits) { return __uint_as_float((u32)bits << 16); }
constexpr int TENSOR_MAP_TYPE = 10;
#else
#define FERRYMAN_MMA_TYPE "f16"
FERRYMAN_DEVICE u32 round_pair(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
FERRYMAN_DEVICE u16 round_one(float value) {
    u16 packed;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(packed) : "f"(value));
    return packed;
}
FERRYMAN_DEVICE float widen(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
constexpr int TENSOR_MAP_TYPE = 6;
#endif

}  // namespace ferryman
