// A block of a SIMT kernel, or a cluster of blocks, executed on the CPU: every thread is a fiber, and a fiber runs until it
// meets a barrier, a shuffle or a closed gate. Compiled before portable.cuh (FERRYMAN_EMULATED), whose platform section it stands in for.
//
// It refuses what a GPU may get away with: an access outside the registered buffers, a vector access off its
// alignment, a write to an input, a barrier or shuffle that not all threads reach, a write past dynamic shared memory, a
// write into the shared memory of a block that has not opened its gate or has left.
// Shared memory starts as NaN in every block. The order in which threads run is a parameter: a result that depends on
// it misses a barrier.

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace emulation {

typedef unsigned int u32;
typedef unsigned long long u64;
constexpr int WAVE_LANES = FERRYMAN_WAVE;
constexpr int MOST_THREADS = 1024, MOST_CLUSTER = 8, MOST_FIBERS = 4096;
constexpr size_t STACK = 96 * 1024, CLUSTER_STACK = 32 * 1024;
constexpr size_t GUARD = 16 * 1024;  // bytes after dynamic shared memory that must stay as they are

struct Region {
    const char* begin;
    long long bytes;
    long long writable;
};

struct Gate {  // a meeting point of several fibers
    int arrived = 0, passed = 0;
};

struct Counter {  // what stands in 8 bytes of shared memory for an mbarrier of one arrival
    short open, arrived;
    short bytes;  // come, less announced
    short passed;
};
constexpr short OPEN = 0x5a5a;

struct State {
    int threads = 0, cluster = 1, fibers = 0, current = 0, alive = 0, position = 0;
    long long block = 0, progress = 0;  // block: the cluster's first
    ucontext_t start[MOST_FIBERS], back;
    jmp_buf resume[MOST_FIBERS], scheduler;
    bool started[MOST_FIBERS], done[MOST_FIBERS];
    int shuffles[MOST_FIBERS];
    u32 exchanged[2][MOST_FIBERS];
    int arrivals[MOST_FIBERS];
    Gate block_gate[MOST_CLUSTER], wave_gate[MOST_FIBERS / 32], cluster_gate;
    std::vector<char> stacks, dynamic;
    size_t dynamic_bytes = 0;  // of one block
    std::vector<std::pair<void*, size_t>> poisoned;
    const Region* regions = nullptr;
    int region_count = 0;
    char error[512];
    void (*body)(void*) = nullptr;
    void* context = nullptr;
};
inline State state;

inline void fail(const char* what, const void* p, long long a, long long b) {
    if (state.error[0] == 0)
        snprintf(state.error, sizeof state.error, "block %lld thread %d: %s (%p, %lld, %lld)",
                 state.block + state.current / state.threads, state.current % state.threads, what, p, a, b);
}

inline int rank() { return state.current / state.threads; }

inline void yield() {
    if (_setjmp(state.resume[state.current]) == 0) _longjmp(state.scheduler, 1);
}

inline void meet(Gate& gate, int members) {
    int ticket = gate.passed;
    if (++gate.arrived == members) {
        gate.arrived = 0;
        ++gate.passed;
        ++state.progress;
        return;
    }
    while (gate.passed == ticket) yield();
}

inline bool allowed(const void* p, int bytes, bool write) {
    if ((u64)p % bytes != 0) {
        fail("misaligned access", p, bytes, write);
        return false;
    }
    for (int i = 0; i < state.region_count; ++i) {
        const Region& r = state.regions[i];
        if ((const char*)p < r.begin || (const char*)p + bytes > r.begin + r.bytes) continue;
        if (write && !r.writable) fail("write to an input", p, bytes, i);
        return !write || r.writable;
    }
    fail(write ? "write outside every buffer" : "read outside every buffer", p, bytes, 0);
    return false;
}

inline void poison(void* p, size_t bytes) {
    for (auto& known : state.poisoned)
        if (known.first == p) return;
    state.poisoned.push_back({p, bytes});
    memset(p, 0xff, bytes);
}

inline void enter() {
    state.body(state.context);
    state.done[state.current] = true;
    --state.alive;
    ++state.progress;
    _longjmp(state.scheduler, 1);
}

inline void step() {  // runs the current fiber until it yields or ends
    if (_setjmp(state.scheduler) != 0) return;
    if (state.started[state.current]) _longjmp(state.resume[state.current], 1);
    state.started[state.current] = true;
    setcontext(&state.start[state.current]);
}

inline void run_lanes(int first, int count, bool descending) {
    for (state.position = 0; state.position < count; ++state.position) {
        state.current = first + (descending ? count - 1 - state.position : state.position);
        if (!state.done[state.current]) step();
    }
}

// order 0: all threads in turn. 1: the last wave as far as it gets, then the one before; 2: likewise from the first.
// In 1 and 2 a wave runs ahead of the others by everything that the barriers allow.
inline void run_block(int order) {
    state.alive = state.fibers;
    for (Gate& g : state.block_gate) g = Gate();
    state.cluster_gate = Gate();
    for (Gate& g : state.wave_gate) g = Gate();
    for (auto& known : state.poisoned) memset(known.first, 0xff, known.second);  // others may write before its block begins
    state.poisoned.clear();
    const size_t stack = state.stacks.size() / state.fibers / 16 * 16;
    for (int t = 0; t < state.fibers; ++t) {
        state.started[t] = state.done[t] = false;
        state.shuffles[t] = 0;
        getcontext(&state.start[t]);
        state.start[t].uc_stack.ss_sp = state.stacks.data() + t * stack;
        state.start[t].uc_stack.ss_size = stack;
        state.start[t].uc_link = nullptr;
        makecontext(&state.start[t], enter, 0);
    }
    const int waves = (state.fibers + WAVE_LANES - 1) / WAVE_LANES;
    while (state.alive > 0 && state.error[0] == 0) {
        const long long before = state.progress;
        if (order == 0) run_lanes(0, state.fibers, false);
        for (int w = 0; order != 0 && w < waves; ++w) {
            const int first = (order == 1 ? waves - 1 - w : w) * WAVE_LANES;
            const int lanes = state.fibers - first < WAVE_LANES ? state.fibers - first : WAVE_LANES;
            long long seen;
            do {
                seen = state.progress;
                run_lanes(first, lanes, order == 1);
            } while (state.progress != seen && state.error[0] == 0);
        }
        if (state.progress == before)
            fail("deadlock: a barrier, shuffle or gate that not all threads reach", nullptr, state.alive, 0);
    }
}

inline void* dynamic_of(int rank) {
    return (void*)(((u64)state.dynamic.data() + 15) / 16 * 16 + rank * state.dynamic_bytes);
}

// The place of `p`, in this block's shared memory, in that of block `other`.
inline void* elsewhere(void* p, int other) {
    const char *at = (const char*)p, *dynamic = (const char*)dynamic_of(rank());
    if (other < 0 || other >= state.cluster) fail("a block that the cluster does not have", p, other, state.cluster);
    const long long blocks = other - rank();
    if (at >= dynamic && at < dynamic + state.dynamic_bytes) return (char*)p + blocks * (long long)state.dynamic_bytes;
    for (auto& known : state.poisoned)
        if (at >= (const char*)known.first && at < (const char*)known.first + known.second)
            return (char*)p + blocks * (long long)known.second;
    fail("no shared memory", p, other, 0);
    return p;
}

inline void settle(Counter& gate) {
    if (gate.open != OPEN) return fail("a gate that is not open", &gate, 0, 0);
    ++state.progress;
    if (gate.arrived == 1 && gate.bytes == 0) gate.arrived = 0, ++gate.passed;
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), const u64* slots, std::index_sequence<I...>) {
    auto convert = [](u64 bits, auto* out) { memcpy(out, &bits, sizeof *out); };
    auto get = [&](u64 bits, auto tag) {
        decltype(tag) value;
        convert(bits, &value);
        return value;
    };
    kernel(get(slots[I], A())...);
}

