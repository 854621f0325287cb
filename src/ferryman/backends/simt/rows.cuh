// Row operations: one row at a time is read once from memory, kept packed on the chip, reduced, and written.
//
// LANES threads share a row (part of a wave, or whole waves), ROWS rows share a block. Each thread holds PACKS
// packs of V elements in registers. Where blocks take several rows (`AHEAD`), the next row is loaded while this one is
// written, into the registers that become free: loads stay in flight. FIT says how n relates to that capacity:
//   EXACT   n == LANES * PACKS * V: no bounds checks
//   RAGGED  n < capacity
//   LONG    n > capacity: the next `slots` packs of each thread live in dynamic shared memory, private to the
//           thread that wrote them; what does not fit there either is read again, through L2, last read first (the
//           most recent lines are the likeliest to be there still).
//   WHOLE   n <= capacity: a row takes one exchange, and L2 is told to fetch the one `slots` further on (whole.cuh)
//
// With CLUSTER > 1 (sm_90 and newer) the blocks of a cluster share a row, each with columns `first` to `end` of it, and
// "capacity" is that of the cluster.
//
// An operation `Op` provides
//   PASSES, INPUTS                       reductions over a row; 1 or 2 tensors
//   HOLD                                 whether prepare reads memory
//   void prepare(n, first, end, lane)    once, before the first row; this block's columns are first to end - 1
//   void begin(row, n)                   a new row
//   void merge(x, residual, column)      INPUTS == 2: makes the row's pack out of both, in x
//   const T* merged()                    INPUTS == 2: where merge left the row in memory
//   void add<PASS>(values)               accumulate V elements
//   void finish<PASS>(reduction)         reduce over the row's threads
//   void emit(pack, column, p)           write V elements; p: register pack, or -1

