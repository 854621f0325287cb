// Keys and values of new tokens into their places of a paged cache, in one launch. Bits are moved, so that elements have a
// size and no type.

namespace ferryman {

template <int BYTES> struct Bits { typedef bf16 type; };
template <> struct Bits<4> { typedef f32 type; };

struct Tokens {  // strides in elements
    const void* data;
    void* cache;
    i64 token, head, unit;                    // of the tokens
    i64 page, place, cache_head, cache_unit;  // of the cache
    int dim, packs;                           // elements of a head; packs of a token: less than 2^31 elements
};

template <typename T, int V> FERRYMAN_DEVICE void place_of(const Tokens& x, int pack, i64& from, i64& to) {
    const u32 head = (u32)(pack * V) / (u32)x.dim, within = (u32)(pack * V) - head * (u32)x.dim;
    from = head * x.head + within * x.unit;
    to = head * x.cache_head + within * x.cache_unit;
}

FERRYMAN_DEVICE i64 integer_at(const void* p, bool wide, i64 at) {
    u32 words[2];
    if (wide) {
        platform::Memory<8>::load<AGAIN>((const char*)p + 8 * at, words);
        return (i64)((u64)words[1] << 32 | words[0]);
    }
    platform::Memory<4>::load<AGAIN>((const char*)p + 4 * at, words);
    return (int)words[0];
}

// A thread takes PACKS packs of a token's key, then value. 2^lane_bits threads go along them, `chunks` times; the others of
// a block take more tokens. What is read does not wait for the slot: a token that is skipped is read, too.
template <typename T, int V, int PACKS, int THREADS>
FERRYMAN_DEVICE void append(const Tokens& k, const Tokens& v, const void* slots, bool long_slots, i64 tokens, i64 places,
                            i64 page_size, int lane_bits, i64 chunks, i64 blocks) {
    const int thread = after_previous(platform::thread_index());
    const int lane = thread & ((1 << lane_bits) - 1), side = THREADS >> lane_bits;
    const i64 work = (tokens + side - 1) / side * chunks;
    for (i64 item = platform::block_index(); item < work; item += blocks) {
        i64 group, chunk;
        divide(item, chunks, group, chunk);
        const i64 token = group * side + (thread >> lane_bits);
        if (token >= tokens) continue;
        const i64 slot = integer_at(slots, long_slots, token);
        Pack<T, V> x[PACKS];
        i64 to[PACKS];
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const int at = (((int)chunk * PACKS + p) << lane_bits) + lane;
            if (at >= k.packs + v.packs) continue;
            const bool key = at < k.packs;
            i64 from;
            if (key) place_of<T, V>(k, at, from, to[p]);
            else place_of<T, V>(v, at - k.packs, from, to[p]);
            load<ONCE>(x[p], (const T*)(key ? k.data : v.data) + token * (key ? k.token : v.token) + from);
        }
        if (slot < 0 || slot >= places) continue;
        i64 page, place;
        divide(slot, page_size, page, place);
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const int at = (((int)chunk * PACKS + p) << lane_bits) + lane;
            if (at >= k.packs + v.packs) continue;
            const bool key = at < k.packs;
            const i64 start = page * (key ? k.page : v.page) + place * (key ? k.place : v.place);
            store((T*)(key ? k.cache : v.cache) + start + to[p], x[p]);
        }
    }
}

}  // namespace ferryman

#define FERRYMAN_APPEND(name, BYTES, V, PACKS, THREADS)                                                             \
    FERRYMAN_KERNEL(THREADS, 1024 / THREADS)                                                                         \
    void name(const void* k, const void* v, void* k_cache, void* v_cache, const void* slots, ferryman::i64 k_token,  \
              ferryman::i64 k_head, ferryman::i64 k_unit, ferryman::i64 v_token, ferryman::i64 v_head,               \
              ferryman::i64 v_unit, ferryman::i64 k_page, ferryman::i64 k_place, ferryman::i64 k_cache_head,         \
              ferryman::i64 k_cache_unit, ferryman::i64 v_page, ferryman::i64 v_place, ferryman::i64 v_cache_head,   \
              ferryman::i64 v_cache_unit, ferryman::i64 k_dim, ferryman::i64 v_dim, ferryman::i64 k_packs,           \
              ferryman::i64 v_packs, ferryman::i64 long_slots, ferryman::i64 tokens, ferryman::i64 places,           \
              ferryman::i64 page_size, ferryman::i64 lane_bits, ferryman::i64 chunks, ferryman::i64 blocks) {        \
        using namespace ferryman;                                                                                    \
        const Tokens keys{k,      k_cache, k_token,      k_head,       k_unit, k_page,                               \
                          k_place, k_cache_head, k_cache_unit, (int)k_dim, (int)k_packs};                                      \
        const Tokens values{v,       v_cache, v_token,      v_head,       v_unit, v_page,                            \
                            v_place, v_cache_head, v_cache_unit, (int)v_dim, (int)v_packs};                                    \
        append<Bits<BYTES>::type, V, PACKS, THREADS>(keys, values, slots, long_slots != 0, tokens, places, page_size, \
                                                     (int)lane_bits, chunks, blocks);                                \
    }