template <typename... A>
const char* run(void (*kernel)(A...), long long grid, int threads, long long shared, const u64* args,
                const Region* regions, int region_count, int order, int cluster) {
    struct Context {
        void (*kernel)(A...);
        const u64* args;
    } context{kernel, args};
    state.threads = threads, state.cluster = cluster, state.fibers = threads * cluster;
    state.regions = regions, state.region_count = region_count;
    state.error[0] = 0;
    if (threads > MOST_THREADS) return "the emulation takes at most 1024 threads";
    if (cluster > MOST_CLUSTER || state.fibers > MOST_FIBERS) return "the emulation takes at most 8 blocks of 512 threads";
    if (cluster > 1 && threads % WAVE_LANES != 0) return "a cluster's blocks are whole waves";
    if (grid % cluster != 0) return "the grid is no multiple of the cluster";
    const size_t stacks = state.fibers * (cluster > 1 ? CLUSTER_STACK : STACK);
    if (state.stacks.size() < stacks) state.stacks.resize(stacks);
    state.context = &context;
    state.body = [](void* p) {
        Context* c = (Context*)p;
        call(c->kernel, c->args, std::make_index_sequence<sizeof...(A)>());
    };
    state.dynamic_bytes = (shared + GUARD + 15) / 16 * 16;
    state.dynamic.assign(state.dynamic_bytes * cluster + 16, (char)0xff);
    for (state.block = 0; state.block < grid && state.error[0] == 0; state.block += cluster) {
        memset(state.dynamic.data(), 0xff, state.dynamic.size());
        run_block(order);
        for (int r = 0; r < cluster; ++r) {
            const char* end = (const char*)dynamic_of(r) + shared;
            for (size_t i = 0; i < GUARD; ++i)
                if (end[i] != (char)0xff) fail("write past dynamic shared memory", end + i, (long long)i, shared);
        }
    }
    return state.error[0] == 0 ? nullptr : state.error;
}

}  // namespace emulation

