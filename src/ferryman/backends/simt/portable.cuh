// The dialect that every SIMT kernel is written in: NVIDIA (NVRTC), AMD (hipRTC, or a plain clang with
// -nogpuinc) and the CPU emulation of the tests. No header is included, because none of the three compilers is
// given an include path. The build defines FERRYMAN_WAVE, the lanes of a warp or wavefront: 32 or 64.
//
// Everything that differs between vendors stands in the three platform sections below; what follows them, and
// every kernel, is written once.

#ifndef FERRYMAN_WAVE
#error "the build must define FERRYMAN_WAVE (lanes per warp or wavefront)"
#endif

namespace ferryman {

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

// Storage types. Arithmetic is always in float; these carry bits only.
struct bf16 { u16 bits; };
struct f16 { u16 bits; };
typedef float f32;
struct none {};  // an absent weight or bias

// How global memory is read: ONCE by this block and AGAIN are read-only for the whole launch (ONCE may bypass the
// first cache); WRITTEN is memory that the reading thread writes, before or after.
enum Access : int { ONCE, AGAIN, WRITTEN };

constexpr int WAVE = FERRYMAN_WAVE;
static_assert(WAVE == 32 || WAVE == 64, "a wave has 32 or 64 lanes");

// ------------------------------------------------------------------------------------------- CPU emulation
#if defined(FERRYMAN_EMULATED)
// tests/unit/simt_emulation.h, compiled before this file, defines the macros and namespace `platform`.

// ------------------------------------------------------------------------------------------------- AMD
#elif defined(__AMDGCN__) || defined(__HIP__)

#define FERRYMAN_DEVICE inline __attribute__((device, always_inline))
// HIP's second launch bound means waves per EU, not blocks per CU: only the block size is stated.
#define FERRYMAN_KERNEL(threads, blocks) \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads), visibility("protected")))
#define FERRYMAN_SHARED(type, name, count) __attribute__((shared)) static type name[count]
#define FERRYMAN_DYNAMIC_SHARED(type, name) extern __attribute__((shared)) type name[]

extern "C" {
__attribute__((device, const)) float __ocml_exp_f32(float);
__attribute__((device, const)) float __ocml_log_f32(float);
__attribute__((device, const)) float __ocml_native_exp2_f32(float);
__attribute__((device, const)) float __ocml_sqrt_f32(float);
}

namespace platform {
typedef u32 words2 __attribute__((ext_vector_type(2), may_alias));
typedef u32 words4 __attribute__((ext_vector_type(4), may_alias));
typedef u32 words1 __attribute__((may_alias));
typedef u16 half_word __attribute__((may_alias));

FERRYMAN_DEVICE int thread_index() { return (int)__builtin_amdgcn_workitem_id_x(); }
FERRYMAN_DEVICE i64 block_index() { return (i64)__builtin_amdgcn_workgroup_id_x(); }
FERRYMAN_DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
FERRYMAN_DEVICE u32 shuffle_xor(u32 value, int mask) {
    int source = ((thread_index() & (WAVE - 1)) ^ mask) << 2;  // ds_bpermute addresses lanes in bytes
    return (u32)__builtin_amdgcn_ds_bpermute(source, (int)value);
}
FERRYMAN_DEVICE u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
FERRYMAN_DEVICE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }

// Hides that a register still holds what it held (see `forget`).
FERRYMAN_DEVICE void opaque(u32& word) { asm volatile("" : "+v"(word)); }

// HIP's documented errors: expf and logf 1 ulp, sqrtf and division correctly rounded; v_exp_f32 and v_rcp_f32 1 ulp.
FERRYMAN_DEVICE float exp(float v) { return __ocml_exp_f32(v); }
FERRYMAN_DEVICE float log(float v) { return __ocml_log_f32(v); }
FERRYMAN_DEVICE float quick_exp2(float v) { return __ocml_native_exp2_f32(v); }  // may flush subnormal results
FERRYMAN_DEVICE float reciprocal(float v) {  // of normal values; one Newton step, as v_rcp_f32 alone may be 1 ulp off
    float estimate = __builtin_amdgcn_rcpf(v);
    return __builtin_fmaf(__builtin_fmaf(-v, estimate, 1.0f), estimate, estimate);
}
FERRYMAN_DEVICE float sqrt(float v) { return __ocml_sqrt_f32(v); }
FERRYMAN_DEVICE float inverse_root(float v) { return 1.0f / __ocml_sqrt_f32(v); }
FERRYMAN_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FERRYMAN_DEVICE float fmax(float a, float b) { return __builtin_fmaxf(a, b); }

FERRYMAN_DEVICE float half_to_float(u32 bits) { return (float)__builtin_bit_cast(_Float16, (u16)bits); }
FERRYMAN_DEVICE u32 half_pair(float low, float high) {
    u32 l = __builtin_bit_cast(u16, (_Float16)low), h = __builtin_bit_cast(u16, (_Float16)high);
    return l | (h << 16);
}
#if defined(__gfx950__)
FERRYMAN_DEVICE u32 bf16_pair(float low, float high) {  // v_cvt_pk_bf16_f32
    u32 l = __builtin_bit_cast(u16, (__bf16)low), h = __builtin_bit_cast(u16, (__bf16)high);
    return l | (h << 16);
}
#define FERRYMAN_HAS_BF16_PAIR
#endif

// Read-only memory is read through the constant address space: without it no load moves above a store.
#define FERRYMAN_CONSTANT(type, p) (*(const __attribute__((address_space(4))) type*)(u64)(p))

template <int BYTES> struct Memory;
template <> struct Memory<16> {
    template <Access ACCESS> static FERRYMAN_DEVICE void load(const void* p, u32* out) {
        words4 v = ACCESS == WRITTEN ? *(const words4*)p : FERRYMAN_CONSTANT(words4, p);
        out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    }
    static FERRYMAN_DEVICE void store(void* p, const u32* in) { *(words4*)p = words4{in[0], in[1], in[2], in[3]}; }
};
template <> struct Memory<8> {
    template <Access ACCESS> static FERRYMAN_DEVICE void load(const void* p, u32* out) {
        words2 v = ACCESS == WRITTEN ? *(const words2*)p : FERRYMAN_CONSTANT(words2, p);
        out[0] = v.x, out[1] = v.y;
    }
    static FERRYMAN_DEVICE void store(void* p, const u32* in) { *(words2*)p = words2{in[0], in[1]}; }
};
template <> struct Memory<4> {
    template <Access ACCESS> static FERRYMAN_DEVICE void load(const void* p, u32* out) {
        out[0] = ACCESS == WRITTEN ? *(const words1*)p : FERRYMAN_CONSTANT(words1, p);
    }
    static FERRYMAN_DEVICE void store(void* p, const u32* in) { *(words1*)p = in[0]; }
};
template <> struct Memory<2> {
    template <Access ACCESS> static FERRYMAN_DEVICE void load(const void* p, u32* out) {
        out[0] = ACCESS == WRITTEN ? *(const half_word*)p : FERRYMAN_CONSTANT(half_word, p);
    }
    static FERRYMAN_DEVICE void store(void* p, const u32* in) { *(half_word*)p = (u16)in[0]; }
};
}  // namespace platform

