// Cross entropy, a row to a cluster of blocks: every thread keeps its part of the row packed in registers, the cluster
// exchanges one maximum and sum per wave, and the gradient is written over the row from the registers. One read and
// one write of memory, for rows that begin anywhere. And the backward into memory of its own.

namespace ferryman {

// A row as whole packs of 16 bytes on their own addresses, and fewer elements than a pack holds before and after them.
template <typename T> struct Span {
    static constexpr int V = 16 / (int)sizeof(T);
    T* row;
    T* base;      // pack 0: the row's beginning rounded down, to a line if its packs should share lines
    int first;    // the first whole pack
    int packs;    // whole packs
    int head;     // elements before them
    int lone;     // elements before and after them

    // `origin`: of all rows, a multiple of 16; lines are counted from it, so that a layout does not depend on where the
    // tensor lies.
    FERRYMAN_DEVICE Span(T* begin, int n, u64 origin, u64 line) : row(begin) {
        const u64 address = (u64)begin, down = origin + ((address - origin) & ~line);
        head = (int)((0 - address) & 15) / (int)sizeof(T);
        if (head > n) head = n;
        base = (T*)down;
        first = (int)((address - down) / sizeof(T) + head) / V;
        packs = (n - head) / V;
        lone = n - packs * V;
    }
    FERRYMAN_DEVICE bool inside(int pack) const { return (u32)(pack - first) < (u32)packs; }
    FERRYMAN_DEVICE T* at(int pack) const { return base + (i64)pack * V; }  // whole or not
    FERRYMAN_DEVICE int lone_column(int i) const { return i < head ? i : i + packs * V; }
    // The pack of a column, or -1 if it is a lone one.
    FERRYMAN_DEVICE int pack_of(i64 column) const {
        const int after = (int)column - head;
        return after >= 0 && after < packs * V ? first + after / V : -1;
    }
};

FERRYMAN_DEVICE u64 origin_of(const void* x) { return (u64)x & ~(u64)15; }

FERRYMAN_DEVICE float not_a_number() { return platform::float_of(0x7fc00000u); }

// What exp is taken relative to: not an infinity, so that rows of -inf alone sum to 0, and +inf to +inf.
FERRYMAN_DEVICE float shift_of(float maximum) {
    return (platform::bits_of(maximum) & 0x7fffffffu) == 0x7f800000u ? 0.0f : maximum;
}

struct LossRow {
    i64 label;
    bool counted, valid;
    FERRYMAN_DEVICE LossRow(i64 label_, i64 ignored, int n)
        : label(label_), counted(label_ != ignored), valid(label_ >= 0 && label_ < n) {}
};

// What a row's gradient is made with: p * factor - even * factor, and at the label less hot. A row's fate is in its factor,
// NaN where the label is out of range.
struct LossScale {
    float lse, factor, even, hot;
    FERRYMAN_DEVICE LossScale(const LossRow& in, float lse_, float scale, float smoothing, int n) : lse(lse_) {
        factor = in.valid ? scale : not_a_number();
        even = smoothing / (float)n * factor;
        hot = (1.0f - smoothing) * factor;
    }
    template <typename T> FERRYMAN_DEVICE float of(float value) const { return exp_of<T>(value - lse) * factor - even; }
};

template <typename T, int V> FERRYMAN_DEVICE void to_gradient(Pack<T, V>& held, const LossScale& scale, bool hot) {
    float values[V];
    unpack(held, values);
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = scale.of<T>(values[i]);
    if constexpr (V == 1) {
        if (hot) values[0] -= scale.hot;
    }
    pack(held, values);
}

// `facts`: how many rows count (float), and how many rows are done (integer), which a launch before made 0. One block.
FERRYMAN_DEVICE void count_rows(const i64* target, u32* facts, i64 rows, i64 ignored, int threads) {
    FERRYMAN_SHARED(u32, partial, 1024 / WAVE);
    const int thread = platform::thread_index();
    u32 count = 0;
    for (i64 first = 0; first < rows; first += 4 * threads) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i64 row = first + i * threads + thread;
            if (row < rows) count += target[row] != ignored;
        }
    }
#pragma unroll
    for (int mask = WAVE / 2; mask > 0; mask /= 2) count += platform::shuffle_xor(count, mask);
    if ((thread & (WAVE - 1)) == 0) partial[thread / WAVE] = count;
    platform::barrier();
    if (thread != 0) return;
    for (int i = 1; i < threads / WAVE; ++i) count += partial[i];
    facts[0] = platform::bits_of((float)count);
    facts[1] = 0;
}

