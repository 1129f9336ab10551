// Attention over paged keys and values on a CPU, fp32 and bf16: flash-style tiles for chunks and decodes alike.
//
// A tile is up to TILE_ROWS rows of queries (all heads that share a kv head, of consecutive tokens) against blocks of
// KEYS keys. The softmax state is reset every SPAN keys, and the spans are merged in order, whether one thread computes
// all spans or several threads one span each. So a row's result never depends on other rows, nor on the threads.

#pragma once

#include "numbers.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

namespace paged {
namespace {

constexpr int MAX_MB = 6, MAX_NB = LANES == 16 ? 4 : 2;  // MAX_MB x MAX_NB accumulators fill the register file
constexpr int KEYS = 64;
constexpr int64_t SPAN = 512;
constexpr float LOWEST = -1e30f;  // finite: differences of it are never NaN
constexpr float LOG2E = 1.44269504f;

inline vec iota() {
    vec v;
    for (int i = 0; i < LANES; ++i) v[i] = float(i);
    return v;
}
inline float largest(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#elif defined(__AVX2__)
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#endif
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; ++i) v[i] = std::max(v[i], v[i + step]);
    return v[0];
}

// 2^x for x <= 127, relative error below 3e-7; results under 2^-126 become 2^-126
inline vec exp2(vec x) {
    x = largest_of(x, splat(-126.0f));
    const vec n = nearest_integer(x), f = x - n;  // Taylor's series of 2^f on [-1/2, 1/2]
    vec p = splat(1.5403530393e-4f);
    p = p * f + 1.3333558146e-3f;
    p = p * f + 9.6181291076e-3f;
    p = p * f + 5.5504108665e-2f;
    p = p * f + 2.4022650696e-1f;
    p = p * f + 6.9314718056e-1f;
    return times_power_of_two(p * f + 1.0f, n);
}
inline float exp2(float x) { return exp2(splat(x))[0]; }

inline vec tanh(vec x) {
    x = largest_of(least_of(x, splat(15.0f)), splat(-15.0f));
    return 1.0f - 2.0f / (exp2(x * (2 * LOG2E)) + 1.0f);
}

// --- operands of a multiply-add: one 32-bit word per lane, a float or a pair of bf16 --------------------------------

struct Floats {
    using element = float;
    static constexpr int PER_WORD = 1;
    static vec dot(vec acc, vec a, vec b) { return a * b + acc; }
};

#if defined(__AVX512BF16__)
struct Pairs {
    using element = bf16;
    static constexpr int PER_WORD = 2;
    static vec dot(vec acc, vec a, vec b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
};
using ForBf16 = Pairs;
#else
using ForBf16 = Floats;
#endif

// out[m][lanes] (+)= sum over w of a[m][w] * b[w][lanes], for MB rows and NB vectors of lanes; ld* in words
template <class C, int MB, int NB>
inline void product(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int W, float* out, int64_t ldo, bool add) {
    vec acc[MB][NB];
    for (int m = 0; m < MB; ++m)
        for (int n = 0; n < NB; ++n) acc[m][n] = add ? load(out + m * ldo + n * LANES) : vec{};
    for (int w = 0; w < W; ++w) {
        vec right[NB];
        for (int n = 0; n < NB; ++n) right[n] = load(b + w * ldb + n * LANES);
        for (int m = 0; m < MB; ++m) {
            float word;
            std::memcpy(&word, a + m * lda + w, 4);
            const vec left = splat(word);
            for (int n = 0; n < NB; ++n) acc[m][n] = C::dot(acc[m][n], left, right[n]);
        }
    }
    for (int m = 0; m < MB; ++m)
        for (int n = 0; n < NB; ++n) store(out + m * ldo + n * LANES, acc[m][n]);
}

// `product` for 1 <= R <= MB rows and `vectors` vectors of lanes
template <class C, int MB = MAX_MB>
inline void matmul(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int W, float* out, int64_t ldo, bool add, int R,
                   int vectors) {
    if constexpr (MB > 1)
        if (R < MB) return matmul<C, MB - 1>(a, lda, b, ldb, W, out, ldo, add, R, vectors);
    int n = 0;
    if constexpr (MAX_NB > 2 || MB <= 3)
        for (; n + 4 <= vectors; n += 4) product<C, MB, 4>(a, lda, b + n * LANES, ldb, W, out + n * LANES, ldo, add);
    for (; n + 2 <= vectors; n += 2) product<C, MB, 2>(a, lda, b + n * LANES, ldb, W, out + n * LANES, ldo, add);
    for (; n < vectors; ++n) product<C, MB, 1>(a, lda, b + n * LANES, ldb, W, out + n * LANES, ldo, add);
}

#if defined(__AVX512F__)
__attribute__((always_inline)) inline void transpose16(__m512i (&r)[16]) {  // 16 x 16 words
    __m512i t[16];
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}
#elif defined(__AVX2__)
__attribute__((always_inline)) inline void transpose8(__m256 (&r)[8]) {  // 8 x 8 words
    __m256 t[8];
    for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 8; ++i) t[i] = r[i];
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
}
#endif

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Arguments {  // strides in elements; elements of a token, and keys of a page, are adjacent
    int64_t S, table_stride, Hq, Hkv, Dk, Dv, page_size;
    int64_t q_token, q_head, k_page, k_head, v_page, v_head, v_token;
    int64_t window, attention_chunk;  // tokens; 0: none
    double scale, softcap;  // softcap 0: none
    const void *q, *k, *v;
    const int32_t *query_start, *kv_len, *page_table;
    const int32_t* key_end;  // [T]: a row sees the keys before this one; or null: up to its own
    const float* sinks;  // or null
    void* out;           // [T, Hq, Dv]
};

struct Tile {
    int64_t sequence, head, first, end;  // query rows [first, end) of the flat batch
    int64_t from_span, num_spans;        // the spans its rows see
    int64_t partial = -1;                // offset of the spans' states in `partials`; -1: the tile is not split
    int64_t counter = -1;                // index of the counter of the tile's finished spans
};

struct Item {
    int64_t tile, span;  // span -1: all spans
    int64_t cost;
};

struct Plan {
    std::vector<Tile> tiles;
    std::vector<Item> items;
    int64_t partial_floats = 0, num_counters = 0, cost = 0;
};

// Returns the end of the keys that the rows before `row` see. Later rows of a sequence never see fewer.
inline int64_t end_of_keys(const Arguments& a, int64_t past, int64_t row) {
    return a.key_end ? a.key_end[row - 1] : past + row;
}

// Returns the first key that the row at `position` sees. Later rows of a sequence never see an earlier one.
inline int64_t first_key(const Arguments& a, int64_t position) {
    if (a.attention_chunk) return position / a.attention_chunk * a.attention_chunk;
    return a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
}

// Divides the work of `W`s for sequences of `least` rows or more, and fewer than `most`. W::state_floats: of the state of R
// rows over one span.
template <class W>
inline Plan make_plan(const Arguments& a, int num_threads, int64_t least = 0, int64_t most = INT64_MAX) {
    Plan plan;
    const int64_t group = a.Hq / a.Hkv, per_tile = std::max<int64_t>(1, W::TILE_ROWS / group);
    for (int64_t s = 0; s < a.S; ++s) {
        const int64_t rows = a.query_start[s + 1] - a.query_start[s];
        if (rows < least || rows >= most) continue;
        const int64_t past = a.kv_len[s] - a.query_start[s + 1];  // position = past + row
        for (int64_t q = a.query_start[s]; q < a.query_start[s + 1]; q += per_tile) {
            const int64_t end = std::min<int64_t>(q + per_tile, a.query_start[s + 1]);
            const int64_t low = first_key(a, past + q);
            const int64_t from_span = low / SPAN, num_spans = ceil_div(end_of_keys(a, past, end), SPAN) - from_span;
            for (int64_t h = 0; h < a.Hkv; ++h) plan.tiles.push_back({s, h, q, end, from_span, num_spans});
        }
    }
    const bool few = int64_t(plan.tiles.size()) < 4 * num_threads;
    for (int64_t t = 0; t < int64_t(plan.tiles.size()); ++t) {
        Tile& tile = plan.tiles[t];
        const int64_t R = (tile.end - tile.first) * group;
        const int64_t past = a.kv_len[tile.sequence] - a.query_start[tile.sequence + 1];
        const int64_t low = first_key(a, past + tile.first);
        const int64_t high = end_of_keys(a, past, tile.end);
        const int64_t per_key = 16 + R;  // fetching and packing a key takes about as long as 16 rows
        if (num_threads > 1 && tile.num_spans > 1 && (few || R <= 16)) {
            tile.partial = plan.partial_floats;
            tile.counter = plan.num_counters++;
            plan.partial_floats += tile.num_spans * W::state_floats(a, R);
            for (int64_t i = 0; i < tile.num_spans; ++i) {
                const int64_t begin = (tile.from_span + i) * SPAN;
                const int64_t keys = std::min(high, begin + SPAN) - std::max(low, begin);
                plan.items.push_back({t, i, keys * per_key});
            }
        } else {
            plan.items.push_back({t, -1, (high - low) * per_key});
        }
    }
    for (const Item& item : plan.items) plan.cost += item.cost * (a.Dk + a.Dv);
    std::stable_sort(plan.items.begin(), plan.items.end(), [](const Item& x, const Item& y) { return x.cost > y.cost; });
    return plan;
}

// One thread's working memory, reused by later calls.
class Memory {
   public:
    ~Memory() { std::free(bytes_); }
    void* take(size_t size) {
        size = ceil_div(size, 64) * 64 + 64;  // vector loads may run past the end of a row
        void* p = bytes_ + used_;
        used_ += size;
        return p;
    }
    void reserve(size_t size) {
        used_ = 0;
        if (size > capacity_) {
            std::free(bytes_);
            bytes_ = static_cast<char*>(std::aligned_alloc(64, ceil_div(size, 64) * 64));
            if (!bytes_) std::abort();
            capacity_ = size;
        }
    }