namespace ferryman {

#define FERRYMAN_ROW_KERNEL(threads, blocks, cluster) FERRYMAN_ROW_KERNEL_##cluster(threads, blocks)
#define FERRYMAN_ROW_KERNEL_1(threads, blocks) FERRYMAN_KERNEL(threads, blocks)
#define FERRYMAN_ROW_KERNEL_2(threads, blocks) FERRYMAN_CLUSTER_KERNEL(threads, blocks, 2)
#define FERRYMAN_ROW_KERNEL_4(threads, blocks) FERRYMAN_CLUSTER_KERNEL(threads, blocks, 4)
#define FERRYMAN_ROW_KERNEL_8(threads, blocks) FERRYMAN_CLUSTER_KERNEL(threads, blocks, 8)

enum Fit { EXACT, RAGGED, LONG, WHOLE };

struct RowInput {
    const void* data;
    i64 stride;  // elements from row to row
};

template <typename T, int V_, int LANES_, int ROWS_, int PACKS_, Fit FIT_, int CLUSTER_> struct RowLayout {
    typedef T Type;
    static constexpr int V = V_, LANES = LANES_, ROWS = ROWS_, PACKS = PACKS_;
    static constexpr Fit FIT = FIT_;
    static constexpr int CLUSTER = CLUSTER_;
    static constexpr int THREADS = LANES * ROWS;
    // Four loads of 16 bytes in flight per thread cover the latency where registers do not already.
    static constexpr int BATCH = 4;
    static constexpr int WORDS = Pack<T, V>::WORDS * PACKS;
    static_assert(THREADS <= 1024, "a block has at most 1024 threads");
    static_assert(CLUSTER == 1 || (ROWS == 1 && FIT != LONG), "a cluster takes one row at a time, in registers");
};

// What a row's threads reduce with, and which part of the row a block takes. whole.cuh has the forms of a cluster.
template <typename L, int CLUSTER = L::CLUSTER> struct Share;
template <typename L> struct Share<L, 1> {
    typedef RowReduction<L::LANES, L::ROWS> Reduction;
    typedef float Partial;
    static constexpr int SCRATCH = Reduction::SCRATCH;
    static FERRYMAN_DEVICE int rank() { return 0; }
    static FERRYMAN_DEVICE Reduction begin(Partial* scratch) { return Reduction{scratch, 0}; }
    static FERRYMAN_DEVICE void meet() {}  // before the first reduction
};

// Columns that a block of a cluster takes: whole packs, and whole lines of 128 bytes where packs are vectors.
template <typename L> FERRYMAN_DEVICE int columns_of_block(i64 n) {
    if constexpr (L::CLUSTER == 1) return (int)n;
    constexpr int GRAIN = 8;
    int packs = (int)((n + L::V - 1) / L::V);
    return (packs + L::CLUSTER * GRAIN - 1) / (L::CLUSTER * GRAIN) * GRAIN * L::V;
}

template <typename L, typename Op> struct RowDriver {
    typedef typename L::Type T;
    typedef Pack<T, L::V> P;
    typedef typename Share<L>::Reduction Reduction;

    Op& op;
    RowInput x, residual;
    i64 rows, n;
    int slots;
    P* shared;  // slots * THREADS packs
    int lane;
    int first, end;  // this block's columns of a row that is not LONG

    // Register packs are all inside a LONG row.
    FERRYMAN_DEVICE bool inside(int column) const { return L::FIT != RAGGED || column < end; }
    FERRYMAN_DEVICE int column_of(int p) const { return first + (p * L::LANES + lane) * L::V; }
    FERRYMAN_DEVICE const T* at(const RowInput& in, i64 row, i64 column) const {
        return (const T*)in.data + row * in.stride + column;
    }
    FERRYMAN_DEVICE P& slot(int k) const { return shared[k * L::THREADS + platform::thread_index()]; }

    template <int PASS> FERRYMAN_DEVICE void add(const P& pack) {
        float values[L::V];
        unpack(pack, values);
        op.template add<PASS>(values);
    }

    FERRYMAN_DEVICE void fetch(P& pack, const RowInput& in, i64 row, bool wanted, int column) const {
        if (wanted) load<ONCE>(pack, at(in, row, column));
        else zero(pack);
    }

    // The packs of a LONG row that live in memory: BATCH at a time, all loaded before the first is used.
    template <int PASS, bool EMIT> FERRYMAN_DEVICE void stream(i64 row) {
        i64 first = L::PACKS + slots;
        i64 end = (n + L::LANES * L::V - 1) / (L::LANES * L::V);
        i64 batches = end > first ? (end - first + L::BATCH - 1) / L::BATCH : 0;
        for (i64 b = 0; b < batches; ++b) {
            i64 p0 = first + (EMIT ? batches - 1 - b : b) * L::BATCH;
            P pack[L::BATCH], other[Op::INPUTS == 2 ? L::BATCH : 1];
#pragma unroll
            for (int j = 0; j < L::BATCH; ++j) {
                i64 column = ((p0 + j) * L::LANES + lane) * L::V;
                if (column >= n) continue;
                if constexpr (Op::INPUTS == 2 && (EMIT || PASS > 0)) {
                    load<WRITTEN>(pack[j], op.merged() + column);
                } else {
                    load<AGAIN>(pack[j], at(x, row, column));
                    if constexpr (Op::INPUTS == 2) load<ONCE>(other[j], at(residual, row, column));
                }
            }
#pragma unroll
            for (int j = 0; j < L::BATCH; ++j) {
                i64 column = ((p0 + j) * L::LANES + lane) * L::V;
                if (column >= n) continue;
                if constexpr (EMIT) {
                    op.emit(pack[j], column, -1);
                } else {
                    if constexpr (Op::INPUTS == 2 && PASS == 0) op.merge(pack[j], other[j], column);
                    add<PASS>(pack[j]);
                }
            }
        }
    }

    template <int PASS> FERRYMAN_DEVICE void reduce(P (&held)[L::PACKS], i64 row, bool live, Reduction& reduction) {
        if (live) {
#pragma unroll
            for (int p = 0; p < L::PACKS; ++p)
                if (inside(column_of(p))) add<PASS>(held[p]);
            if constexpr (L::FIT == LONG) {
                for (int k = 0; k < slots; ++k)
                    if (column_of(L::PACKS + k) < n) add<PASS>(slot(k));
                stream<PASS, false>(row);
            }
        }
        op.template finish<PASS>(reduction);
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p) forget(held[p]);
        if constexpr (PASS + 1 < Op::PASSES) reduce<PASS + 1>(held, row, live, reduction);
    }

    FERRYMAN_DEVICE void fetch_register(P& held, P& other, i64 row, bool live, int p) const {
        int column = column_of(p);
        bool wanted = live && inside(column);
        fetch(held, x, row, wanted, column);
        if constexpr (Op::INPUTS == 2) fetch(other, residual, row, wanted, column);
    }

