// A block of a SIMT kernel, or a cluster of blocks, executed on the CPU: every thread is a fiber, and a fiber runs until it
// meets a barrier or a shuffle. Compiled before portable.cuh (FERRYMAN_EMULATED), whose platform section it stands in for.
//
// It refuses what a GPU may get away with: an access outside the registered buffers, a vector access off its
// alignment, a write to an input, a barrier or shuffle that not all threads reach, a write past dynamic shared memory.
// Shared memory starts as NaN in every block. The order in which threads run is a parameter: a result that depends on
// it misses a barrier. Bulk copies arrive at once in order 0, and only when somebody waits for them in the others: a stage
// that is filled too early, and one that is read without waiting, both change the result.

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace emulation {

typedef unsigned int u32;
typedef unsigned long long u64;
constexpr int WAVE_LANES = FERRYMAN_WAVE;
constexpr int MOST_THREADS = 1024;
constexpr int MOST_BLOCKS = 8;  // of a cluster
constexpr int MOST_FIBERS = 4096;
constexpr size_t STACK = 96 * 1024;
constexpr size_t GUARD = 16 * 1024;  // bytes after dynamic shared memory that must stay as they are

struct Region {
    const char* begin;
    long long bytes;
    long long writable;
};

struct Gate {  // a meeting point of several fibers
    int arrived = 0, passed = 0;
};

struct Arrival {  // an mbarrier that one arrival and the expected bytes complete
    int arrivals, phase;
    long long bytes;
};

struct Copy {
    char* to;
    const char* from;
    int bytes;
    Arrival* arrival;
};

struct State {
    int threads = 0, cluster = 1, fibers = 0;  // threads: of a block
    int current = 0, alive = 0, position = 0, order = 0;
    int rank() const { return current / threads; }
    long long block = 0, progress = 0;
    ucontext_t start[MOST_FIBERS], back;
    jmp_buf resume[MOST_FIBERS], scheduler;
    bool started[MOST_FIBERS], done[MOST_FIBERS];
    int shuffles[MOST_FIBERS], tickets[MOST_FIBERS];
    u32 exchanged[2][MOST_FIBERS];
    Gate block_gate[MOST_BLOCKS], cluster_gate, wave_gate[MOST_FIBERS / 32];
    std::unique_ptr<char[]> stacks;
    size_t stacked = 0;
    std::vector<char> dynamic;
    size_t dynamic_bytes = 0;  // of a block
    std::vector<std::pair<char*, size_t>> poisoned;  // the first block's part, the bytes of each
    std::vector<Copy> pending;
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
                 state.block + state.rank(), state.current % state.threads, what, p, a, b);
}

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
    state.poisoned.push_back({(char*)p, bytes});
    memset(p, 0xff, bytes * state.cluster);
}

// Where `here`, in this block's static shared memory, lies in that of block `rank`.
inline char* elsewhere(void* here, int rank) {
    if (state.cluster_gate.passed == 0) fail("a neighbour's memory before the cluster's first barrier", here, rank, 0);
    bool left = true;
    for (int t = rank * state.threads; t < (rank + 1) * state.threads; ++t) left = left && state.done[t];
    if (left) fail("a neighbour's memory after it has left", here, rank, 0);
    for (auto& known : state.poisoned) {
        char* own = known.first + state.rank() * known.second;
        if ((char*)here >= own && (char*)here < own + known.second)
            return (char*)here + (rank - state.rank()) * (long long)known.second;
    }
    fail("a neighbour's copy of what is not shared memory", here, rank, 0);
    return (char*)here;
}

inline void complete(Arrival* arrival) {
    if (arrival->arrivals != 0 || arrival->bytes != 0) return;
    arrival->arrivals = 1;
    ++arrival->phase;
    ++state.progress;
}

