// Gradients of rms_norm, add_rms_norm and layer_norm over wide rows, a row to the blocks of a cluster (sm_90 and newer):
// each tensor is read from memory once. After `whole.cuh`.
//
// The gradients of weight and bias are sums over rows, so clusters stay, and every thread keeps the sums of its columns
// in registers. A wave works alone: it has its columns of the next rows copied into a ring of its own in shared memory,
// STAGES rows deep, and meets the others of the cluster once a row, where it posts its part of the row's sums. With LAG
// it takes the sums of the row after before it waits for those of a row, so that nothing waits for the exchange.

namespace ferryman {

// Over a wave, of two or four values at once: a lane is left with the sum of value number `lane * COUNT / WAVE`. That takes 5
// or 6 shuffles rather than 10 or 20.
FERRYMAN_DEVICE float other_lane(float value, int mask) {
    return platform::float_of(platform::shuffle_xor(platform::bits_of(value), mask));
}
template <int WIDTH> FERRYMAN_DEVICE float sum_of_pair(float a, float b, int lane) {  // over WIDTH lanes
    const bool upper = (lane & (WIDTH / 2)) != 0;
    const float mine = (upper ? b : a) + other_lane(upper ? a : b, WIDTH / 2);
    return wave_reduce<Sum, WIDTH / 2>(mine);
}
FERRYMAN_DEVICE float wave_sums(const float (&v)[2], int lane) { return sum_of_pair<WAVE>(v[0], v[1], lane); }
FERRYMAN_DEVICE float wave_sums(const float (&v)[4], int lane) {
    const bool upper = (lane & (WAVE / 2)) != 0;
    const float a = (upper ? v[2] : v[0]) + other_lane(upper ? v[0] : v[2], WAVE / 2);
    const float b = (upper ? v[3] : v[1]) + other_lane(upper ? v[1] : v[3], WAVE / 2);
    return sum_of_pair<WAVE / 2>(a, b, lane);
}
// Two values, to all lanes.
FERRYMAN_DEVICE void wave_sum_both(float& a, float& b, int lane) {
    const float mine = sum_of_pair<WAVE>(a, b, lane), other = other_lane(mine, WAVE / 2);
    const bool upper = (lane & (WAVE / 2)) != 0;
    a = upper ? other : mine, b = upper ? mine : other;
}

struct Scales {
    float shift, scale, inner, offset;  // x^ = x * scale + shift; inner: mean of g w x^, offset: mean of g w
};

template <typename T_, typename W_, bool CENTRED_, bool BIASED_, bool ADDED_, int LANES_, int PACKS_, int STAGES_,
          int LAG_, int HELD_, bool EXACT_, int CLUSTER_>
struct NormBackwardLayout {
    typedef T_ T;
    typedef W_ W;
    static constexpr bool CENTRED = CENTRED_, BIASED = BIASED_, ADDED = ADDED_, WEIGHTED = !is_none<W>::value;
    static constexpr int LANES = LANES_, PACKS = PACKS_, STAGES = STAGES_, LAG = LAG_, CLUSTER = CLUSTER_;
    static constexpr int HELD = WEIGHTED ? HELD_ : 0;  // packs of weights in registers; the others in shared memory
    static constexpr int V = 16 / (int)sizeof(T), WAVES = LANES / WAVE, PARTS = WAVES * CLUSTER;
    static constexpr int TENSORS = ADDED ? 3 : 2;
    static constexpr int SLICE = PACKS * WAVE;       // packs of a wave and tensor
    static constexpr int COLUMNS = SLICE * V;        // of a wave
    static constexpr bool EXACT = EXACT_;            // all waves have so many
    // What a wave posts. rms_norm: sum x^2, sum g w x. layer_norm: sum x, sum (x - m)^2, sum g w, sum g w (x - m), where m
    // is the wave's own mean.
    static constexpr int SUMS = CENTRED ? 4 : 2;
    static_assert(LANES % WAVE == 0 && LAG <= 1 && STAGES > LAG, "");
};

template <typename L> struct NormBackward {
    typedef typename L::T T;
    typedef typename L::W W;
    typedef Pack<T, L::V> P;
    typedef Pack<W, L::V> Q;
    static constexpr int V = L::V, PACKS = L::PACKS;

    RowInput grad, x, extra;
    T* out;
    i64 n;
    int rows, step;  // rows as wide as these are fewer than 2^31 in any memory
    float eps, count;
    int first, end;            // this block's columns
    int lane, begin, columns;  // this wave's columns of a row: `begin` on; those of a thread are V apart
    int live;                  // packs of this thread that lie in the row
    P* ring;                   // of this wave
    Q* weights;                // likewise
    Q held[L::HELD > 0 ? L::HELD : 1];
    platform::Arrival* arrivals;  // of this wave: one a stage, one for the weights
    platform::Arrival* exchange;  // of the block: two
    float* sums;                  // 2 * PARTS * SUMS
    float* shares;                // CENTRED: of every part its columns, and their reciprocal
    float weight_sum[L::WEIGHTED ? PACKS * V : 1], bias_sum[L::BIASED ? PACKS * V : 1];

    static FERRYMAN_DEVICE float inverse_of(int columns) { return columns > 0 ? divide<1>(1.0f, (float)columns) : 0.0f; }

    FERRYMAN_DEVICE P* stage_of(int stage) const { return ring + stage * (L::TENSORS * L::SLICE); }

    FERRYMAN_DEVICE void request(int row, int stage) const {
        if (lane != 0 || (!L::EXACT && columns <= 0) || row >= rows) return;
        const u32 bytes = (L::EXACT ? L::COLUMNS : columns) * (u32)sizeof(T);
        P* to = stage_of(stage);
        platform::Arrival* arrival = arrivals + stage;
        platform::arrival_expect(arrival, bytes * L::TENSORS);
        platform::copy_to_shared(to, (const T*)x.data + (i64)row * x.stride + begin, bytes, arrival);
        platform::copy_to_shared(to + L::SLICE, (const T*)grad.data + (i64)row * grad.stride + begin, bytes, arrival);
        if constexpr (L::ADDED)
            platform::copy_to_shared(to + 2 * L::SLICE, (const T*)extra.data + (i64)row * extra.stride + begin, bytes, arrival);
    }
    // Has L2 fetch what the ring will ask for next: 3 to 6% on an H200; one row further, it costs 7 to 20%.
    FERRYMAN_DEVICE void fetch_ahead(int row) const {  // one thread
        if (row >= rows || end <= first) return;
        const int bytes = (end - first) * (int)sizeof(T);
        platform::prefetch((const T*)x.data + (i64)row * x.stride + first, bytes);
        platform::prefetch((const T*)grad.data + (i64)row * grad.stride + first, bytes);
        if constexpr (L::ADDED) platform::prefetch((const T*)extra.data + (i64)row * extra.stride + first, bytes);
    }
    FERRYMAN_DEVICE void request_weights(const W* data) {
        if constexpr (L::WEIGHTED) {
#pragma unroll
            for (int p = 0; p < L::HELD; ++p) {
                if (p < live) load<ONCE>(held[p], data + begin + (p * WAVE + lane) * V);
                else zero(held[p]);
            }
            const int rest = columns - L::HELD * WAVE * V;
            if (lane != 0 || rest <= 0) return;
            const u32 bytes = (u32)rest * (u32)sizeof(W);
            platform::arrival_expect(arrivals + L::STAGES, bytes);
            platform::copy_to_shared(weights, data + begin + L::HELD * WAVE * V, bytes, arrivals + L::STAGES);
        }
    }
    FERRYMAN_DEVICE void weight(float (&w)[V], int p) const {
        if (p < L::HELD) {
            unpack(held[p < L::HELD ? p : 0], w);
        } else {
            const Q pack = weights[(p - L::HELD) * WAVE + lane];
            unpack(pack, w);
        }
    }

    FERRYMAN_DEVICE bool inside(int p) const { return L::EXACT || p < live; }

    // This wave's part of a row's sums, as `wave_sums` leaves them.
    FERRYMAN_DEVICE float gather(int stage, u32 phase) const {
        float squares = 0.0f, products = 0.0f, sum = 0.0f, slope = 0.0f, origin = 0.0f;
        if (L::EXACT || columns > 0) platform::arrival_wait(arrivals + stage, phase);
        const P* from = stage_of(stage) + lane;
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            if (!inside(p)) continue;
            float a[V], g[V];
            const P first = from[p * WAVE], second = from[L::SLICE + p * WAVE];
            unpack(first, a);
            unpack(second, g);
            if constexpr (L::WEIGHTED) {
                float w[V];
                weight(w, p);
#pragma unroll
                for (int i = 0; i < V; ++i) g[i] *= w[i];
            }
            if (L::CENTRED && p == 0) origin = a[0];
#pragma unroll
            for (int i = 0; i < V; ++i) {
                if constexpr (L::CENTRED) {
                    a[i] -= origin;
                    sum += a[i];
                    slope += g[i];
                }
                squares = platform::fma(a[i], a[i], squares);
                products = platform::fma(g[i], a[i], products);
            }
        }
        if constexpr (L::CENTRED) {
            // A thread's sums are about its first element, a wave's about the wave's mean (see WholeLayerNorm).
            const float elements = (float)((L::EXACT ? PACKS : live) * V), all = sum + elements * origin;
            const float middle = wave_reduce<Sum, WAVE>(all) * shares[2 * part() + 1], away = origin - middle;
            const float shift = sum * inverse_of((L::EXACT ? PACKS : live) * V), apart = away + shift;
            const float mine[4] = {all, squares - sum * shift + elements * apart * apart, slope, products + away * slope};
            return wave_sums(mine, lane);
        } else {
            const float mine[2] = {squares, products};
            return wave_sums(mine, lane);
        }
    }

