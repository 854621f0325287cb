// linear for few rows: c (m, n) = x (m, k) @ w (n, k)^T + bias (n), m <= M. The weights are read once, as the tall operand
// of m16n8k16. Four warps fill a ring of stages (a bulk copy a row takes 30 cycles of the copy engine, too many; a tensor
// map would delay the first load), the others multiply. A cluster of SPLIT blocks divides k, and adds its parts through distributed
// shared memory in a fixed order.

namespace ferryman {

FERRYMAN_DEVICE void copy_16(u32 to, const u16* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

FERRYMAN_DEVICE void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
FERRYMAN_DEVICE void load_two_matrices(u32 (&to)[2], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");
}
FERRYMAN_DEVICE void mma(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." FERRYMAN_MMA_TYPE "." FERRYMAN_MMA_TYPE
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// BN weights' rows a block, by WARPS warps; a stage is DEPTH deep.
template <int M, int BN, int WARPS, int DEPTH, int STAGES, int SPLIT> struct Skinny {
    static constexpr int PRODUCERS = 128;
    static constexpr int THREADS = WARPS * WARP + PRODUCERS;
    static constexpr int TALL = BN / WARPS / 16;  // tiles of 16 rows a warp
    static constexpr int PITCH = DEPTH * 2 + 16;  // an odd number of 16-byte words: ldmatrix meets every bank once
    static constexpr int STAGE_BYTES = (BN + M) * PITCH;
    static constexpr int RING = STAGES * STAGE_BYTES;
    static constexpr int HELPERS = WARPS / SPLIT;  // warps whose rows a block adds
    static constexpr int PARTS = RING, PART_BYTES = BN / SPLIT * M * 4;
    static constexpr int BARRIERS = PARTS + (SPLIT - 1) * PART_BYTES;
    static constexpr int SUMMED = BARRIERS + 16 * STAGES;
    static constexpr int SHARED = SUMMED + 16;
    static_assert(WARPS % SPLIT == 0, "a warp's rows are one block's");
    static_assert(BN % (16 * WARPS) == 0 && M % 8 == 0, "whole tiles");

    static FERRYMAN_DEVICE void produce(u32 base, const u16* x, i64 x_stride, const u16* w, i64 w_stride, int m, int n,
                                        int tiles, int from, int to) {
        constexpr int CHUNKS = DEPTH / 8, TOGETHER = PRODUCERS / CHUNKS;  // of 16 bytes in a row, rows at once
        int thread = threadIdx.x - WARPS * WARP, chunk = thread % CHUNKS, line = thread / CHUNKS;
        Ring<STAGES> ring;
        u32 full = base + BARRIERS, empty = full + 8 * STAGES;
        u32 place = line * PITCH + chunk * 16;
        i64 w_step = TOGETHER * w_stride, x_step = TOGETHER * x_stride;
        for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += gridDim.x / SPLIT) {
            int rows = n - tile * BN - line;
            const u16* weights = w + ((i64)tile * BN + line) * w_stride + chunk * 8;
            const u16* inputs = x + line * x_stride + chunk * 8;
            for (int at = from; at < to; at += DEPTH) {
                u32 stage = base + ring.stage * STAGE_BYTES + place;
                barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
                if (at + chunk * 8 < to) {
                    const u16* source = weights + at;
#pragma unroll
                    for (int i = 0; i < BN; i += TOGETHER, source += w_step)
                        if (i < rows) copy_16(stage + i * PITCH, source);
                    source = inputs + at;
#pragma unroll
                    for (int i = 0; i < M; i += TOGETHER, source += x_step)
                        if (i + line < m) copy_16(stage + (BN + i) * PITCH, source);
                }
                arrive_with_copies(full + 8 * ring.stage);
                ring.next();
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    }

    static FERRYMAN_DEVICE void run(char* shared, const u16* x, i64 x_stride, const u16* w, i64 w_stride, const u16* bias,
                                    u16* c, int m, int n, int k) {
        u32 base = shared_address(shared);
        int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        u32 rank = SPLIT == 1 ? 0 : cluster_rank();
        u32 full = base + BARRIERS, empty = full + 8 * STAGES;
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) {
                barrier_init(full + 8 * i, PRODUCERS);
                barrier_init(empty + 8 * i, WARPS);
            }
            barrier_init(base + SUMMED, 1);
            barrier_init_fence();
            if (SPLIT > 1) barrier_expect(base + SUMMED, (SPLIT - 1) * PART_BYTES);
        }
        if constexpr (SPLIT == 1) __syncthreads();
        else cluster_start();
        int tiles = ceil_div(n, BN);
        int part = ceil_div(ceil_div(k, DEPTH), SPLIT) * DEPTH;  // of k, for this block
        int from = min(k, (int)rank * part), to = min(k, from + part);
        after_previous();
        if (warp >= WARPS) {
            produce(base, x, x_stride, w, w_stride, m, n, tiles, from, to);
            return;
        }
        // ldmatrix: lane l names row l % 8 of matrix l / 8. Weights: two matrices below each other, then two to the right;
        // x: two to the right, then two below
        u32 a_place = (warp * TALL * 16 + (lane / 8 & 1) * 8 + lane % 8) * PITCH + lane / 16 * 16;
        u32 b_place = (BN + lane / 16 * 8 + lane % 8) * PITCH + (lane / 8 & 1) * 16;
        if constexpr (M == 8) b_place = (BN + lane % 8) * PITCH + (lane / 8 & 1) * 16;
        Ring<STAGES> ring;
        for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += gridDim.x / SPLIT) {
            float sum[TALL][M / 8][4] = {};
            for (int at = from; at < to; at += DEPTH) {
                u32 stage = base + ring.stage * STAGE_BYTES;
                int steps = min(DEPTH, to - at) / 16;
                barrier_wait(full + 8 * ring.stage, ring.parity);
#pragma unroll 4
                for (int step = 0; step < steps; ++step) {
                    u32 a[TALL][4], b[M / 8][2];
#pragma unroll
                    for (int i = 0; i < TALL; ++i) load_matrices(a[i], stage + a_place + i * 16 * PITCH + step * 32);
                    if constexpr (M == 8) {
                        load_two_matrices(b[0], stage + b_place + step * 32);
                    } else {
#pragma unroll
                        for (int j = 0; j < M / 16; ++j) {
                            u32 four[4];
                            load_matrices(four, stage + b_place + j * 16 * PITCH + step * 32);
                            b[2 * j][0] = four[0], b[2 * j][1] = four[1];
                            b[2 * j + 1][0] = four[2], b[2 * j + 1][1] = four[3];
                        }
                    }
#pragma unroll
                    for (int i = 0; i < TALL; ++i)
#pragma unroll
                        for (int j = 0; j < M / 8; ++j) mma(sum[i][j], a[i], b[j][0], b[j][1]);
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + 8 * ring.stage);
                ring.next();
            }
            if constexpr (SPLIT == 1) {
#pragma unroll
                for (int i = 0; i < TALL; ++i)
#pragma unroll
                    for (int j = 0; j < M / 8; ++j)
                        store_four(c, bias, m, n, tile * BN + (warp * TALL + i) * 16 + lane / 4, j * 8 + lane % 4 * 2, sum[i][j]);
            } else if (warp / HELPERS != rank) {  // those rows are another block's to add
#pragma unroll
                for (int i = 0; i < TALL; ++i)
#pragma unroll
                    for (int j = 0; j < M / 8; ++j) {
                        u32 to = place(base, rank - ((int)rank > warp / HELPERS), warp, i, j);
                        send_four(to, base + SUMMED, warp / HELPERS, sum[i][j][0], sum[i][j][1], sum[i][j][2], sum[i][j][3]);
                    }
            } else {
                barrier_wait(base + SUMMED, 0);
#pragma unroll
                for (int i = 0; i < TALL; ++i)
#pragma unroll
                    for (int j = 0; j < M / 8; ++j) {
                        float total[4] = {};
#pragma unroll
                        for (int other = 0; other < SPLIT; ++other) {  // in the order of ranks
                            float part[4] = {sum[i][j][0], sum[i][j][1], sum[i][j][2], sum[i][j][3]};
                            if (other != rank) load_four(part, place(base, other - (other > (int)rank), warp, i, j));
#pragma unroll
                            for (int e = 0; e < 4; ++e) total[e] += part[e];
                        }
                        store_four(c, bias, m, n, tile * BN + (warp * TALL + i) * 16 + lane / 4, j * 8 + lane % 4 * 2, total);
                    }
            }
        }
    }

    // Where a warp of another block leaves a tile of its sums for the warp of its place here.
    static FERRYMAN_DEVICE u32 place(u32 base, int slot, int warp, int i, int j) {
        int index = ((slot * HELPERS + warp % HELPERS) * TALL + i) * (M / 8) + j;
        return base + PARTS + (index * WARP + threadIdx.x % WARP) * 16;
    }

    static FERRYMAN_DEVICE void store_four(u16* c, const u16* bias, int m, int n, int row, int column, float (&sum)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (row + e / 2 * 8 < n && column + e % 2 < m) store(c, bias, n, column + e % 2, row + e / 2 * 8, sum[e]);
    }

    static FERRYMAN_DEVICE void store(u16* c, const u16* bias, int n, int line, int row, float value) {
        if (bias != nullptr) value += widen(bias[row]);
        c[(i64)line * n + row] = round_one(value);
    }
};

}  // namespace ferryman

#define FERRYMAN_SKINNY(name, M, BN, WARPS, DEPTH, STAGES, SPLIT)                                                   \
    extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1)                                                       \
        __launch_bounds__((ferryman::Skinny<M, BN, WARPS, DEPTH, STAGES, SPLIT>::THREADS), 1)                      \
        name(const ferryman::u16* x, ferryman::i64 x_stride, const ferryman::u16* w, ferryman::i64 w_stride,       \
             const ferryman::u16* bias, ferryman::u16* c, ferryman::i64 m, ferryman::i64 n, ferryman::i64 k) {     \
        extern __shared__ __align__(16) char shared[];                                                             \
        ferryman::Skinny<M, BN, WARPS, DEPTH, STAGES, SPLIT>::run(shared, x, x_stride, w, w_stride, bias, c,       \
                                                                  (int)m, (int)n, (int)k);                         \
    }