// The mean, by the block that finished last: the sum's order is that of the rows, whichever block it is.
FERRYMAN_DEVICE void mean_loss(const float* losses, float* loss, i64 rows, float count, float* scratch, int threads) {
    const int thread = platform::thread_index();
    float sum = 0.0f;
    for (i64 first = 0; first < rows; first += 4 * threads) {
        float value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i64 row = first + i * threads + thread;
            value[i] = row < rows ? losses[row] : 0.0f;
        }
        sum += (value[0] + value[1]) + (value[2] + value[3]);
    }
    sum = wave_reduce<Sum, WAVE>(sum);
    platform::barrier();  // the scratch memory is read no more
    if ((thread & (WAVE - 1)) == 0) scratch[thread / WAVE] = sum;
    platform::barrier();
    if (thread != 0) return;
    for (int i = 1; i < threads / WAVE; ++i) sum += scratch[i];
    *loss = sum / count;
}

// Blocks of `waves` waves, of which CLUSTER share a row. EMIT: the gradient goes over the row. `ahead`: how many rows on
// the one lies that L2 is to fetch; 0: none.
template <typename T, int PACKS, int CLUSTER, int MOST_WAVES, bool EMIT>
FERRYMAN_DEVICE void loss_of_rows(T* x, i64 stride, const i64* target, u32* facts, float* losses, float* lse_of,
                                  float* loss, i64 rows, int n, i64 ignored, u64 line, int waves, i64 ahead,
                                  float smoothing) {
    constexpr int V = Span<T>::V, WORDS = Pack<T, V>::WORDS, STEP = WAVE * V;
    constexpr Access ACCESS = EMIT ? WRITTEN : ONCE;
    FERRYMAN_SHARED(platform::words4, shared, (MOST_WAVES * CLUSTER));  // a wave's maximum, sum of exponentials, sum, logit
    FERRYMAN_SHARED(platform::Arrival, arrival, 1);
    FERRYMAN_SHARED(u32, last, 1);
    float* const part = (float*)shared;
    const int thread = platform::thread_index(), lane = thread & (WAVE - 1), parts = CLUSTER * waves;
    if constexpr (CLUSTER > 1) {
        if (thread == 0) {
            platform::arrival_begin(arrival);
            platform::arrival_publish();
            platform::arrival_expect(arrival, parts * 16);
        }
        platform::cluster_arrive();
    }
    const int rank = CLUSTER > 1 ? platform::cluster_rank() : 0, wave = rank * waves + thread / WAVE;
    const i64 row = platform::block_index() / CLUSTER;
    const Span<T> span(x + row * stride, n, origin_of(x), line);

    const i64 label = target[row];
    const float count = platform::float_of(facts[0]);
    const u32 nothing = (u32)(line >> 32);

    // a wave's packs are neighbours
    const int mine = wave * (PACKS * WAVE) + lane;
    T* const place = span.at(mine);
    Pack<T, V> held[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        if (span.inside(mine + p * WAVE)) {
            load<ACCESS>(held[p], (const T*)(place + p * STEP));
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) held[p].word[i] = minus_infinities<T>();
        }
    }
    if (ahead != 0 && thread == (waves - 1) * WAVE && row + ahead < rows) {
        const Span<T> next(x + (row + ahead) * stride, n, origin_of(x), line);
        const int share = waves * PACKS * WAVE, end = next.first + next.packs;
        const int from = rank * share > next.first ? rank * share : next.first;
        const int to = (rank + 1) * share < end ? (rank + 1) * share : end;
        if (from < to) platform::prefetch(next.at(from), (to - from) * 16);
    }
    // the lone elements and the row's loss go to the last wave, which has the fewest packs
    const int from_end = parts * WAVE - 1 - (wave * WAVE + lane);
    const bool has_lone = from_end < span.lone, reports = from_end == 0;
    const int lone_column = span.lone_column(from_end);
    Pack<T, 1> lone;
    lone.word[0] = minus_infinities<T>() & (sizeof(T) == 4 ? 0xffffffffu : 0xffffu);
    if (has_lone) load<ACCESS>(lone, (const T*)(span.row + lone_column));
    float lone_value[1];
    unpack(lone, lone_value);
    u32 largest = held[0].word[0];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) largest = larger<T>(largest, held[p].word[i]);
    }
    float maximum = wave_reduce<Max, WAVE>(platform::fmax(lone_value[0], largest_of<T>(largest)));
    // The label's logit, before any thread writes: for the loss, and for the gradient of the pack's thread. Not before the
    // maximum: ptxas would have every load wait for the label.
    const LossRow in(label + (i64)(nothing & platform::bits_of(maximum)), ignored, n);
    const int hot_pack = in.valid ? span.pack_of(in.label) : -1;
    const bool has_hot = hot_pack >= 0 && (u32)(hot_pack - mine) < PACKS * WAVE && ((hot_pack - mine) & (WAVE - 1)) == 0;
    Pack<T, 1> picked;
    picked.word[0] = 0;
    if (in.valid && (reports || (EMIT && has_hot))) load<ACCESS>(picked, (const T*)(span.row + in.label));

    float shift = shift_of(maximum);
    float sum = exp_of<T>(lone_value[0] - shift);
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        float values[V];
        unpack(held[p], values);