   private:
    char* bytes_ = nullptr;
    size_t capacity_ = 0, used_ = 0;
};

template <class In, class C>
class Worker {
   public:
    using element = typename C::element;
    static constexpr int PER_WORD = C::PER_WORD, TILE_ROWS = 96;

    Worker(const Arguments& a, const Plan& plan, float* partials, std::atomic<int>* done)
        : a_(a), plan_(plan), partials_(partials), done_(done), group_(int(a.Hq / a.Hkv)),
          words_(int(ceil_div(a.Dk, PER_WORD))), width_(int(ceil_div(a.Dv, LANES) * LANES)) {
        static thread_local Memory memory;
        const size_t max_rows = std::max<int64_t>(TILE_ROWS, group_);
        const size_t sizes[] = {
            size_t(words_) * KEYS * 4,   size_t(KEYS) / PER_WORD * width_ * 4, max_rows * words_ * 4,
            MAX_MB * KEYS * 4,           MAX_MB * KEYS * sizeof(element),      max_rows * width_ * 4,
            max_rows * width_ * 4,       max_rows * 4 * 4,                     max_rows * sizeof(vec),
        };
        size_t total = 0;
        for (size_t size : sizes) total += ceil_div(size, 64) * 64 + 64;
        memory.reserve(total);
        keys_ = static_cast<uint32_t*>(memory.take(sizes[0]));
        values_ = static_cast<uint32_t*>(memory.take(sizes[1]));
        queries_ = static_cast<uint32_t*>(memory.take(sizes[2]));
        scores_ = static_cast<float*>(memory.take(sizes[3]));
        weights_ = static_cast<element*>(memory.take(sizes[4]));
        now_.out = static_cast<float*>(memory.take(sizes[5]));
        all_.out = static_cast<float*>(memory.take(sizes[6]));
        now_.max = static_cast<float*>(memory.take(sizes[7]));
        sums_ = static_cast<float*>(memory.take(sizes[8]));
        now_.sum = now_.max + max_rows;
        all_.max = now_.sum + max_rows;
        all_.sum = all_.max + max_rows;
    }

