// linear for many rows: c (m, n) = x (m, k) @ w (n, k)^T + bias (n). Persistent clusters over tiles of the result; in each
// block one warp fills a ring of stages by tensor copies and two warpgroups multiply out of it. Blocks of a cluster have
// the same columns of the result, so each fetches a part of w's tile and gives it to all; or (SPLIT > 1, one tile each) they
// divide k and add their parts through distributed shared memory in a fixed order.

namespace ferryman {

constexpr int DEPTH = 64;  // of a stage: 128 bytes, the width of the widest swizzle
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

// A tensor map for a dense-rowed matrix in boxes of box_rows x DEPTH elements, 128-byte swizzle, zeros past the edge.
// Written in shared memory, then published at `published`. One whole warp.
FERRYMAN_DEVICE void publish_map(u32 scratch, void* published, const void* base, i64 rows, i64 columns, i64 stride,
                                 int box_rows) {
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
// To the same place in every block of the cluster, and to each one's barrier.
FERRYMAN_DEVICE void load_box_for_all(u32 to, const void* map, int column, int row, u32 barrier, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(blocks) : "memory");
}
FERRYMAN_DEVICE void store_box(const void* map, int column, int row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(from), "r"(column), "r"(row) : "memory");
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

template <int BM, int BN, int STAGES, int CLUSTER, int SPLIT> struct Wide {
    static constexpr int GROUPS = BM / 64;  // warpgroups that multiply
    static constexpr int THREADS = (GROUPS + 1) * GROUP_THREADS;
    static constexpr int RESIDENT = GROUPS == 1 && BN <= 128 ? 2 : 1;  // blocks that a unit's registers must hold
    static constexpr int BLOCKS = CLUSTER * SPLIT;  // of a cluster
    static_assert(CLUSTER == 1 || SPLIT == 1, "a cluster shares columns or divides k");
    static constexpr int A_BYTES = BM * DEPTH * 2, B_BYTES = BN * DEPTH * 2, STAGE_BYTES = A_BYTES + B_BYTES;
    static constexpr int STAGING = 64 * 128;  // one box of the result: 64 rows of 64 columns
    static constexpr int RESULT = STAGES * STAGE_BYTES;  // two such boxes a warpgroup
    static constexpr int MAPS = RESULT + 2 * GROUPS * STAGING;
    static constexpr int BARRIERS = MAPS + 3 * MAP_BYTES;
    static_assert(SPLIT == 1 || BM * BN * 4 <= RESULT, "the parts of a sum lie where the ring was");
    static constexpr int SHARED = BARRIERS + 16 * STAGES + 16 + 1024;  // 1024: to align the ring

    // Fills the ring with x's tiles (WEIGHT: w's), as one warp; an arrival of each of the two completes a stage.
    template <bool WEIGHT>
    static FERRYMAN_DEVICE void produce(u32 base, const char* map, int box_rows, const Tiles& tiles, int from, int to,
                                        int first, int clusters, u32 rank) {
        acquire_map(map);
        Ring<STAGES> ring;
        u32 full = base + BARRIERS, empty = full + 8 * STAGES;
        for (int tile = first; tile < tiles.down * tiles.across; tile += clusters) {
            int row, column;
            tiles.at(tile, row, column);
            row = (row * CLUSTER + rank) * BM;
            column *= BN;
            for (int step = from; step < to; ++step) {
                u32 a = base + ring.stage * STAGE_BYTES, b = a + A_BYTES, ready = full + 8 * ring.stage;
                barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
                if constexpr (!WEIGHT) {
                    barrier_expect(ready, box_rows * 128);
                    load_box(a, map, step * DEPTH, row, ready);
                } else if constexpr (CLUSTER == 1) {
                    barrier_expect(ready, B_BYTES);
                    load_box(b, map, step * DEPTH, column, ready);
                } else {
                    constexpr int PART = BN / CLUSTER;
                    barrier_expect(ready, B_BYTES);
                    load_box_for_all(b + rank * PART * 128, map, step * DEPTH, column + rank * PART, ready,
                                     (u16)((1 << CLUSTER) - 1));
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

    // The cluster's parts of a sum, kept as the fragments lie: a thread adds registers of the same place in all blocks, each
    // block its share of the columns.
    static FERRYMAN_DEVICE void add_parts(char* parts, u32 base, float (&sum)[BN / 2], const u16* bias, u16* c, int m, int n,
                                          int row, int column, u32 rank, int which) {
        int thread = threadIdx.x % GROUP_THREADS, lane = thread % WARP, warp = thread / WARP;
        float* mine = (float*)parts + which * 64 * BN + thread;
        named_barrier(1 + GROUPS, GROUPS * GROUP_THREADS);  // all products are done with the ring
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) mine[i * GROUP_THREADS] = sum[i];
        cluster_sync();
        constexpr int SHARE = BN / 2 / SPLIT;
        row += 16 * warp + lane / 4;
        column += lane % 4 * 2;
#pragma unroll
        for (int q = 0; q < SHARE; q += 2) {
            int i = (int)rank * SHARE + q, line = row + i % 4 / 2 * 8, at = column + i / 4 * 8;
            u32 place = base + (which * 64 * BN + i * GROUP_THREADS + thread) * 4;
            float low = 0.0f, high = 0.0f;
#pragma unroll
            for (int other = 0; other < SPLIT; ++other) {
                low += cluster_load(place, other);
                high += cluster_load(place + GROUP_THREADS * 4, other);
            }
            if (line < m && at < n) {
                if (bias != nullptr) low += widen(bias[at]), high += widen(bias[at + 1]);
                *(u32*)(c + (i64)line * n + at) = round_pair(low, high);
            }
        }
    }

    static FERRYMAN_DEVICE void consume(char* parts, u32 base, const void* map_c, const u16* bias, u16* c, int m, int n,
                                        const Tiles& tiles, int steps, int first, int clusters, u32 rank, int which) {
        float sum[BN / 2];
        Ring<STAGES> ring;
        u32 full = base + BARRIERS, empty = full + 8 * STAGES;
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
                barrier_wait(full + 8 * ring.stage, ring.parity);
                wgmma_begin();
#pragma unroll
                for (int part = 0; part < DEPTH / 16; ++part) wgmma(sum, a + 2 * part, b + 2 * part, step + part > 0);
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
                add_parts(parts, base, sum, bias, c, m, n, row, column, rank, which);
                return;
            }
            if (thread == 0 && !waited) {
                barrier_wait(full + 16 * STAGES, 0);
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
                if (thread == 0) store_box(map_c, column + box * 64, row, buffer);
            }
        }
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }

    static FERRYMAN_DEVICE void run(char* shared, const u16* x, i64 x_stride, const u16* w, i64 w_stride, const u16* bias,
                                    u16* c, i64 m, i64 n, i64 k, char* maps, i64 group) {
        u32 base = (shared_address(shared) + 1023) & ~1023u;
        int warp = threadIdx.x / WARP, which = warp / 4;
        u32 rank = BLOCKS == 1 ? 0 : cluster_rank();
        u32 full = base + BARRIERS, empty = full + 8 * STAGES, published = empty + 8 * STAGES;
        char* map = maps + (i64)blockIdx.x * (3 * MAP_BYTES);
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) {
                barrier_init(full + 8 * i, 2);
                barrier_init(empty + 8 * i, GROUPS * 4 * CLUSTER);
            }
            barrier_init(published, 1);
            barrier_init_fence();
        }
        if constexpr (BLOCKS == 1) __syncthreads();
        else cluster_sync();
        Tiles tiles = {ceil_div(m, BM * CLUSTER), ceil_div(n, BN), (int)group};
        int steps = ceil_div(k, DEPTH), first = blockIdx.x / BLOCKS, clusters = gridDim.x / BLOCKS;
        int from = 0, to = steps;
        if constexpr (SPLIT > 1) from = steps * (int)rank / SPLIT, to = steps * ((int)rank + 1) / SPLIT;
        u32 row_rank = SPLIT > 1 ? 0 : rank;
        if (which == GROUPS) {
            if constexpr (GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
            // a map takes about a microsecond to be published: one warp for each, and each begins when its own is
            int role = warp % 4, lane = threadIdx.x % WARP;
            u32 scratch = base + MAPS + role * MAP_BYTES;
            map += role * MAP_BYTES;
            if (role == 0) {
                // rows past the edge cost time (zeros are written), and those of a tile of the result do not meet
                int box_rows = (int)min((i64)BM, m);
                publish_map(scratch, map, x, m, k, x_stride, box_rows);
                if (lane == 0) produce<false>(base, map, box_rows, tiles, from, to, first, clusters, row_rank);
            } else if (role == 1) {
                publish_map(scratch, map, w, n, k, w_stride, BN / CLUSTER);
                if (lane == 0) produce<true>(base, map, 0, tiles, from, to, first, clusters, row_rank);
            } else if (role == 2 && SPLIT == 1) {
                publish_map(scratch, map, c, m, n, n, 64);
                if (lane == 0) barrier_arrive(published);
            }
            if constexpr (SPLIT > 1) cluster_sync();  // as in add_parts
        } else {
            if constexpr (GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
            consume(shared + (base - shared_address(shared)), base, map + 2 * MAP_BYTES, bias, c, (int)m, (int)n, tiles,
                    to - from, first, clusters, rank, which);
        }
        // a block must be there until no other one can arrive at its barriers, or read its part
        if constexpr (BLOCKS > 1) cluster_sync();
    }
};

}  // namespace ferryman

#define FERRYMAN_WIDE(name, BM, BN, STAGES, CLUSTER, SPLIT)                                                         \
    extern "C" __global__ void __cluster_dims__(CLUSTER * SPLIT, 1, 1)                                             \
        __launch_bounds__((ferryman::Wide<BM, BN, STAGES, CLUSTER, SPLIT>::THREADS),                               \
                          (ferryman::Wide<BM, BN, STAGES, CLUSTER, SPLIT>::RESIDENT))                              \
        name(const ferryman::u16* x, ferryman::i64 x_stride, const ferryman::u16* w, ferryman::i64 w_stride,       \
             const ferryman::u16* bias, ferryman::u16* c, ferryman::i64 m, ferryman::i64 n, ferryman::i64 k,       \
             char* maps, ferryman::i64 group) {                                                                    \
        extern __shared__ char shared[];                                                                           \
        ferryman::Wide<BM, BN, STAGES, CLUSTER, SPLIT>::run(shared, x, x_stride, w, w_stride, bias, c, m, n, k,    \
                                                            maps, group);                                          \
    }