// ---------------------------------------------------------------------------------------------- NVIDIA
#else

#define FERRYMAN_DEVICE __device__ __forceinline__
#define FERRYMAN_KERNEL(threads, blocks) extern "C" __global__ __launch_bounds__(threads, blocks)
#define FERRYMAN_SHARED(type, name, count) __shared__ type name[count]
#define FERRYMAN_DYNAMIC_SHARED(type, name) extern __shared__ type name[]

namespace platform {
typedef uint4 words4;

FERRYMAN_DEVICE int thread_index() { return (int)threadIdx.x; }
FERRYMAN_DEVICE i64 block_index() { return (i64)blockIdx.x; }
FERRYMAN_DEVICE void barrier() { __syncthreads(); }
FERRYMAN_DEVICE u32 shuffle_xor(u32 value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask, WAVE);  // CUDA's masks are 32 bits, one per lane
}
FERRYMAN_DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
FERRYMAN_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

// Hides that a register still holds what it held (see `forget`).
FERRYMAN_DEVICE void opaque(u32& word) { asm volatile("" : "+r"(word)); }

// CUDA C++ programming guide, without fast math: expf 2 ulp, logf 1, division correctly rounded. PTX: ex2.approx
// has a relative error below 2^-22, rcp.approx 1 ulp.
FERRYMAN_DEVICE float exp(float v) { return ::expf(v); }
FERRYMAN_DEVICE float log(float v) { return ::logf(v); }
FERRYMAN_DEVICE float quick_exp2(float v) {  // flushes subnormal results
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}
FERRYMAN_DEVICE float reciprocal(float v) {  // of normal values
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}
FERRYMAN_DEVICE float sqrt(float v) { return ::sqrtf(v); }
// rsqrt.approx has a relative error below 2^-22.4; one step of Newton's
// method leaves 1 ulp, and powers of four exact. 0 and infinity give NaN in the step.
FERRYMAN_DEVICE float inverse_root(float v) {
    float estimate;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(estimate) : "f"(v));
    const float error = ::fmaf(-(v * estimate), estimate, 1.0f), result = ::fmaf(0.5f * estimate, error, estimate);
    return result == result ? result : estimate;
}
FERRYMAN_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
FERRYMAN_DEVICE float fmax(float a, float b) { return ::fmaxf(a, b); }