    static int64_t state_floats(const Arguments& a, int64_t R) { return R * (ceil_div(a.Dv, LANES) * LANES + 2); }

    void run(const Item& item) {
        const Tile& tile = plan_.tiles[item.tile];
        const int R = int((tile.end - tile.first) * group_);
        load_queries(tile, R);
        if (tile.num_spans == 1) {
            attend(tile, R, tile.from_span);
            return finish(tile, now_, R);
        }
        if (item.span < 0) {
            reset(all_, R);
            for (int64_t i = 0; i < tile.num_spans; ++i) {
                attend(tile, R, tile.from_span + i);
                merge(now_, R);
            }
            finish(tile, all_, R);
            return;
        }
        attend(tile, R, tile.from_span + item.span);
        const State saved = partial(tile, item.span, R);
        std::memcpy(saved.out, now_.out, sizeof(float) * R * width_);
        std::memcpy(saved.max, now_.max, sizeof(float) * R);
        std::memcpy(saved.sum, now_.sum, sizeof(float) * R);
        if (done_[tile.counter].fetch_add(1, std::memory_order_acq_rel) + 1 < tile.num_spans) return;
        reset(all_, R);  // the last thread merges, in the order of the spans
        for (int64_t i = 0; i < tile.num_spans; ++i) merge(partial(tile, i, R), R);
        finish(tile, all_, R);
    }