    // Two buffers do: a wave that posts for row k + 2 has had everybody's sums of k + 1, who had read those of k by then.
    FERRYMAN_DEVICE void send(float mine, u32 turn) const {
        constexpr int EACH = WAVE / L::SUMS;  // lanes that have the same sum
        static_assert(L::CLUSTER <= EACH, "a lane posts one sum to one block");
        platform::Arrival* arrival = exchange + (turn & 1);
        if (platform::thread_index() == 0) platform::arrival_expect(arrival, L::PARTS * L::SUMS * 4);
        float* to = sums + ((turn & 1) * L::PARTS + part()) * L::SUMS + lane / EACH;
        if (lane % EACH < L::CLUSTER) platform::cluster_post(to, lane % EACH, mine, arrival);
    }
    FERRYMAN_DEVICE int part() const { return platform::cluster_rank() * L::WAVES + platform::thread_index() / WAVE; }

    FERRYMAN_DEVICE Scales collect(u32 turn) const {
        platform::arrival_wait(exchange + (turn & 1), turn >> 1 & 1);
        const float* all = sums + (turn & 1) * (L::PARTS * L::SUMS);
        constexpr int EACH = (L::PARTS + WAVE - 1) / WAVE;
        float own[EACH][L::SUMS], a = 0.0f, b = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int part = i * WAVE + lane;
            Pack<f32, L::SUMS> pack;
            zero(pack);
            if (L::PARTS % WAVE == 0 || part < L::PARTS) pack = ((const Pack<f32, L::SUMS>*)all)[part];
            unpack(pack, own[i]);
            a += own[i][0], b += own[i][L::CENTRED ? 2 : 1];
        }
        wave_sum_both(a, b, lane);
        Scales found;
        if constexpr (L::CENTRED) {
            const float mean = divide<1>(a, count);
            found.offset = divide<1>(b, count);
            a = b = 0.0f;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int part = i * WAVE + lane;
                if (L::PARTS % WAVE != 0 && part >= L::PARTS) continue;
                const float off = own[i][0] - shares[2 * part] * mean, moved = off * shares[2 * part + 1];
                a += platform::fma(off, moved, own[i][1]);
                b += platform::fma(moved, own[i][2], own[i][3]);
            }
            wave_sum_both(a, b, lane);
            found.scale = inverse_root<1>(divide<1>(a, count) + eps);
            found.shift = -mean * found.scale;
        } else {
            found.offset = found.shift = 0.0f;
            found.scale = inverse_root<1>(divide<1>(a, count) + eps);
        }
        found.inner = divide<1>(b * found.scale, count);
        return found;
    }

    FERRYMAN_DEVICE void emit(int row, int stage, const Scales& with) {
        const P* from = stage_of(stage) + lane;
        T* to = out + (i64)row * n + begin + lane * V;
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            if (!inside(p)) continue;
            float a[V], g[V], w[V], e[V];
            const P first = from[p * WAVE], second = from[L::SLICE + p * WAVE];
            unpack(first, a);
            unpack(second, g);
            if constexpr (L::ADDED) {
                const P third = from[2 * L::SLICE + p * WAVE];
                unpack(third, e);
            }
            if constexpr (L::WEIGHTED) weight(w, p);
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const float unit = L::CENTRED ? platform::fma(a[i], with.scale, with.shift) : a[i] * with.scale;
                if constexpr (L::BIASED) bias_sum[p * V + i] += g[i];
                if constexpr (L::WEIGHTED) weight_sum[p * V + i] = platform::fma(g[i], unit, weight_sum[p * V + i]);
                float value;
                if constexpr (L::CENTRED) value = L::WEIGHTED ? platform::fma(g[i], w[i], -with.offset) : g[i] - with.offset;
                else value = L::WEIGHTED ? g[i] * w[i] : g[i];
                value = platform::fma(-unit, with.inner, value) * with.scale;
                if constexpr (L::ADDED) value += e[i];
                a[i] = value;
            }
            P rounded;
            pack(rounded, a);
            store(to + p * (WAVE * V), rounded);
        }
    }

    FERRYMAN_DEVICE void run(int first) {
        int stage = 0, behind = 0;
        u32 phase = 0, turn = 0;
        auto next = [&] {
            const float mine = gather(stage, phase);
            if (++stage == L::STAGES) stage = 0, phase ^= 1;
            return mine;
        };
        if (L::LAG && first < rows) send(next(), 0);
        for (int row = first; row < rows; row += step, ++turn) {
            float ahead = 0.0f;
            if constexpr (!L::LAG) send(next(), turn);
            const bool more = L::LAG && row + step < rows;
            if (more) ahead = next();
            const Scales with = collect(turn);
            if (more) send(ahead, turn + 1);
            emit(row, behind, with);
            platform::wave_meet();  // all have read
            request(row + L::STAGES * step, behind);
            if (platform::thread_index() == 0) fetch_ahead(row + (L::STAGES + 1) * step);
            if (++behind == L::STAGES) behind = 0;
        }
    }

    FERRYMAN_DEVICE void keep(float* partial, int cluster) const {
        float* to = partial + (i64)cluster * n + begin + lane * V;
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            if (!inside(p)) continue;
            if constexpr (L::WEIGHTED) keep(to + p * (WAVE * V), weight_sum + p * V);
            if constexpr (L::BIASED) keep(to + p * (WAVE * V) + (L::WEIGHTED ? (i64)step * n : 0), bias_sum + p * V);
        }
    }
    static FERRYMAN_DEVICE void keep(float* to, const float* from) {
        float values[V];
#pragma unroll
        for (int i = 0; i < V; ++i) values[i] = from[i];
        Pack<f32, V> packed;
        pack(packed, values);
        store(to, packed);
    }
};