#pragma unroll
        for (int i = 0; i < V; ++i) sum += exp_of<T>(values[i] - shift);
    }
    sum = wave_reduce<Sum, WAVE>(sum);
    float plain = 0.0f;
    if (smoothing != 0.0f) {
        disguise(held, nothing, sum);
        if (has_lone) plain = lone_value[0];
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            if (!span.inside(mine + p * WAVE)) continue;
            float values[V];
            unpack(held[p], values);
#pragma unroll
            for (int i = 0; i < V; ++i) plain += values[i];
        }
        plain = wave_reduce<Sum, WAVE>(plain);
    }

    // What the reporting thread has picked is sent along, so that it has been read before another thread writes there.
    float picked_value[1];
    unpack(picked, picked_value);
    float sent = reports ? picked_value[0] : 0.0f;
    if (wave == parts - 1) sent = wave_reduce<Sum, WAVE>(sent);
    const float mine4[4] = {maximum, sum, plain, sent};
    if constexpr (CLUSTER > 1) {
        platform::cluster_wait();
        if (lane < CLUSTER) platform::cluster_post(part + 4 * wave, lane, mine4, arrival);
        platform::arrival_wait(arrival, 0);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (lane == i) part[4 * wave + i] = mine4[i];
        platform::barrier();
    }

    maximum = negative_infinity();
#pragma unroll 1
    for (int i = lane; i < parts; i += WAVE) maximum = platform::fmax(maximum, part[4 * i]);
    shift = shift_of(wave_reduce<Max, WAVE>(maximum));
    sum = 0.0f;
#pragma unroll 1
    for (int i = lane; i < parts; i += WAVE) {
        const float partial = part[4 * i + 1];
        if (partial != 0.0f) sum += partial * platform::exp(shift_of(part[4 * i]) - shift);
    }
    const float lse = shift + platform::log(wave_reduce<Sum, WAVE>(sum));

    if (reports) {
        float one = lse - (in.valid ? sent : not_a_number());
        if (smoothing != 0.0f) {
            float total = 0.0f;
#pragma unroll 1
            for (int i = 0; i < parts; ++i) total += part[4 * i + 2];
            one = (1.0f - smoothing) * one + smoothing * (lse - total / (float)n);
        }
        losses[row] = in.counted ? one : 0.0f;
        lse_of[row] = lse;
        last[0] = platform::take_number(facts + 1) == (u32)(rows - 1);
    }
    if constexpr (EMIT) {
        if (in.counted) {
            const LossScale scale(in, lse, 1.0f / count, smoothing, n);
            disguise(held, nothing, lse);
#pragma unroll
            for (int p = 0; p < PACKS; ++p) {
                to_gradient(held[p], scale, false);
                if (span.inside(mine + p * WAVE)) store(place + p * STEP, held[p]);
            }
            if (has_lone) {
                to_gradient(lone, scale, in.valid && in.label == lone_column);
                store(span.row + lone_column, lone);
            }
            if (has_hot) {  // over what this thread has just written
                to_gradient(picked, scale, true);
                store(span.row + in.label, picked);
            }
        } else {  // whatever its logits hold
            Pack<T, V> zeros;
            zero(zeros), zero(lone);
#pragma unroll
            for (int p = 0; p < PACKS; ++p)
                if (span.inside(mine + p * WAVE)) store(place + p * STEP, zeros);
            if (has_lone) store(span.row + lone_column, lone);
        }
    }
    if (rank != CLUSTER - 1) return;
    platform::barrier();
    if (last[0]) mean_loss(losses, loss, rows, count, part, waves * WAVE);
}