#define FERRYMAN_DEVICE inline
#define FERRYMAN_KERNEL(threads, blocks) static
#define FERRYMAN_CLUSTER_KERNEL(threads, blocks, size) static
#define FERRYMAN_SHARED(type, name, count)                             \
    alignas(16) static type name##_of[emulation::MOST_CLUSTER][count]; \
    type* const name = name##_of[emulation::rank()];                   \
    emulation::poison(name, sizeof(type) * (count))
#define FERRYMAN_DYNAMIC_SHARED(type, name) type* name = (type*)emulation::dynamic_of(emulation::rank())
#define FERRYMAN_EMULATE(name)                                                                                \
    extern "C" const char* run_##name(long long grid, int threads, long long shared, const emulation::u64* args, \
                                      const emulation::Region* regions, int count, int order, int cluster) {  \
        return emulation::run(&name, grid, threads, shared, args, regions, count, order, cluster);            \
    }

namespace ferryman {
enum Access : int;
namespace platform {
typedef unsigned int u32;
struct alignas(16) words4 {
    u32 x, y, z, w;
};
inline int thread_index() { return emulation::state.current % emulation::state.threads; }
inline long long block_index() { return emulation::state.block + emulation::rank(); }
inline void barrier() { emulation::meet(emulation::state.block_gate[emulation::rank()], emulation::state.threads); }

inline int cluster_rank() { return emulation::rank(); }
inline void cluster_arrive() {
    auto& s = emulation::state;
    s.arrivals[s.current] = s.cluster_gate.passed;
    if (++s.cluster_gate.arrived == s.fibers) s.cluster_gate.arrived = 0, ++s.cluster_gate.passed, ++s.progress;
}
inline void cluster_wait() {
    auto& s = emulation::state;
    while (s.cluster_gate.passed == s.arrivals[s.current]) emulation::yield();
}
inline void gate_open(unsigned long long* gate) {
    static_assert(sizeof(emulation::Counter) == 8, "in the place of an mbarrier");
    *(emulation::Counter*)gate = {emulation::OPEN, 0, 0, 0};
}
inline void gate_expect(unsigned long long* gate, int bytes) {
    auto& counter = *(emulation::Counter*)gate;
    if (counter.arrived++ != 0) emulation::fail("a second arrival at a gate", gate, bytes, 0);
    counter.bytes -= bytes;
    emulation::settle(counter);
}
inline void gate_wait(unsigned long long* gate, int parity) {
    auto& counter = *(volatile emulation::Counter*)gate;
    while ((counter.passed & 1) == parity) emulation::yield();
}
inline void cluster_store(float* here, int rank, float value, unsigned long long* gate) {
    auto& s = emulation::state;
    bool left = true;
    for (int t = rank * s.threads; t < (rank + 1) * s.threads; ++t) left = left && s.done[t];
    if (left) emulation::fail("a store into a block that has left", here, rank, 0);
    *(float*)emulation::elsewhere(here, rank) = value;
    auto& counter = *(emulation::Counter*)emulation::elsewhere(gate, rank);
    counter.bytes += 4;
    emulation::settle(counter);
}
inline void cluster_store(float* here, int rank, const float (&four)[4], unsigned long long* gate) {
    if ((unsigned long long)here % 16 != 0) emulation::fail("misaligned store", here, 16, rank);
    for (int i = 0; i < 4; ++i) cluster_store(here + i, rank, four[i], gate);
}
inline void prefetch(const void* p, int bytes) {
    if (bytes <= 0 || bytes % 16 != 0) return emulation::fail("prefetch of no whole words", p, bytes, 0);
    for (int i = 0; i < bytes; i += 16) emulation::allowed((const char*)p + i, 16, false);
}
inline u32 take_number(u32* counter) {
    if (!emulation::allowed(counter, 4, true)) return 0;
    return (*counter)++;
}
inline u32 shuffle_xor(u32 value, int mask) {
    auto& s = emulation::state;
    int thread = s.current, wave = thread / emulation::WAVE_LANES, first = wave * emulation::WAVE_LANES;
    int lanes = s.fibers - first < emulation::WAVE_LANES ? s.fibers - first : emulation::WAVE_LANES;
    // two buffers: nobody starts exchange k + 2 before all have read exchange k
    u32* slots = s.exchanged[s.shuffles[thread]++ & 1];
    slots[thread] = value;
    emulation::meet(s.wave_gate[wave], lanes);
    int other = (thread - first) ^ mask;
    if (other >= lanes) emulation::fail("shuffle from a lane that does not exist", nullptr, other, lanes);
    return other < lanes ? slots[first + other] : 0;
}
inline u32 bits_of(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline void opaque(u32&) {}
inline float exp(float v) { return std::exp(v); }
inline float log(float v) { return std::log(v); }
inline float quick_exp2(float v) {
    float result = std::exp2(v);
    return result < 1.1754944e-38f ? 0.0f : result;
}
inline float reciprocal(float v) { return 1.0f / v; }
inline float erfc(float v) { return std::erfc(v); }
inline float sqrt(float v) { return std::sqrt(v); }
inline float fmax(float a, float b) { return std::fmax(a, b); }

inline float half_to_float(u32 bits) {
    u32 sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, mantissa = bits & 0x3ffu;
    if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa << 13));
    float magnitude = std::ldexp((float)(exponent == 0 ? mantissa : mantissa | 0x400u), (exponent == 0 ? 1 : (int)exponent) - 25);
    return float_of(sign | bits_of(magnitude));
}
inline u32 half_bits(float value) {
    u32 sign = bits_of(value) >> 16 & 0x8000u;
    float magnitude = std::fabs(value);
    if (magnitude != magnitude) return sign | 0x7e00u;
    if (magnitude >= 65520.0f) return sign | 0x7c00u;
    int exponent;
    std::frexp(magnitude, &exponent);
    int scale = exponent - 11 < -24 ? -24 : exponent - 11;  // the last bit's weight; subnormals share 2^-24
    u32 units = (u32)std::nearbyint(std::ldexp(magnitude, -scale));
    if (units == 2048) units = 1024, ++scale;
    return sign | (units < 1024 ? units : (u32)(scale + 25) << 10 | (units & 0x3ffu));
}
inline u32 half_pair(float low, float high) { return half_bits(low) | half_bits(high) << 16; }

template <int BYTES> struct Memory {
    template <Access ACCESS> static void load(const void* p, u32* out) {
        memset(out, 0, BYTES < 4 ? 4 : BYTES);
        if (emulation::allowed(p, BYTES, false)) memcpy(out, p, BYTES);
    }
    static void store(void* p, const u32* in) {
        if (emulation::allowed(p, BYTES, true)) memcpy(p, in, BYTES);
    }
};
}  // namespace platform
}  // namespace ferryman