   private:
    struct State {  // of each row: running maximum (base 2), sum of weights, weighted values
        float *max, *sum, *out;
    };

    State partial(const Tile& tile, int64_t span, int R) const {
        float* p = partials_ + tile.partial + span * state_floats(a_, R);
        return {p + R * width_, p + R * width_ + R, p};
    }

    void reset(State& state, int R) {
        std::fill(state.max, state.max + R, LOWEST);
        std::memset(state.sum, 0, sizeof(float) * R);
        std::memset(state.out, 0, sizeof(float) * R * width_);
    }

    void merge(const State& span, int R) {
        for (int r = 0; r < R; ++r) {
            const float top = std::max(all_.max[r], span.max[r]);
            const float old_share = exp2(all_.max[r] - top), new_share = exp2(span.max[r] - top);
            all_.max[r] = top;
            all_.sum[r] = all_.sum[r] * old_share + span.sum[r] * new_share;
            float *to = all_.out + r * width_, *from = span.out + r * width_;
            for (int d = 0; d < width_; d += LANES) store(to + d, load(to + d) * old_share + load(from + d) * new_share);
        }
    }

    // row r is query first + r / group, head head * group + r % group
    void load_queries(const Tile& tile, int R) {
        for (int r = 0; r < R; ++r) {
            const In* q = static_cast<const In*>(a_.q) + (tile.first + r / group_) * a_.q_token +
                          (tile.head * group_ + r % group_) * a_.q_head;
            copy_row(q, reinterpret_cast<element*>(queries_ + r * words_));
        }
    }

    void copy_row(const In* from, element* to) const {
        if constexpr (std::is_same_v<In, element>) {
            std::memcpy(to, from, sizeof(In) * a_.Dk);
        } else {
            for (int64_t d = 0; d < a_.Dk; ++d) to[d] = to_float(from[d]);
        }
        if (PER_WORD == 2 && a_.Dk % 2) to[a_.Dk] = 0;
    }

    // Packs keys [low, high) of the block that starts at `from`; the others become zeros, whatever the pages hold.
    void pack(const Tile& tile, int64_t from, int64_t low, int64_t high) {
        alignas(64) static const In zeros[1024] = {};  // head_dim is at most 1024
        const int32_t* table = a_.page_table + tile.sequence * a_.table_stride;
        const In *k[KEYS], *v[KEYS];
        const int64_t first = std::max(from, low), end = std::min(from + KEYS, high);
        for (int64_t j = 0; j < first - from; ++j) k[j] = v[j] = zeros;
        for (int64_t token = first; token < end;) {
            const int64_t offset = token % a_.page_size, count = std::min(a_.page_size - offset, end - token);
            const int64_t page = table[token / a_.page_size];
            const In* key = static_cast<const In*>(a_.k) + page * a_.k_page + tile.head * a_.k_head + offset * a_.Dk;
            const In* value = static_cast<const In*>(a_.v) + page * a_.v_page + tile.head * a_.v_head + offset * a_.v_token;
            for (int64_t i = 0; i < count; ++i, ++token, key += a_.Dk, value += a_.v_token) {
                k[token - from] = key;
                v[token - from] = value;
            }
        }
        for (int64_t j = end - from; j < KEYS; ++j) k[j] = v[j] = zeros;
        fetch(k, a_.Dk);
        fetch(v, a_.Dv);
        pack_keys(k);
        pack_values(v);
    }

