// Rows of a table by index: one read and one write of what is asked for. An id outside the table gives NaN.

namespace ferryman {

template <typename T> struct NotANumber { static constexpr u32 word = 0x7fc07fc0u; };
template <> struct NotANumber<f16> { static constexpr u32 word = 0x7e007e00u; };
template <> struct NotANumber<f32> { static constexpr u32 word = 0x7fc00000u; };

struct Table {
    const void* ids;
    bool long_ids;  // 64 bits, else 32
    i64 count;      // of ids
    i64 height, width, stride;
};

FERRYMAN_DEVICE i64 integer_at(const void* p, bool wide, i64 at) {
    u32 words[2];
    if (wide) {
        platform::Memory<8>::load<AGAIN>((const char*)p + 8 * at, words);
        return (i64)((u64)words[1] << 32 | words[0]);
    }
    platform::Memory<4>::load<AGAIN>((const char*)p + 4 * at, words);
    return (int)words[0];
}

// A thread takes PACKS packs at once: of one row, or (ROWS) one of each of PACKS rows. 2^lane_bits threads go along a row,
// `chunks` times; the others of a block's take more rows.
template <typename T, int V, int PACKS, bool ROWS, bool SCALED, int THREADS>
FERRYMAN_DEVICE void rows_of(const Table& table, const T* weight, T* y, float scale, int lane_bits, i64 chunks, i64 blocks) {
    const int thread = after_previous(platform::thread_index());
    const int lane = thread & ((1 << lane_bits) - 1), slot = thread >> lane_bits, side = THREADS >> lane_bits;
    constexpr int DOWN = ROWS ? PACKS : 1;
    const i64 work = (table.count + side * DOWN - 1) / (side * DOWN) * chunks;
    for (i64 item = platform::block_index(); item < work; item += blocks) {
        i64 group, chunk;
        divide(item, chunks, group, chunk);
        const i64 first = group * DOWN * side + slot;
        i64 id[DOWN];
#pragma unroll
        for (int r = 0; r < DOWN; ++r) {
            const i64 row = first + r * side;
            id[r] = -1;
            if (row < table.count) id[r] = integer_at(table.ids, table.long_ids, row);
        }
        Pack<T, V> x[PACKS];
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const i64 at = id[ROWS ? p : 0], column = (((ROWS ? chunk : chunk * PACKS + p) << lane_bits) + lane) * V;
#pragma unroll
            for (int i = 0; i < Pack<T, V>::WORDS; ++i) x[p].word[i] = NotANumber<T>::word;
            if (at >= 0 && at < table.height && column < table.width) load<AGAIN>(x[p], weight + at * table.stride + column);
        }
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const i64 row = ROWS ? first + p * side : first;
            const i64 column = (((ROWS ? chunk : chunk * PACKS + p) << lane_bits) + lane) * V;
            if constexpr (SCALED) {
                float values[V];
                unpack(x[p], values);
#pragma unroll
                for (int i = 0; i < V; ++i) values[i] *= scale;
                pack(x[p], values);
            }
            if (row < table.count && column < table.width) store(y + row * table.width + column, x[p]);
        }
    }
}

}  // namespace ferryman

#define FERRYMAN_EMBEDDING(name, T, V, PACKS, ROWS, SCALED, THREADS)                                                \
    FERRYMAN_KERNEL(THREADS, 1024 / THREADS)                                                                         \
    void name(const void* ids, const ferryman::T* weight, ferryman::T* y, ferryman::i64 long_ids,                    \
              ferryman::i64 count, ferryman::i64 height, ferryman::i64 width, ferryman::i64 stride,                  \
              ferryman::i64 lane_bits, ferryman::i64 chunks, ferryman::i64 blocks, float scale) {                    \
        const ferryman::Table table{ids, long_ids != 0, count, height, width, stride};                               \
        ferryman::rows_of<ferryman::T, V, PACKS, ROWS, SCALED, THREADS>(table, weight, y, scale, (int)lane_bits,     \
                                                                        chunks, blocks);                             \
    }