template <typename L>
FERRYMAN_DEVICE void norm_backward(RowInput grad, RowInput x, RowInput extra, const typename L::W* weight,
                                   typename L::T* out, float* partial, i64 rows, i64 n, i64 clusters, float eps) {
    typedef NormBackward<L> Op;
    typedef typename Op::P P;
    typedef typename Op::Q Q;
    typedef Pack<f32, L::SUMS> Sums;
    FERRYMAN_SHARED(Sums, sums, (2 * L::PARTS));
    FERRYMAN_SHARED(float, shares, (L::CENTRED ? 2 * L::PARTS : 1));
    FERRYMAN_SHARED(platform::Arrival, arrivals, (L::WAVES * (L::STAGES + 1) + 2));
    FERRYMAN_DYNAMIC_SHARED(platform::words4, dynamic);
    const int thread = platform::thread_index(), wave = thread / WAVE;
    Op op;
    op.lane = thread & (WAVE - 1);
    op.arrivals = arrivals + wave * (L::STAGES + 1);
    op.exchange = arrivals + L::WAVES * (L::STAGES + 1);
    if (op.lane == 0) {
        for (int i = 0; i <= L::STAGES; ++i) platform::arrival_begin(op.arrivals + i);
        if (thread == 0) {
            platform::arrival_begin(op.exchange);
            platform::arrival_begin(op.exchange + 1);
        }
        platform::arrival_publish();
    }
    platform::cluster_arrive();
    platform::wave_meet();

    constexpr int GRAIN = 8 * L::V;  // a block's columns are whole lines
    const int share = (int)((n + L::CLUSTER * GRAIN - 1) / (L::CLUSTER * GRAIN)) * GRAIN;
    const auto columns_of = [=](int rank, int wave) {
        const int first = rank * share + wave * L::COLUMNS, last = rank * share + share;
        const int end = last < (int)n ? last : (int)n, columns = end - first;
        return columns < 0 ? 0 : columns < L::COLUMNS ? columns : L::COLUMNS;
    };
    op.grad = grad, op.x = x, op.extra = extra, op.out = out;
    op.rows = (int)rows, op.n = n, op.step = (int)clusters, op.eps = eps, op.count = (float)n;
    op.first = platform::cluster_rank() * share, op.end = op.first + share < (int)n ? op.first + share : (int)n;
    op.begin = op.first + wave * L::COLUMNS;
    op.columns = columns_of(platform::cluster_rank(), wave);
    op.live = 0;
#pragma unroll
    for (int p = 0; p < L::PACKS; ++p) op.live += (p * WAVE + op.lane) * L::V < op.columns;
    P* ring = (P*)dynamic;
    op.ring = ring + wave * (L::STAGES * L::TENSORS * L::SLICE);
    op.weights = (Q*)(ring + L::WAVES * (L::STAGES * L::TENSORS * L::SLICE)) + wave * ((L::PACKS - L::HELD) * WAVE);
    op.sums = (float*)sums, op.shares = shares;
#pragma unroll
    for (int i = 0; i < (L::WEIGHTED ? L::PACKS * L::V : 1); ++i) op.weight_sum[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < (L::BIASED ? L::PACKS * L::V : 1); ++i) op.bias_sum[i] = 0.0f;
    if constexpr (L::CENTRED) {
        if (thread < L::PARTS) {
            const int columns = columns_of(thread / L::WAVES, thread % L::WAVES);
            shares[2 * thread] = (float)columns, shares[2 * thread + 1] = Op::inverse_of(columns);
        }
        platform::barrier();
    }

    after_previous();
    const int cluster = (int)(platform::block_index() / L::CLUSTER);
#pragma unroll
    for (int i = 0; i < L::STAGES; ++i) op.request(cluster + i * op.step, i);
    op.request_weights(weight);
    if (L::WEIGHTED && op.columns > L::HELD * WAVE * L::V) platform::arrival_wait(op.arrivals + L::STAGES, 0);
    platform::cluster_wait();
    op.run(cluster);
    if constexpr (L::WEIGHTED || L::BIASED) op.keep(partial, cluster);
}