    // Fetches rows of D elements from four places of the block in turn: hardware then sees four streams, and reads ahead in each.
    static void fetch(const In* const (&rows)[KEYS], int64_t D) {
        for (int j = 0; j < KEYS / 4; ++j)
            for (int64_t d = 0; d < D; d += 64 / int64_t(sizeof(In)))
                for (int g = 0; g < KEYS; g += KEYS / 4) __builtin_prefetch(rows[g + j] + d);
    }

    void pack_keys(const In* const (&k)[KEYS]) {  // to [words][KEYS]
        int64_t done = 0;
#if defined(__AVX512F__)
        done = a_.Dk / (16 * PER_WORD) * (16 * PER_WORD);
        for (int j = 0; j < KEYS; j += 16)
            for (int64_t d = 0; d < done; d += 16 * PER_WORD) {
                __m512i r[16];
                for (int i = 0; i < 16; ++i) {
                    if constexpr (std::is_same_v<In, element>)
                        r[i] = _mm512_loadu_si512(k[j + i] + d);
                    else
                        r[i] = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(k[j + i] + d))), 16);
                }
                transpose16(r);
                for (int i = 0; i < 16; ++i) _mm512_store_si512(keys_ + (d / PER_WORD + i) * KEYS + j, r[i]);
            }
#elif defined(__AVX2__)
        done = a_.Dk / 8 * 8;
        for (int j = 0; j < KEYS; j += 8)
            for (int64_t d = 0; d < done; d += 8) {
                __m256 r[8];
                for (int i = 0; i < 8; ++i) r[i] = widen(k[j + i] + d);
                transpose8(r);
                for (int i = 0; i < 8; ++i) store(keys_ + (d + i) * KEYS + j, r[i]);
            }
#endif
        element* to = reinterpret_cast<element*>(keys_);
        for (int64_t d = done; d < int64_t(words_) * PER_WORD; ++d)
            for (int j = 0; j < KEYS; ++j) {
                element value = 0;
                if (d < a_.Dk) {
                    if constexpr (std::is_same_v<In, element>)
                        value = k[j][d];
                    else
                        value = to_float(k[j][d]);
                }
                to[(d / PER_WORD * KEYS + j) * PER_WORD + d % PER_WORD] = value;
            }
    }

    void pack_values(const In* const (&v)[KEYS]) {  // to [KEYS / PER_WORD][width]
        const int64_t Dv = a_.Dv;
        for (int j = 0; j < KEYS; j += PER_WORD) {
            uint32_t* to = values_ + j / PER_WORD * width_;
            int64_t d = 0;
#if defined(__AVX512BF16__)
            if constexpr (PER_WORD == 2)
                for (; d + 16 <= Dv; d += 16) {
                    const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v[j] + d)));
                    const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v[j + 1] + d)));
                    _mm512_store_si512(to + d, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
                }