    // Writes BATCH slots of `row` from number k (`emit`), and fills them with those of `next` (`more`).
    FERRYMAN_DEVICE void turn_slots(int k, bool emit, i64 next, bool more) {
        P pack[L::BATCH];
#pragma unroll
        for (int j = 0; j < L::BATCH; ++j) {
            int column = column_of(L::PACKS + k + j);
            fetch(pack[j], x, next, more && k + j < slots && column < n, column);
        }
#pragma unroll
        for (int j = 0; j < L::BATCH; ++j) {
            int column = column_of(L::PACKS + k + j);
            if (k + j >= slots || column >= n) continue;
            if (emit) op.emit(slot(k + j), column, -1);
            slot(k + j) = pack[j];
        }
    }

    // Whether a block takes several rows, so that loading the next one early pays (`resident` in rows.py).
    static constexpr bool AHEAD = L::FIT == LONG || L::WORDS * Op::INPUTS > 16;

    FERRYMAN_DEVICE void run(i64 blocks, typename Share<L>::Partial* scratch) {
        Reduction reduction = Share<L>::begin(scratch);
        const i64 step = blocks / L::CLUSTER * L::ROWS;
        i64 base = platform::block_index() / L::CLUSTER * L::ROWS;  // the same for the whole block, so that barriers are met
        i64 row = base + platform::thread_index() / L::LANES;
        P held[L::PACKS], other[Op::INPUTS == 2 ? L::PACKS : 1];
#pragma unroll
        for (int p = 0; p < L::PACKS; ++p)
            fetch_register(held[p], other[Op::INPUTS == 2 ? p : 0], row, row < rows, p);
        if constexpr (L::FIT == LONG)
            for (int k = 0; k < slots; k += L::BATCH) turn_slots(k, false, row, row < rows);
        op.prepare(n, first, end, lane);
        Share<L>::meet();
        for (; base < rows; base += step, row += step) {
            const bool live = L::ROWS == 1 || row < rows, more = row + step < rows;
            op.begin(row, n);
            if constexpr (Op::INPUTS == 2) {
#pragma unroll
                for (int p = 0; p < L::PACKS; ++p)
                    if (live && inside(column_of(p))) op.merge(held[p], other[p], column_of(p));
            }
            reduce<0>(held, row, live, reduction);
            if constexpr (L::FIT == LONG) {
                if (live) stream<Op::PASSES - 1, true>(row);
                for (int k = 0; k < slots; k += L::BATCH) turn_slots(k, live, row + step, more);
            }
#pragma unroll
            for (int p = 0; p < L::PACKS; ++p) {
                if (live && inside(column_of(p))) op.emit(held[p], column_of(p), p);
                if (AHEAD && more) fetch_register(held[p], other[Op::INPUTS == 2 ? p : 0], row + step, true, p);
            }
            if constexpr (!AHEAD) {
                if (!more) break;  // of a row's lanes, together: rows that share a block share no barrier
#pragma unroll
                for (int p = 0; p < L::PACKS; ++p)
                    fetch_register(held[p], other[Op::INPUTS == 2 ? p : 0], row + step, true, p);
            }
        }
    }
};

template <typename L, typename Op, Fit FIT = L::FIT> struct DriverOf { typedef RowDriver<L, Op> Type; };

template <typename L, typename Op>
FERRYMAN_DEVICE void for_each_row(Op& op, RowInput x, RowInput residual, i64 rows, i64 n, int slots, i64 blocks) {
    typedef Pack<typename L::Type, L::V> P;
    FERRYMAN_SHARED(typename Share<L>::Partial, scratch, (Share<L>::SCRATCH));
    P* shared = nullptr;
    if constexpr (L::FIT == LONG || L::FIT == WHOLE) {
        FERRYMAN_DYNAMIC_SHARED(platform::words4, dynamic);
        shared = (P*)dynamic;
    }
    int columns = columns_of_block<L>(n), first = Share<L>::rank() * columns;
    int end = first + columns < (int)n ? first + columns : (int)n;
    int lane = platform::thread_index() % L::LANES;
    // Where weights are read at once, or soon. The others read them after a reduction, and have no register to spare.
    if constexpr (Op::HOLD || L::WORDS <= QUICK_WORDS) lane = after_previous(lane);
    else after_previous();
    typename DriverOf<L, Op>::Type driver{op, x, residual, rows, n, slots, shared, lane, first, end};
    driver.run(blocks, scratch);
}

}  // namespace ferryman