// The clusters' sums, in a fixed order: a wave takes every WAVES-th, 4 columns a thread, and then one wave adds the waves'.
// `partial`: (clusters, n) for the weight, and the same for the bias; the grid is that of the columns, twice for both.
template <typename W, typename B, int WAVES>
FERRYMAN_DEVICE void sum_clusters(const float* partial, W* for_weight, B* for_bias, i64 clusters, i64 n, i64 blocks) {
    constexpr int V = 4, BATCH = 4;
    FERRYMAN_SHARED(platform::words4, shared, (WAVES * WAVE));
    const int thread = platform::thread_index(), lane = thread & (WAVE - 1), wave = thread / WAVE;
    const bool second = platform::block_index() >= blocks;
    const i64 column = ((platform::block_index() - (second ? blocks : 0)) * WAVE + lane) * V;
    const float* from = partial + column + (second && !is_none<W>::value ? clusters * n : 0);
    after_previous();
    float total[V] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (i64 first = wave; first < clusters; first += WAVES * BATCH) {
        Pack<f32, V> packs[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const i64 cluster = first + i * WAVES;
            if (cluster < clusters && column < n) load<ONCE>(packs[i], from + cluster * n);
            else zero(packs[i]);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            float values[V];
            unpack(packs[i], values);
#pragma unroll
            for (int j = 0; j < V; ++j) total[j] += values[j];
        }
    }
    Pack<f32, V>* const parts = (Pack<f32, V>*)shared;
    pack(parts[thread], total);
    platform::barrier();
    if (wave != 0 || column >= n) return;
#pragma unroll
    for (int i = 1; i < WAVES; ++i) {
        float values[V];
        unpack(parts[i * WAVE + lane], values);
#pragma unroll
        for (int j = 0; j < V; ++j) total[j] += values[j];
    }
    if (second || is_none<W>::value) {
        if constexpr (!is_none<B>::value) {
            Pack<B, V> rounded;
            pack(rounded, total);
            store(for_bias + column, rounded);
        }
    } else {
        if constexpr (!is_none<W>::value) {
            Pack<W, V> rounded;
            pack(rounded, total);
            store(for_weight + column, rounded);
        }
    }
}

}  // namespace ferryman