#endif
            if constexpr (PER_WORD == 1) {
                float* row = reinterpret_cast<float*>(to);
                for (; d < Dv; ++d) row[d] = to_float(v[j][d]);
            } else {
                for (; d < Dv; ++d) to[d] = uint32_t(v[j][d]) | uint32_t(v[j + 1][d]) << 16;
            }
            for (; d < width_; ++d) to[d] = 0;
        }
    }

    // Computes the softmax state of the tile's rows over one span, into now_.
    void attend(const Tile& tile, int R, int64_t span) {
        reset(now_, R);
        std::memset(sums_, 0, sizeof(vec) * R);
        const int64_t past = a_.kv_len[tile.sequence] - a_.query_start[tile.sequence + 1];
        const int64_t low = first_key(a_, past + tile.first);
        const int64_t high = std::min(end_of_keys(a_, past, tile.end), (span + 1) * SPAN);
        for (int64_t from = std::max(low / KEYS * KEYS, span * SPAN); from < high; from += KEYS) {
            pack(tile, from, low, high);
            for (int r = 0; r < R; r += MAX_MB) {  // few rows at a time, so that keys and values stay in the first-level cache
                const int rows = std::min(MAX_MB, R - r);
                const int64_t last = end_of_keys(a_, past, tile.first + (r + rows - 1) / group_ + 1);
                const int count = int(std::min<int64_t>(KEYS, last - from));
                if (count <= 0) continue;  // none of these rows sees a key of this block
                matmul<C>(queries_ + r * words_, words_, keys_, KEYS, words_, scores_, KEYS, false, rows, KEYS / LANES);
                for (int i = 0; i < rows; ++i) {
                    const int64_t row = tile.first + (r + i) / group_;
                    softmax(r + i, scores_ + i * KEYS, weights_ + i * KEYS, past + row, end_of_keys(a_, past, row + 1), from);
                }
                matmul<C>(reinterpret_cast<const uint32_t*>(weights_), KEYS / PER_WORD, values_, width_,
                          int(ceil_div(count, PER_WORD)), now_.out + r * width_, width_, true, rows, width_ / LANES);
            }
        }
        for (int r = 0; r < R; ++r) now_.sum[r] = sum(load(sums_ + r * LANES));
    }

    // Turns the scores of the row at `position`, which sees the keys before `end`, with the keys from `from` on into
    // weights, and updates the row's state.
    inline void softmax(int r, const float* scores, element* weights, int64_t position, int64_t end, int64_t from) {
        const int64_t low = std::clamp<int64_t>(first_key(a_, position) - from, 0, KEYS);
        const int64_t high = std::clamp<int64_t>(end - from, 0, KEYS);
        const bool whole = low == 0 && high == KEYS;
        constexpr int N = KEYS / LANES;
        vec score[N];
        if (a_.softcap != 0) {
            const float inner = float(a_.scale / a_.softcap), outer = float(a_.softcap) * LOG2E;
            for (int n = 0; n < N; ++n) score[n] = tanh(load(scores + n * LANES) * inner) * outer;
        } else {
            const float scale = float(a_.scale * 1.4426950408889634);
            for (int n = 0; n < N; ++n) score[n] = load(scores + n * LANES) * scale;
        }
        if (!whole)
            for (int n = 0; n < N; ++n) {
                const vec at = iota() + float(n * LANES);
                score[n] = (at >= float(low)) & (at < float(high)) ? score[n] : splat(LOWEST);
            }
        vec top = score[0];
        for (int n = 1; n < N; ++n) top = largest_of(top, score[n]);
        const float peak = std::max(now_.max[r], largest(top));
        vec total = load(sums_ + r * LANES);
        if (peak > now_.max[r]) {
            const float shrink = exp2(now_.max[r] - peak);
            float* out = now_.out + r * width_;
            for (int d = 0; d < width_; d += LANES) store(out + d, load(out + d) * shrink);
            total *= shrink;
            now_.max[r] = peak;
        }
        for (int n = 0; n < N; ++n) {
            vec p = exp2(score[n] - peak);
            if (!whole) {
                const vec at = iota() + float(n * LANES);
                p = (at >= float(low)) & (at < float(high)) ? p : vec{};
            }
            total += p;
            narrow(weights + n * LANES, p);
        }
        store(sums_ + r * LANES, total);
    }

    void finish(const Tile& tile, const State& state, int R) {
        for (int r = 0; r < R; ++r) {
            const int64_t head = tile.head * group_ + r % group_;
            float scale = 1.0f, total = state.sum[r];
            if (a_.sinks) {
                const float sink = a_.sinks[head] * LOG2E, top = std::max(state.max[r], sink);
                scale = exp2(state.max[r] - top);
                total = total * scale + exp2(sink - top);
            }
            scale /= total;
            In* out = static_cast<In*>(a_.out) + ((tile.first + r / group_) * a_.Hq + head) * a_.Dv;
            const float* from = state.out + r * width_;
            int64_t d = 0;
            for (; d + LANES <= a_.Dv; d += LANES) narrow(out + d, load(from + d) * scale);
            for (; d < a_.Dv; ++d) out[d] = from_float<In>(from[d] * scale);
        }
    }

    const Arguments& a_;
    const Plan& plan_;
    float* partials_;
    std::atomic<int>* done_;
    const int group_, words_, width_;
    uint32_t *keys_, *values_, *queries_;
    float *scores_, *sums_;  // sums_: the sum of each row's weights, lane by lane
    element* weights_;
    State now_, all_;
};

}  // namespace
}  // namespace paged