// The gradient in memory of its own: `chunks` blocks to a row. SAME: its rows lie on the logits' addresses modulo 16.
template <typename T, int PACKS, int THREADS, bool SAME>
FERRYMAN_DEVICE void loss_backward(const float* grad, const T* x, i64 stride, const i64* target, const float* lse_of,
                                   const u32* facts, T* out, int n, i64 ignored, u64 line, i64 chunks, float smoothing) {
    constexpr int V = Span<T>::V, WORDS = Pack<T, V>::WORDS, STEP = THREADS * V;
    i64 row, chunk;
    divide(platform::block_index(), chunks, row, chunk);
    const int thread = platform::thread_index(), mine = (int)chunk * (PACKS * THREADS) + thread;
    const Span<const T> span(x + row * stride, n, origin_of(x), line);
    const T* const place = span.at(mine);
    T* const result = out + row * n;
    const LossRow in(target[row], ignored, n);
    Pack<T, V> held[PACKS];
    Pack<T, 1> one;
    const int last = ((int)(chunks - 1 - chunk) + 1) * THREADS - 1 - thread;  // counted from the row's last thread
    const int lone_column = span.lone_column(last);
    const bool has_lone = last < span.lone;
    if (in.counted) {  // a row that does not count is not read: its gradient is 0 whatever it holds
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            if (span.inside(mine + p * THREADS)) load<ONCE>(held[p], place + p * STEP);
        }
        const LossScale scale(in, lse_of[row], *grad / platform::float_of(facts[0]), smoothing, n);
#pragma unroll
        for (int p = 0; p < PACKS; ++p) to_gradient(held[p], scale, false);
        if (has_lone) {
            load<ONCE>(one, span.row + lone_column);
            to_gradient(one, scale, in.valid && in.label == lone_column);
        }
    } else {
#pragma unroll
        for (int p = 0; p < PACKS; ++p) zero(held[p]);
        zero(one);
    }
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        if (!span.inside(mine + p * THREADS)) continue;
        T* to = result + (place + p * STEP - span.row);
        if constexpr (SAME) {
            store(to, held[p]);
        } else {
            constexpr int PER_WORD = V / WORDS;
#pragma unroll
            for (int i = 0; i < V; ++i) {
                Pack<T, 1> element;
                element.word[0] = held[p].word[i / PER_WORD] >> (PER_WORD == 2 ? i % PER_WORD * 16 : 0);
                store(to + i, element);
            }
        }
    }
    if (has_lone) store(result + lone_column, one);
    const int hot_pack = in.counted && in.valid ? span.pack_of(in.label) : -1;
    if (hot_pack >= mine && hot_pack < mine + PACKS * THREADS && (hot_pack - mine) % THREADS == 0) {
        const LossScale scale(in, lse_of[row], *grad / platform::float_of(facts[0]), smoothing, n);
        load<ONCE>(one, span.row + in.label);
        to_gradient(one, scale, true);
        store(result + in.label, one);  // over what this thread has just written
    }
}

}  // namespace ferryman

#define FERRYMAN_COUNT_ROWS(name)                                                                                    \
    FERRYMAN_KERNEL(1024, 1)                                                                                         \
    void name(const ferryman::i64* target, ferryman::u32* facts, ferryman::i64 rows, ferryman::i64 ignored) {        \
        ferryman::count_rows(target, facts, rows, ignored, 1024);                                                    \
    }

#define FERRYMAN_LOSS(name, T, PACKS, CLUSTER, THREADS, BLOCKS, EMIT)                                                \
    FERRYMAN_CLUSTER_KERNEL(THREADS, BLOCKS, CLUSTER)                                                                \
    void name(ferryman::T* x, ferryman::i64 stride, const ferryman::i64* target, ferryman::u32* facts, float* losses, \
              float* lse, float* loss, ferryman::i64 rows, ferryman::i64 n, ferryman::i64 ignored, ferryman::u64 line, \
              ferryman::i64 waves, ferryman::i64 ahead, float smoothing) {                                           \
        using namespace ferryman;                                                                                    \
        loss_of_rows<ferryman::T, PACKS, CLUSTER, THREADS / WAVE, EMIT>(                                             \
            x, stride, target, facts, losses, lse, loss, rows, (int)n, ignored, line, (int)waves, ahead, smoothing);        \
    }

#define FERRYMAN_LOSS_BACKWARD(name, T, PACKS, THREADS, SAME)                                                         \
    FERRYMAN_KERNEL(THREADS, 1024 / THREADS)                                                                         \
    void name(const float* grad, const ferryman::T* x, ferryman::i64 stride, const ferryman::i64* target,            \
              const float* lse, const ferryman::u32* facts, ferryman::T* out, ferryman::i64 n, ferryman::i64 ignored, \
              ferryman::u64 line, ferryman::i64 chunks, float smoothing) {                                           \
        using namespace ferryman;                                                                                    \
        loss_backward<ferryman::T, PACKS, THREADS, SAME>(grad, x, stride, target, lse, facts, out, (int)n, ignored,  \
                                                         line, chunks, smoothing);                                   \
    }