#define FERRYMAN_NORM_BACKWARD(name, T, W, CENTRED, BIASED, ADDED, LANES, PACKS, STAGES, LAG, HELD, EXACT, CLUSTER) \
    FERRYMAN_CLUSTER_KERNEL(LANES, 1, CLUSTER)                                                                            \
    void name(const ferryman::T* grad, ferryman::i64 grad_stride, const ferryman::T* x, ferryman::i64 x_stride,            \
              const ferryman::T* extra, ferryman::i64 extra_stride, const ferryman::W* weight, ferryman::T* out,           \
              float* partial, ferryman::i64 rows, ferryman::i64 n, ferryman::i64 clusters, float eps) {                    \
        using namespace ferryman;                                                                                          \
        norm_backward<NormBackwardLayout<ferryman::T, ferryman::W, CENTRED, BIASED, ADDED, LANES, PACKS, STAGES, LAG,      \
                                         HELD, EXACT, CLUSTER>>(                                                           \
            RowInput{grad, grad_stride}, RowInput{x, x_stride}, RowInput{extra, extra_stride}, weight, out, partial, rows, \
            n, clusters, eps);                                                                                             \
    }

#define FERRYMAN_SUM_CLUSTERS(name, W, B, WAVES)                                                                     \
    FERRYMAN_KERNEL(WAVES * ferryman::WAVE, 1024 / (WAVES * ferryman::WAVE))                                         \
    void name(const float* partial, ferryman::W* for_weight, ferryman::B* for_bias, ferryman::i64 clusters,          \
              ferryman::i64 n, ferryman::i64 blocks) {                                                               \
        ferryman::sum_clusters<ferryman::W, ferryman::B, WAVES>(partial, for_weight, for_bias, clusters, n, blocks); \
    }