// NVRTC has no cuda_fp16.h without an include path; these are the instructions its conversions use.
FERRYMAN_DEVICE float half_to_float(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
}
FERRYMAN_DEVICE u32 half_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
FERRYMAN_DEVICE u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#define FERRYMAN_HAS_BF16_PAIR

// Stores are PTX because the compiler splits that of a uint4 whose parts it computes apart (silu_mul, sm_90); a load
// that no intrinsic gives is too, and volatile: LLVM takes other asm for arithmetic and moves it out of its `if`, which
// reads past the end. __ldg moves above stores, because it is known to be read-only, and stays inside its `if`.
template <int BYTES> struct Memory;
template <> struct Memory<16> {
    template <Access ACCESS> static FERRYMAN_DEVICE void load(const void* p, u32* out) {
        if constexpr (ACCESS == ONCE) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
            asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"  // to keep it out of L1 costs 3 to 8% on an H200
#else  // kept out of L1, which then holds weights and tables
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
#endif
                         : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                         : "l"(p));
        } else if constexpr (ACCESS == AGAIN) {
            const uint4 words = __ldg((const uint4*)p);
            out[0] = words.x, out[1] = words.y, out[2] = words.z, out[3] = words.w;
        } else {
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                         : "l"(p)
                         : "memory");
        }
    }
    static FERRYMAN_DEVICE void store(void* p, const u32* in) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(p), "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3])
                     : "memory");
    }
};
template <> struct Memory<8> {
    template <Access ACCESS> static FERRYMAN_DEVICE void load(const void* p, u32* out) {
        if constexpr (ACCESS == WRITTEN) {
            asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "l"(p) : "memory");
        } else {
            const uint2 words = __ldg((const uint2*)p);
            out[0] = words.x, out[1] = words.y;
        }
    }
    static FERRYMAN_DEVICE void store(void* p, const u32* in) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(p), "r"(in[0]), "r"(in[1]) : "memory");
    }
};
template <> struct Memory<4> {
    template <Access ACCESS> static FERRYMAN_DEVICE void load(const void* p, u32* out) {
        if constexpr (ACCESS == WRITTEN) asm volatile("ld.global.u32 %0, [%1];" : "=r"(out[0]) : "l"(p) : "memory");
        else out[0] = __ldg((const u32*)p);
    }
    static FERRYMAN_DEVICE void store(void* p, const u32* in) {
        asm volatile("st.global.u32 [%0], %1;" : : "l"(p), "r"(in[0]) : "memory");
    }
};
template <> struct Memory<2> {
    template <Access ACCESS> static FERRYMAN_DEVICE void load(const void* p, u32* out) {
        u16 half;
        if constexpr (ACCESS == WRITTEN) asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(p) : "memory");
        else half = __ldg((const u16*)p);
        out[0] = half;
    }
    static FERRYMAN_DEVICE void store(void* p, const u32* in) {
        asm volatile("st.global.u16 [%0], %1;" : : "l"(p), "h"((u16)in[0]) : "memory");
    }
};
}  // namespace platform
#endif

// ------------------------------------------------------------------------------------------------ order

// Waits for the kernel before this one in its stream, whose writes are then seen, and lets the next one's blocks start
// once all of these have. A kernel whose unit is `overlapping` begins with it: its blocks may have been started while the
// kernel before still ran. To say it in every block costs where blocks have little to do: an H200 starts one in 1.35 ns
// rather than 0.83.
FERRYMAN_DEVICE void after_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" : : : "memory");
#endif
}
// The same, giving `lane` back: what is read at an address that follows from it cannot be moved above the wait, which a
// compiler might do with memory that is known to be read-only (`AGAIN`).
FERRYMAN_DEVICE int after_previous(int lane) {
    after_previous();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("" : "+r"(lane));
#endif
    return lane;
}

// ------------------------------------------------------------------------------------------ conversions

