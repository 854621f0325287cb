// linear: c (m, n) = x (m, k) @ w (n, k)^T + bias (n). Persistent clusters over tiles of the result; in each block two
// warps fill a ring of stages by tensor copies and one or two warpgroups multiply out of it. Blocks of a cluster have the
// same columns of the result, so each fetches a part of w's tile and gives it to all; or (SPLIT > 1, one tile each) they
// divide k and add their parts through distributed shared memory in a fixed order. BM = 64 is for so few rows that w is
// read once.

namespace ferryman {

constexpr int DEPTH = 64;  // of a box: 128 bytes, the width of the widest swizzle
constexpr int MAP_BYTES = 128;

FERRYMAN_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FERRYMAN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> FERRYMAN_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Rows of 128 bytes, swizzled: groups of 8 rows are 1024 bytes apart.
FERRYMAN_DEVICE u64 matrix_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// A tensor map for a dense-rowed matrix in boxes of box_rows x DEPTH elements, 128-byte swizzle, zeros past the edge: in
// shared memory, where nothing can use it before it is published. One whole warp.
FERRYMAN_DEVICE void write_map(u32 scratch, const void* base, i64 rows, i64 columns, i64 stride, int box_rows) {
    int lane = threadIdx.x % WARP;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(scratch + 4 * lane), "r"(0) : "memory");
    __syncwarp();
    if (lane == 0) {
        asm volatile(
            "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;\n"
            "tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], 1;\n"
            "tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], 0, %2;\n"
            "tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], 1, %3;\n"
            "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %4;\n"
            "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %5;\n"
            "tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %6;\n"
            "tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], 0, 1;\n"
            "tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], 1, 1;\n"
            "tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%0], %7;\n"
            "tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%0], 0;\n"
            "tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%0], 3;\n"
            "tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%0], 0;\n"
            ::"r"(scratch), "l"(base), "r"(DEPTH), "r"(box_rows), "r"((u32)columns), "r"((u32)rows), "l"(stride * 2),
            "n"(TENSOR_MAP_TYPE) : "memory");
    }
    __syncwarp();
}
FERRYMAN_DEVICE void publish_map(u32 scratch, void* published) {
    asm volatile(
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
        ::"l"(published), "r"(scratch) : "memory");
}
FERRYMAN_DEVICE void acquire_map(const void* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

FERRYMAN_DEVICE void load_box(u32 to, const void* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
// What is read once (see `read_once`).
FERRYMAN_DEVICE void load_box_once(u32 to, const void* map, int column, int row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy) : "memory");
}
// To the same place in every block of the cluster, and to each one's barrier.
FERRYMAN_DEVICE void load_box_for_all(u32 to, const void* map, int column, int row, u32 barrier, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(blocks) : "memory");
}
// The result leaves L2 before the operands, which other tiles read again.
FERRYMAN_DEVICE void store_box(const void* map, int column, int row, u32 from, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;"
                 ::"l"(map), "r"(from), "r"(column), "r"(row), "l"(policy) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The tiles of a cluster: in groups of GROUP rows of tiles, column by column, so that those in flight share their
// operands in L2.
struct Tiles {
    int down, across, group;
    FERRYMAN_DEVICE void at(int index, int& row, int& column) const {
        int first = index / (group * across) * group;
        int tall = min(down - first, group);
        int within = index % (group * across);
        row = first + within % tall;
        column = within / tall;
    }
};

template <int BM, int BN, int STAGES, int CLUSTER, int SPLIT, int HEAD, int BOXES> struct Wide {
    static constexpr int GROUPS = BM / 64;  // warpgroups that multiply
    static constexpr int THREADS = (GROUPS + 1) * GROUP_THREADS;
    static constexpr bool LOW = BM == 64;  // a result so small that threads write it
    static constexpr int BLOCKS = CLUSTER * SPLIT;  // of a cluster
    static_assert(CLUSTER == 1 || SPLIT == 1, "a cluster shares columns or divides k");
    static constexpr int A_BYTES = BM * DEPTH * 2, B_BYTES = BN * DEPTH * 2;
    static constexpr int BOX_BYTES = A_BYTES + B_BYTES, STAGE_BYTES = BOXES * BOX_BYTES;  // boxes of k beside each other
    static constexpr int STAGING = 64 * 128;  // a box of the result: 64 rows of 64 columns
    static constexpr int RESULT = STAGES * STAGE_BYTES;  // two such boxes a warpgroup
    static constexpr int SHARE = BN / 2 / SPLIT;  // of a thread's sums: those that this block adds
    static constexpr int PART_BYTES = GROUPS * SHARE * GROUP_THREADS * 4;  // what a block sends to another
    static constexpr int MAPS = RESULT + (SPLIT > 1 ? (SPLIT - 1) * PART_BYTES : LOW ? 0 : 2 * GROUPS * STAGING);
    static constexpr int BARRIERS = MAPS + 3 * MAP_BYTES;
    static constexpr int SUMMED = BARRIERS + 16 * STAGES + 8;
    static_assert(SPLIT == 1 || BN % (8 * SPLIT) == 0, "columns are shared in groups of 8");
    static_assert(HEAD <= STAGES && (HEAD == 0 || (LOW && CLUSTER == 1)), "the first stages are one block's own");
    static constexpr int SHARED = SUMMED + 8 + 8 * HEAD + 1024;  // 1024: to align the ring

    // The first ``heads`` stages of the first tile, by the warps that multiply: these copies need no tensor map, and are
    // under way while the maps are published.
    static FERRYMAN_DEVICE void fill_first(u32 base, const u16* x, i64 x_stride, const u16* w, i64 w_stride, i64 m, i64 n,
                                           i64 k, int heads, int from, int row, int column) {
        constexpr int TOGETHER = GROUP_THREADS / 8;  // lines at once, in chunks of 16 bytes
        int chunk = threadIdx.x % 8, line = threadIdx.x / 8;
        u64 policy = read_once();
        u32 place = base + line * 128 + ((chunk ^ (line & 7)) << 4), landed = base + SUMMED + 8;
        for (int box = 0; box < heads * BOXES; ++box, place += BOX_BYTES) {
            i64 at = (i64)(from * BOXES + box) * DEPTH + chunk * 8;
            int bytes = at < k ? 16 : 0;  // zeros past the end
            at = at < k ? at : 0;
#pragma unroll
            for (int i = 0; i < BN; i += TOGETHER)
                if (i + line < BN && column + i + line < n)
                    copy_once(place + A_BYTES + i * 128, w + (column + i + line) * w_stride + at, bytes, policy);
#pragma unroll
            for (int i = 0; i < BM; i += TOGETHER)
                if (row + i + line < m) copy_or_zero(place + i * 128, x + (row + i + line) * x_stride + at, bytes);
            if (box % BOXES == BOXES - 1) arrive_with_copies(landed + box / BOXES * 8);
        }
    }

    // Fills the ring with x's tiles (WEIGHT: w's), as one warp; an arrival of each of the two completes a stage.
    template <bool WEIGHT>
    static FERRYMAN_DEVICE void produce(u32 base, const char* map, int box_rows, const Tiles& tiles, int from, int to,
                                        int first, int clusters, u32 rank, int heads) {
        acquire_map(map);
        Ring<STAGES> ring = Ring<STAGES>::after(heads);
        u64 policy = read_once();
        u32 full = base + BARRIERS, empty = full + 8 * STAGES;
        for (int tile = first; tile < tiles.down * tiles.across; tile += clusters) {
            int row, column;
            tiles.at(tile, row, column);
            row = (row * CLUSTER + rank) * BM;
            column *= BN;
            for (int step = from + (tile == first ? heads : 0); step < to; ++step) {
                u32 a = base + ring.stage * STAGE_BYTES, b = a + A_BYTES, ready = full + 8 * ring.stage;
                barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
                constexpr int PART = BN / CLUSTER, ALL = (1 << CLUSTER) - 1;  // of w's box: the others fetch the rest
                barrier_expect(ready, BOXES * (WEIGHT ? B_BYTES : box_rows * 128));
#pragma unroll
                for (int box = 0; box < BOXES; ++box, a += BOX_BYTES, b += BOX_BYTES) {
                    int at = (step * BOXES + box) * DEPTH;
                    if constexpr (!WEIGHT) load_box(a, map, at, row, ready);
                    else if constexpr (LOW) load_box_once(b, map, at, column, ready, policy);
                    else if constexpr (CLUSTER == 1) load_box(b, map, at, column, ready);
                    else load_box_for_all(b + rank * PART * 128, map, at, column + rank * PART, ready, ALL);
                }
                ring.next();
            }
        }
    }

    static FERRYMAN_DEVICE void release(u32 barrier) {
        int lane = threadIdx.x % WARP;
        if constexpr (CLUSTER == 1) {
            if (lane == 0) barrier_arrive(barrier);
        } else {
            if (lane < CLUSTER) barrier_arrive_at(barrier, lane);
        }
    }

    // The cluster's parts of a sum. Each block adds its share of the columns: a thread sends the others' to the threads
    // of its own place there (no fence of the device, which a cluster's barrier would be), and adds in the order of ranks.
    static FERRYMAN_DEVICE void add_parts(u32 base, const float (&sum)[BN / 2], const u16* bias, u16* c, int m, int n,
                                          int row, int column, u32 rank, int which) {
        int thread = threadIdx.x % GROUP_THREADS, lane = thread % WARP, warp = thread / WARP;
        if (row + 16 * warp >= m) return;
        u32 place = base + RESULT + (which * SHARE * GROUP_THREADS + thread * 4) * 4, summed = base + SUMMED;
        float parts[SPLIT][SHARE];
#pragma unroll
        for (int other = 0; other < SPLIT; ++other) {
            u32 slot = place + (rank - (rank > other)) * PART_BYTES;
#pragma unroll
            for (int q = 0; q < SHARE; q += 4) {
                const float* four = sum + other * SHARE + q;
                if (rank != other)
                    send_four(slot + q * GROUP_THREADS * 4, summed, other, four[0], four[1], four[2], four[3]);
            }
        }
        barrier_wait(summed, 0);
#pragma unroll
        for (int other = 0; other < SPLIT; ++other) {
            u32 slot = place + (other - (other > (int)rank)) * PART_BYTES;
#pragma unroll
            for (int q = 0; q < SHARE; q += 4) {
                if (rank != other) {
                    load_four(&parts[other][q], slot + q * GROUP_THREADS * 4);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) parts[other][q + i] = sum[other * SHARE + q + i];
                }
            }
        }
        row += 16 * warp + lane / 4;
        column += lane % 4 * 2 + (int)rank * (BN / SPLIT);
#pragma unroll
        for (int q = 0; q < SHARE; q += 2) {
            float low = 0.0f, high = 0.0f;
#pragma unroll
            for (int other = 0; other < SPLIT; ++other) low += parts[other][q], high += parts[other][q + 1];
            store_two(bias, c, m, n, row + q % 4 / 2 * 8, column + q / 4 * 8, low, high);
        }
    }

    static FERRYMAN_DEVICE void store_two(const u16* bias, u16* c, int m, int n, int line, int at, float low,
                                          float high) {
        if (line >= m || at >= n) return;
        if (bias != nullptr) {
            u32 both = *(const u32*)(bias + at);
            low += widen((u16)both);
            high += widen((u16)(both >> 16));
        }
        *(u32*)(c + (i64)line * n + at) = round_pair(low, high);
    }

    static FERRYMAN_DEVICE void consume(u32 base, const void* map_c, const u16* bias, u16* c, int m, int n,
                                        const Tiles& tiles, int steps, int first, int clusters, u32 rank, int which,
                                        int heads) {
        float sum[BN / 2];
        Ring<STAGES> ring;
        u32 full = base + BARRIERS, empty = full + 8 * STAGES, published = empty + 8 * STAGES;
        int thread = threadIdx.x % GROUP_THREADS, lane = thread % WARP, warp = thread / WARP;
        u32 staging = base + RESULT + which * 2 * STAGING;
        // stmatrix: lane l names row l % 8 of matrix l / 8; two matrices below each other, then two to the right
        int line = 16 * warp + (lane / 8 & 1) * 8 + lane % 8;
        u32 stored = line * 128, shift = line & 7, right = lane / 16;
        bool waited = false;
        int turn = 0;  // of the two buffers, from tile to tile: a tile may have an odd number of boxes
        for (int tile = first; tile < tiles.down * tiles.across; tile += clusters) {
            int last = 0;
            for (int step = 0; step < steps; ++step) {
                u32 at = base + ring.stage * STAGE_BYTES;
                u64 a = matrix_descriptor(at + which * 64 * 128), b = matrix_descriptor(at + A_BYTES);
                if (HEAD > 0 && step < heads && tile == first) {
                    barrier_wait(base + SUMMED + 8 + 8 * step, 0);
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // threads' copies, read by wgmma
                } else {  // a stage that was filled at first has met one phase fewer
                    barrier_wait(full + 8 * ring.stage, ring.parity ^ (ring.stage < heads));
                }
                wgmma_begin();
#pragma unroll
                for (int part = 0; part < BOXES * DEPTH / 16; ++part) {
                    int at = part / 4 * (BOX_BYTES / 16) + part % 4 * 2;
                    wgmma(sum, a + at, b + at, step + part > 0);
                }
                wgmma_commit();
                wgmma_wait<1>();
                if (step > 0) release(empty + 8 * last);
                last = ring.stage;
                ring.next();
            }
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(sum[i])::"memory");
            release(empty + 8 * last);

            int row, column;
            tiles.at(tile, row, column);
            row = (CLUSTER == 1 ? row : row * CLUSTER + (int)rank) * BM + which * 64;
            column *= BN;
            if constexpr (SPLIT > 1) {
                add_parts(base, sum, bias, c, m, n, row, column, rank, which);
                return;
            }
            if constexpr (LOW) {
#pragma unroll
                for (int i = 0; i < BN / 2; i += 2)
                    store_two(bias, c, m, n, row + 16 * warp + lane / 4 + i % 4 / 2 * 8,
                              column + i / 4 * 8 + lane % 4 * 2, sum[i], sum[i + 1]);
                continue;
            }
            if (thread == 0 && !waited) {
                barrier_wait(published, 0);
                acquire_map(map_c);
                waited = true;
            }
#pragma unroll
            for (int box = 0; box < BN / 64; ++box) {
                if (column + box * 64 >= n) break;
                u32 buffer = staging + (turn++ & 1) * STAGING;
                if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
                named_barrier(1 + which, GROUP_THREADS);  // this buffer's last store has been read out
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) {
                    u32 words[4];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        int at = box * 8 + pair * 2 + half, c = column + at * 8 + lane % 4 * 2;
                        float low = 0.0f, high = 0.0f;
                        if (bias != nullptr && c < n) {
                            u32 both = *(const u32*)(bias + c);
                            low = widen((u16)both);
                            high = widen((u16)(both >> 16));
                        }
                        words[2 * half] = round_pair(sum[4 * at] + low, sum[4 * at + 1] + high);
                        words[2 * half + 1] = round_pair(sum[4 * at + 2] + low, sum[4 * at + 3] + high);
                    }
                    u32 to = buffer + stored + ((pair * 2 + right ^ shift) << 4);
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                named_barrier(1 + which, GROUP_THREADS);
                if (thread == 0) store_box(map_c, column + box * 64, row, buffer, read_once());
            }
        }
        if (!LOW && thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }

    static FERRYMAN_DEVICE void run(char* shared, const u16* x, i64 x_stride, const u16* w, i64 w_stride, const u16* bias,
                                    u16* c, i64 m, i64 n, i64 k, char* maps, i64 group) {
        u32 base = (shared_address(shared) + 1023) & ~1023u;
        int warp = threadIdx.x / WARP, which = warp / 4;
        u32 rank = BLOCKS == 1 ? 0 : cluster_rank();
        u32 full = base + BARRIERS, empty = full + 8 * STAGES, published = empty + 8 * STAGES;
        int role = warp - 4 * GROUPS, lane = threadIdx.x % WARP;  // of a warp that multiplies not: the operand it fetches
        u32 scratch = base + MAPS + role * MAP_BYTES;
        // rows past the edge cost time (zeros are written), and those of a tile of the result do not meet
        int box_rows = (int)min((i64)BM, m);
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) {
                barrier_init(full + 8 * i, 2);
                barrier_init(empty + 8 * i, GROUPS * 4 * CLUSTER);
            }
            barrier_init(published, 1);
            barrier_init(base + SUMMED, 1);
            for (int i = 0; i < HEAD; ++i) barrier_init(base + SUMMED + 8 + 8 * i, GROUP_THREADS);
            barrier_init_fence();
        }
        if (role == 0) write_map(scratch, x, m, k, x_stride, box_rows);
        else if (role == 1) write_map(scratch, w, n, k, w_stride, BN / CLUSTER);
        else if (role == 2 && !LOW && SPLIT == 1) write_map(scratch, c, m, n, n, 64);
        Tiles tiles = {ceil_div(m, BM * CLUSTER), ceil_div(n, BN), (int)group};
        int steps = ceil_div(k, BOXES * DEPTH), first = blockIdx.x / BLOCKS, clusters = gridDim.x / BLOCKS;
        if constexpr (SPLIT > 1) {
            if (threadIdx.x == 0) {
                int row, column;
                tiles.at(first, row, column);
                int warps = min(4 * GROUPS, ceil_div(m - row * BM, 16));  // that have rows
                barrier_expect(base + SUMMED, (SPLIT - 1) * warps * (SHARE * WARP * 4));
            }
        }
        if constexpr (BLOCKS == 1) __syncthreads();
        else cluster_start();
        int from = 0, to = steps;
        if constexpr (SPLIT > 1) from = steps * (int)rank / SPLIT, to = steps * ((int)rank + 1) / SPLIT;
        u32 row_rank = SPLIT > 1 ? 0 : rank;
        int heads = HEAD == 0 ? 0 : min(HEAD, to - from);
        after_previous();
        if (role >= 0) {
            if constexpr (GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
            // a map takes about a microsecond to be published: one warp for each, and each begins when its own is
            char* map = maps + (i64)blockIdx.x * (3 * MAP_BYTES) + role * MAP_BYTES;
            if (role < (LOW || SPLIT > 1 ? 2 : 3)) publish_map(scratch, map);
            if (lane == 0) {
                if (role == 0) produce<false>(base, map, box_rows, tiles, from, to, first, clusters, row_rank, heads);
                if (role == 1) produce<true>(base, map, 0, tiles, from, to, first, clusters, row_rank, heads);
                if (role == 2) barrier_arrive(published);
            }
        } else {
            if constexpr (GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
            if constexpr (HEAD > 0) {
                int row, column;
                tiles.at(first, row, column);
                fill_first(base, x, x_stride, w, w_stride, m, n, k, heads, from, row * BM, column * BN);
            }
            const char* map_c = maps + (i64)blockIdx.x * (3 * MAP_BYTES) + 2 * MAP_BYTES;
            consume(base, map_c, bias, c, (int)m, (int)n, tiles, to - from, first,
                    clusters, rank, which, heads);
        }
        if constexpr (CLUSTER > 1) cluster_sync();  // a block must be there until no other one can arrive at its barriers
    }
};

}  // namespace ferryman

#define FERRYMAN_WIDE(name, BM, BN, STAGES, CLUSTER, SPLIT, HEAD, BOXES)                                             \
    extern "C" __global__ void __cluster_dims__(CLUSTER * SPLIT, 1, 1)                                               \
        __launch_bounds__((ferryman::Wide<BM, BN, STAGES, CLUSTER, SPLIT, HEAD, BOXES>::THREADS), 1)                 \
        name(const ferryman::u16* x, ferryman::i64 x_stride, const ferryman::u16* w, ferryman::i64 w_stride,         \
             const ferryman::u16* bias, ferryman::u16* c, ferryman::i64 m, ferryman::i64 n, ferryman::i64 k,         \
             char* maps, ferryman::i64 group) {                                                                      \
        extern __shared__ char shared[];                                                                             \
        ferryman::Wide<BM, BN, STAGES, CLUSTER, SPLIT, HEAD, BOXES>::run(shared, x, x_stride, w, w_stride, bias, c,  \
                                                                         m, n, k, maps, group);                      \
    }