inline void deliver(const Copy& copy) {
    bool good = true;
    for (int i = 0; i < copy.bytes && good; i += 16) good = allowed(copy.from + i, 16, false);
    if (good) memcpy(copy.to, copy.from, copy.bytes);
    copy.arrival->bytes -= copy.bytes;
    complete(copy.arrival);
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
inline void run_cluster() {
    const int order = state.order;
    state.alive = state.fibers;
    state.cluster_gate = Gate();
    for (Gate& g : state.block_gate) g = Gate();
    for (Gate& g : state.wave_gate) g = Gate();
    state.poisoned.clear();
    state.pending.clear();
    for (int t = 0; t < state.fibers; ++t) {
        state.started[t] = state.done[t] = false;
        state.shuffles[t] = 0;
        getcontext(&state.start[t]);
        state.start[t].uc_stack.ss_sp = state.stacks.get() + t * STACK;
        state.start[t].uc_stack.ss_size = STACK;
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
            fail("deadlock: a barrier or shuffle that not all threads reach", nullptr, state.alive, 0);
    }
}

inline void* dynamic_shared() {
    return (void*)(((u64)state.dynamic.data() + 15) / 16 * 16 + state.rank() * state.dynamic_bytes);
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
    state.threads = threads, state.cluster = cluster, state.fibers = threads * cluster, state.order = order;
    state.regions = regions, state.region_count = region_count;
    state.error[0] = 0;
    if (threads > MOST_THREADS) return "the emulation takes at most 1024 threads";
    if (cluster > MOST_BLOCKS || state.fibers > MOST_FIBERS) return "the emulation takes at most 4096 threads a cluster";
    if (cluster > 1 && threads % WAVE_LANES != 0) return "blocks of a cluster are whole waves";
    if (grid % cluster != 0) return "the grid is no multiple of the cluster";
    if (state.stacked < state.fibers * STACK) {
        state.stacked = state.fibers * STACK;
        state.stacks.reset(new char[state.stacked]);
    }
    state.context = &context;
    state.body = [](void* p) {
        Context* c = (Context*)p;
        call(c->kernel, c->args, std::make_index_sequence<sizeof...(A)>());
    };
    state.dynamic_bytes = (shared + GUARD + 15) / 16 * 16;
    state.dynamic.assign(state.dynamic_bytes * cluster + 16, (char)0xff);
    for (state.block = 0; state.block < grid && state.error[0] == 0; state.block += cluster) {
        memset(state.dynamic.data(), 0xff, state.dynamic.size());
        run_cluster();
        for (state.current = 0; state.current < state.fibers; state.current += threads) {
            const char* end = (const char*)dynamic_shared() + shared;
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
#define FERRYMAN_SHARED(type, name, count)                \
    static type name##_of[emulation::MOST_BLOCKS][count]; \
    type* const name = name##_of[emulation::state.rank()]; \
    emulation::poison(name##_of, sizeof name##_of[0])
#define FERRYMAN_DYNAMIC_SHARED(type, name) type* name = (type*)emulation::dynamic_shared()
#define FERRYMAN_EMULATE(name)                                                                                   \
    extern "C" const char* run_##name(long long grid, int threads, long long shared, const emulation::u64* args, \
                                      const emulation::Region* regions, int count, int order, int cluster) {     \
        return emulation::run(&name, grid, threads, shared, args, regions, count, order, cluster);               \
    }

namespace ferryman {
enum Access : int;
namespace platform {
typedef unsigned int u32;
struct alignas(16) words4 {
    u32 x, y, z, w;
};
inline int thread_index() { return emulation::state.current % emulation::state.threads; }
inline long long block_index() { return emulation::state.block + emulation::state.rank(); }
inline void barrier() {
    emulation::meet(emulation::state.block_gate[emulation::state.rank()], emulation::state.threads);
}

inline void wave_meet() {
    auto& s = emulation::state;
    const int wave = s.current / emulation::WAVE_LANES, left = s.fibers - wave * emulation::WAVE_LANES;
    emulation::meet(s.wave_gate[wave], left < emulation::WAVE_LANES ? left : emulation::WAVE_LANES);
}

inline int cluster_rank() { return emulation::state.rank(); }
inline void cluster_arrive() {
    auto& s = emulation::state;
    s.tickets[s.current] = s.cluster_gate.passed;
    if (++s.cluster_gate.arrived < s.fibers) return;
    s.cluster_gate.arrived = 0;
    ++s.cluster_gate.passed;
    ++s.progress;
}
inline void cluster_wait() {
    auto& s = emulation::state;
    while (s.cluster_gate.passed == s.tickets[s.current]) emulation::yield();
}
typedef emulation::Arrival Arrival;
inline void arrival_begin(Arrival* arrival) { *arrival = Arrival{1, 0, 0}; }
inline void arrival_publish() {}
inline void arrival_expect(Arrival* arrival, u32 bytes) {
    if (--arrival->arrivals != 0) emulation::fail("a stage is requested twice", arrival, arrival->arrivals, bytes);
    arrival->bytes += bytes;
    emulation::complete(arrival);
}
inline void copy_to_shared(void* to, const void* from, u32 bytes, Arrival* arrival) {
    emulation::Copy copy{(char*)to, (const char*)from, (int)bytes, arrival};
    if ((unsigned long long)to % 16 != 0 || bytes % 16 != 0) emulation::fail("misaligned copy", to, bytes, 0);
    if (emulation::state.order == 0) emulation::deliver(copy);
    else emulation::state.pending.push_back(copy);
}
inline void cluster_post(float* here, int rank, float value, Arrival* arrival) {
    *(float*)emulation::elsewhere(here, rank) = value;
    Arrival* there = (Arrival*)emulation::elsewhere(arrival, rank);
    there->bytes -= 4;
    emulation::complete(there);
}
inline void cluster_post(float* here, int rank, const float (&four)[4], Arrival* arrival) {
    if ((unsigned long long)here % 16 != 0) emulation::fail("misaligned store", here, 16, rank);
    for (int i = 0; i < 4; ++i) cluster_post(here + i, rank, four[i], arrival);
}
inline void prefetch(const void* p, int bytes) {
    if (bytes <= 0 || bytes % 16 != 0) return emulation::fail("prefetch of no whole words", p, bytes, 0);
    for (int i = 0; i < bytes; i += 16) emulation::allowed((const char*)p + i, 16, false);
}
inline u32 take_number(u32* counter) { return emulation::allowed(counter, 4, true) ? (*counter)++ : 0; }
inline void arrival_wait(Arrival* arrival, u32 parity) {
    auto& s = emulation::state;
    while ((u32)(arrival->phase & 1) == parity) {
        auto waiting = std::move(s.pending);
        s.pending.clear();
        for (auto& copy : waiting) {
            if (copy.arrival == arrival) emulation::deliver(copy);
            else s.pending.push_back(copy);
        }
        if ((u32)(arrival->phase & 1) == parity) emulation::yield();
    }
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
inline float sqrt(float v) { return std::sqrt(v); }
inline float inverse_root(float v) { return 1.0f / std::sqrt(v); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
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