#if !defined(FERRYMAN_HAS_BF16_PAIR)
FERRYMAN_DEVICE u32 bf16_bits(float value) {
    u32 bits = platform::bits_of(value);
    u32 nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    // The rounding carry would turn a NaN with a full mantissa into -0 or infinity: keep it, quietened.
    return (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : nearest_even;
}
namespace platform {
FERRYMAN_DEVICE u32 bf16_pair(float low, float high) { return bf16_bits(low) | (bf16_bits(high) << 16); }
}  // namespace platform
#endif

template <typename T> struct Storage;
template <> struct Storage<bf16> {
    static FERRYMAN_DEVICE float low(u32 pair) { return platform::float_of(pair << 16); }
    static FERRYMAN_DEVICE float high(u32 pair) { return platform::float_of(pair & 0xffff0000u); }
    static FERRYMAN_DEVICE u32 pair(float low, float high) { return platform::bf16_pair(low, high); }
};
template <> struct Storage<f16> {
    static FERRYMAN_DEVICE float low(u32 pair) { return platform::half_to_float(pair & 0xffffu); }
    static FERRYMAN_DEVICE float high(u32 pair) { return platform::half_to_float(pair >> 16); }
    static FERRYMAN_DEVICE u32 pair(float low, float high) { return platform::half_pair(low, high); }
};

// ------------------------------------------------------------------------------------------- arithmetic

constexpr float LOG2_E = 1.44269504089f;

// exp(v) for v <= 0, or NaN, for a result that is rounded to T. float takes expf. For 16-bit types a scaled exp2 takes
// a third of the instructions, of which kernels at full bandwidth have none to spare (5 elements per SM and clock on
// H200): its relative error (|v| + 3) * 2^-24 + 2^-22 is below a hundredth of their rounding where |v| < 100, and
// beyond that the result is below 2^-126, where it may become 0.
template <typename T> FERRYMAN_DEVICE float exp_of(float v) {
    if constexpr (sizeof(T) == 4) return platform::exp(v);
    else return platform::quick_exp2(v * LOG2_E);
}

// At the end of a reduction all threads of a row wait, and what is computed there is latency: 1 / sqrt(sum / n + eps) in
// full takes a call of few rows 0.14 us on an H200. These two have no branch. A thread that keeps more than QUICK_WORDS
// takes the full forms: ptxas would move instructions across the quick ones, and spill.
constexpr int QUICK_WORDS = 8;

// a / b for a normal b, off by 1 ulp at most.
template <int WORDS> FERRYMAN_DEVICE float divide(float a, float b) {
    if constexpr (WORDS > QUICK_WORDS) {
        return a / b;
    } else {
        const float inverse = platform::reciprocal(b), quotient = a * inverse;
        const float result = platform::fma(platform::fma(-quotient, b, a), inverse, quotient);
        return result == result ? result : quotient;  // infinity has no remainder
    }
}
template <int WORDS> FERRYMAN_DEVICE float inverse_root(float v) {
    if constexpr (WORDS > QUICK_WORDS) return 1.0f / platform::sqrt(v);
    else return platform::inverse_root(v);
}

// For a, b >= 0. A 64-bit division takes some 100 instructions, a 32-bit one 20.
FERRYMAN_DEVICE void divide(i64 a, i64 b, i64& quotient, i64& remainder) {
    if (((a | b) >> 32) == 0) {
        quotient = (u32)a / (u32)b;
        remainder = (u32)a - (u32)quotient * (u32)b;
    } else {
        quotient = a / b;
        remainder = a - quotient * b;
    }
}

// ------------------------------------------------------------------------------------------------ packs

// V consecutive elements as they lie in memory. A lone 16-bit element sits in the low half of its word.
template <typename T, int V> struct alignas(V * sizeof(T) < 4 ? 4 : V * sizeof(T) < 16 ? V * sizeof(T) : 16) Pack {
    static constexpr int BYTES = V * (int)sizeof(T);
    static constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4;
    u32 word[WORDS];
};
template <int V> struct Pack<none, V> {
    static constexpr int BYTES = 0;
    static constexpr int WORDS = 0;
};

template <typename T> struct is_none { static constexpr bool value = false; };
template <> struct is_none<none> { static constexpr bool value = true; };

template <Access ACCESS, typename T, int V> FERRYMAN_DEVICE void load(Pack<T, V>& pack, const T* p) {
    constexpr int STEP = Pack<T, V>::BYTES < 16 ? Pack<T, V>::BYTES : 16;
#pragma unroll
    for (int at = 0; at < Pack<T, V>::BYTES; at += STEP)
        platform::Memory<STEP>::template load<ACCESS>((const char*)p + at, pack.word + at / 4);
}

template <typename T, int V> FERRYMAN_DEVICE void store(T* p, const Pack<T, V>& pack) {
    constexpr int STEP = Pack<T, V>::BYTES < 16 ? Pack<T, V>::BYTES : 16;
#pragma unroll
    for (int at = 0; at < Pack<T, V>::BYTES; at += STEP)
        platform::Memory<STEP>::store((char*)p + at, pack.word + at / 4);
}

template <typename T, int V> FERRYMAN_DEVICE void zero(Pack<T, V>& pack) {
#pragma unroll
    for (int i = 0; i < Pack<T, V>::WORDS; ++i) pack.word[i] = 0;
}

// Makes the compiler unpack again what it has unpacked before. Without it, it keeps the floats of a whole row alive
// between two passes: twice the registers for 16-bit types (sm_90, softmax of 8 packs: 167 registers, 80 with it).
template <typename T, int V> FERRYMAN_DEVICE void forget(Pack<T, V>& pack) {
#pragma unroll
    for (int i = 0; i < Pack<T, V>::WORDS; ++i) platform::opaque(pack.word[i]);
}

template <typename T, int V> FERRYMAN_DEVICE void unpack(const Pack<T, V>& pack, float (&out)[V]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] = platform::float_of(pack.word[i]);
    } else if constexpr (V == 1) {
        out[0] = Storage<T>::low(pack.word[0]);
    } else {
#pragma unroll
        for (int i = 0; i < V / 2; ++i) {
            out[2 * i] = Storage<T>::low(pack.word[i]);
            out[2 * i + 1] = Storage<T>::high(pack.word[i]);
        }
    }
}

// The one rounding to T, to nearest even.
template <typename T, int V> FERRYMAN_DEVICE void pack(Pack<T, V>& out, const float (&values)[V]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < V; ++i) out.word[i] = platform::bits_of(values[i]);
    } else if constexpr (V == 1) {
        out.word[0] = Storage<T>::pair(values[0], 0.0f);
    } else {
#pragma unroll
        for (int i = 0; i < V / 2; ++i) out.word[i] = Storage<T>::pair(values[2 * i], values[2 * i + 1]);
    }
}

// ------------------------------------------------------------------------------------------- reductions

FERRYMAN_DEVICE float negative_infinity() { return platform::float_of(0xff800000u); }

struct Sum {
    static FERRYMAN_DEVICE float identity() { return 0.0f; }
    static FERRYMAN_DEVICE float join(float a, float b) { return a + b; }
};
struct Max {  // drops a NaN; it returns through the sum that follows every Max here
    static FERRYMAN_DEVICE float identity() { return negative_infinity(); }
    static FERRYMAN_DEVICE float join(float a, float b) { return platform::fmax(a, b); }
};

FERRYMAN_DEVICE constexpr int ceil_power_of_two(int n) {
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

// Over WIDTH neighbouring lanes; every lane gets the same bits, because a + b == b + a.
template <typename R, int WIDTH> FERRYMAN_DEVICE float wave_reduce(float value) {
#pragma unroll
    for (int mask = WIDTH / 2; mask > 0; mask /= 2)
        value = R::join(value, platform::float_of(platform::shuffle_xor(platform::bits_of(value), mask)));
    return value;
}

// One partial per wave, twice: successive reductions alternate, so that each needs a single barrier (a thread
// that overwrites half k has passed the barrier of reduction k + 1, after everyone had read half k).
template <int LANES, int ROWS> struct RowReduction {
    static constexpr int WAVES = LANES > WAVE ? LANES / WAVE : 1;
    static constexpr int SCRATCH = 2 * WAVES * ROWS;
    static_assert(LANES > WAVE ? LANES % WAVE == 0 : (LANES & (LANES - 1)) == 0, "a row is lanes or whole waves");
    float* scratch;
    int half;

    // Over the LANES threads of this thread's row. Every thread of the block must call it.
    template <typename R> FERRYMAN_DEVICE float reduce(float value) {
        value = wave_reduce<R, (LANES < WAVE ? LANES : WAVE)>(value);
        if constexpr (LANES > WAVE) {
            constexpr int WIDTH = ceil_power_of_two(WAVES);
            static_assert(WIDTH <= WAVE, "one wave reads all partials");
            int thread = platform::thread_index(), lane = thread & (WAVE - 1);
            float* partial = scratch + half * (WAVES * ROWS) + thread / LANES * WAVES;
            half ^= 1;
            if (lane == 0) partial[thread % LANES / WAVE] = value;
            platform::barrier();
            int part = lane & (WIDTH - 1);
            value = wave_reduce<R, WIDTH>(part < WAVES ? partial[part] : R::identity());
        }
        return value;
    }
};

}  // namespace ferryman
