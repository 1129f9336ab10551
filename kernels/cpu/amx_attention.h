// Attention of chunks in bf16 by AMX, over the plan of attention.h, which says what a tile of rows and a span are.
//
// All is transposed: a lane is a row of queries. Scores are K Q^T, so that AMX reads keys from the pages as they are,
// maximum and sum over keys are those of whole vectors, and weights of two keys are a word of a right operand as they
// come. Only values must be transposed, once for a tile's rows. Queries, weights and values are bf16, all sums float.

#pragma once

#include "amx.h"
#include "attention.h"

#if defined(WITH_AMX)

namespace paged {
namespace {

using amx::PAIR, amx::RUN;

constexpr int BLOCK = 128;  // keys whose scores are computed before their weights

// 2^x for x <= 0, relative error below 8e-5: bf16 rounds weights by up to 4e-3.
inline vec power(vec x) {
    const vec f = _mm512_reduce_ps(x, 9);  // x less the integer below it
    vec p = splat(0.07802455f);            // minimax polynomial of 2^f on [0, 1)
    p = p * f + 0.22606718f;
    p = p * f + 0.69583349f;
    return _mm512_scalef_ps(p * f + 0.99992523f, x);
}

class TileWorker {
   public:
    static constexpr int TILE_ROWS = 192;

    TileWorker(const Arguments& a, const Plan& plan, float* partials, std::atomic<int>* done)
        : a_(a), plan_(plan), partials_(partials), done_(done), group_(a.Hq / a.Hkv), D_(a.Dv), state_(RUN * (D_ + 2)),
          scale_(a.softcap != 0 ? 1.0f : float(a.scale) * LOG2E) {
        static thread_local Memory memory;
        const int64_t lanes = padded(std::max<int64_t>(TILE_ROWS, group_));
        const int64_t sizes[] = {lanes * D_ * 2, D_ * BLOCK * 2, PAIR * BLOCK * 4, PAIR * BLOCK * 2, lanes * (D_ + 2) * 4, lanes * 4, lanes * 4};
        int64_t total = 0, number = 0;
        for (int64_t size : sizes) total += size + 128;
        memory.reserve(total);
        auto take = [&](auto*& p) { p = static_cast<std::remove_reference_t<decltype(p)>>(memory.take(sizes[number++])); };
        take(queries_), take(values_), take(scores_), take(weights_), take(own_), take(first_), take(end_);
        amx::Shape().use();
    }
    ~TileWorker() { _tile_release(); }

    static int64_t padded(int64_t rows) { return ceil_div(rows, PAIR) * PAIR; }
    static int64_t state_floats(const Arguments& a, int64_t R) { return padded(R) * (a.Dv + 2); }

    void run(const Item& item) {
        const Tile& tile = plan_.tiles[item.tile];
        const int64_t R = (tile.end - tile.first) * group_, size = state_floats(a_, R);
        load_queries(tile, R);
        if (item.span < 0) {
            attend(tile, R, 0, INT64_MAX, own_);
            return finish(tile, R, own_);
        }
        float* states = partials_ + tile.partial;
        const int64_t from = (tile.from_span + item.span) * SPAN;
        attend(tile, R, from, from + SPAN, states + item.span * size);
        if (done_[tile.counter].fetch_add(1, std::memory_order_acq_rel) + 1 < tile.num_spans) return;
        for (int64_t i = 1; i < tile.num_spans; ++i)  // the last thread merges, in the order of the spans
            for (int64_t lane = 0; lane < R; lane += RUN) merge(state(states, lane), state(states + i * size, lane));
        finish(tile, R, states);
    }

   private:
    // Of RUN lanes: weighted values [D][RUN], the largest score and the sum of weights.
    float* state(float* states, int64_t lane) const { return states + lane / RUN * state_; }
    float* max_of(float* state) const { return state + RUN * D_; }
    float* sum_of(float* state) const { return state + RUN * (D_ + 1); }

    void merge(float* all, float* span) const {
        const vec old = load(max_of(all)), more = load(max_of(span)), top = largest_of(old, more);
        const vec old_share = power((old - top) * scale_), share = power((more - top) * scale_);
        for (int64_t d = 0; d < RUN * D_; d += RUN) store(all + d, load(all + d) * old_share + load(span + d) * share);
        store(max_of(all), top);
        store(sum_of(all), load(sum_of(all)) * old_share + load(sum_of(span)) * share);
    }

    // A lane is query first + lane / group, head head * group + lane % group. Lanes past R repeat the last.
    void load_queries(const Tile& tile, int64_t R) {  // to [lanes / RUN][D / 2 words][RUN]
        const int64_t past = a_.kv_len[tile.sequence] - a_.query_start[tile.sequence + 1];
        for (int64_t lane = 0; lane < padded(R); lane += RUN) {
            const bf16* q[RUN];
            for (int i = 0; i < RUN; ++i) {
                const int64_t r = std::min(lane + i, R - 1), row = tile.first + r / group_;
                q[i] = static_cast<const bf16*>(a_.q) + row * a_.q_token + (tile.head * group_ + r % group_) * a_.q_head;
                first_[lane + i] = int(first_key(a_, past + row)), end_[lane + i] = int(end_of_keys(a_, past, row + 1));
            }
            for (int64_t d = 0; d < D_; d += PAIR) {
                __m512i words[RUN];
                for (int i = 0; i < RUN; ++i) words[i] = _mm512_loadu_si512(q[i] + d);
                transpose16(words);
                for (int i = 0; i < RUN; ++i) _mm512_store_si512(queries_ + lane * D_ + (d + 2 * i) * RUN, words[i]);
            }
        }
    }

    // Computes the state of the tile's rows over the keys [from, to) that they see.
    void attend(const Tile& tile, int64_t R, int64_t from, int64_t to, float* states) {
        const int64_t low = first_[0];
        to = std::min<int64_t>(to, end_[R - 1]);
        for (int64_t lane = 0; lane < padded(R); lane += RUN) {
            std::memset(state(states, lane), 0, sizeof(float) * state_);
            store(max_of(state(states, lane)), splat(LOWEST));
        }
        for (from = std::max(from, low / BLOCK * BLOCK); from < to; from += BLOCK) {
            pack(tile, from, low, to);
            for (int64_t lane = 0; lane < R; lane += PAIR) {
                const int64_t last = std::min<int64_t>(to, end_[std::min(lane + PAIR, R) - 1]);
                const int keys = int(std::min<int64_t>(BLOCK, padded(last - from)));
                if (keys <= 0 || from + keys <= first_[lane]) continue;  // none of these rows sees a key of this block
                compute_scores(lane, keys);
                for (int i = 0; i < 2; ++i)
                    softmax(lane + i * RUN, scores_ + i * BLOCK * RUN, weights_ + i * BLOCK * RUN, state(states, lane + i * RUN), from, keys);
                add_values(state(states, lane), keys);
            }
        }
    }

    // Finds the keys of a block, and transposes its values: to tiles [D / RUN][BLOCK / PAIR] of [RUN][PAIR keys]. Values
    // outside [low, end) become zeros, whatever the pages hold; the scores of such keys count for no row.
    void pack(const Tile& tile, int64_t from, int64_t low, int64_t end) {
        const int32_t* table = a_.page_table + tile.sequence * a_.table_stride;
        auto find = [&](int64_t token, const bf16*& key, const bf16*& value) {
            const int64_t page = table[token / a_.page_size], offset = token % a_.page_size;
            key = static_cast<const bf16*>(a_.k) + page * a_.k_page + tile.head * a_.k_head + offset * D_;
            value = static_cast<const bf16*>(a_.v) + page * a_.v_page + tile.head * a_.v_head + offset * a_.v_token;
        };
        const bf16* values[BLOCK / RUN];
        for (int i = 0; i < BLOCK / RUN; ++i)
            find(std::clamp(from + i * RUN, low / RUN * RUN, (end - 1) / RUN * RUN), keys_[i], values[i]);  // no other page is read
        for (int64_t token = from + BLOCK; token < std::min(from + 2 * BLOCK, end); token += RUN) {  // is fetched meanwhile
            const bf16 *key, *value;
            find(token, key, value);
            for (int64_t i = 0; i < RUN * D_; i += PAIR) __builtin_prefetch(key + i, 0, 2), __builtin_prefetch(value + i, 0, 2);
        }
        auto value = [&](int64_t key, int64_t d) {
            if (from + key < low || from + key >= end) return _mm512_setzero_si512();
            const bf16* at = values[key / RUN] + key % RUN * a_.v_token + d;
            return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
        };
        for (int64_t key = 0; key < std::min<int64_t>(BLOCK, end - from); key += PAIR)
            for (int64_t d = 0; d < D_; d += RUN) {
                __m512i words[RUN];
                for (int i = 0; i < RUN; ++i)
                    words[i] = _mm512_or_si512(value(key + 2 * i, d), _mm512_slli_epi32(value(key + 2 * i + 1, d), 16));
                transpose16(words);
                for (int i = 0; i < RUN; ++i) _mm512_store_si512(values_ + d * BLOCK + key * RUN + i * PAIR, words[i]);
            }
    }

    // Scores of the block's first keys with the queries of PAIR lanes, to [2][BLOCK][RUN].
    __attribute__((noinline)) void compute_scores(int64_t lane, int keys) {
        asm volatile("" ::: "memory");  // compilers do not see what loads of tiles read
        for (int key = 0; key < keys; key += PAIR) {
            const bf16 *top = keys_[key / RUN], *bottom = keys_[key / RUN + 1], *left = queries_ + lane * D_, *right = left + RUN * D_;
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
            for (int64_t d = 0; d < D_; d += PAIR) {
                _tile_loadd(4, top + d, D_ * 2); _tile_loadd(5, bottom + d, D_ * 2);
                _tile_loadd(6, left + d * RUN, 64); _tile_loadd(7, right + d * RUN, 64);
                _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
            }
            float* to = scores_ + key * RUN;
            _tile_stored(0, to, 64); _tile_stored(1, to + BLOCK * RUN, 64);
            _tile_stored(2, to + RUN * RUN, 64); _tile_stored(3, to + (BLOCK + RUN) * RUN, 64);
        }
    }

    // Adds the block's values, by the weights of its first keys, to the states of PAIR lanes.
    __attribute__((noinline)) void add_values(float* left, int keys) {
        asm volatile("" ::: "memory");
        float* right = left + state_;
        for (int64_t d = 0; d < D_; d += PAIR) {
            float* parts[] = {left + d * RUN, right + d * RUN, left + (d + RUN) * RUN, right + (d + RUN) * RUN};
            _tile_loadd(0, parts[0], 64); _tile_loadd(1, parts[1], 64); _tile_loadd(2, parts[2], 64); _tile_loadd(3, parts[3], 64);
            for (int key = 0; key < keys; key += PAIR) {
                const bf16 *top = values_ + d * BLOCK + key * RUN, *word = weights_ + key * RUN;
                _tile_loadd(4, top, 64); _tile_loadd(5, top + RUN * BLOCK, 64);
                _tile_loadd(6, word, 64); _tile_loadd(7, word + BLOCK * RUN, 64);
                _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, parts[0], 64); _tile_stored(1, parts[1], 64); _tile_stored(2, parts[2], 64); _tile_stored(3, parts[3], 64);
        }
    }

    // Turns the scores of RUN lanes with `keys` keys from `from` on into weights, and updates the lanes' state.
    void softmax(int64_t lane, float* scores, bf16* weights, float* state, int64_t from, int keys) const {
        if (a_.softcap != 0)
            for (int i = 0; i < keys * RUN; i += RUN)
                store(scores + i, tanh(load(scores + i) * float(a_.scale / a_.softcap)) * (float(a_.softcap) * LOG2E));
        if (first_[lane + RUN - 1] > from || end_[lane] < from + keys) {
            const __m512i first = _mm512_load_si512(first_ + lane), end = _mm512_load_si512(end_ + lane);
            for (int i = 0; i < keys; ++i) {
                const __m512i key = _mm512_set1_epi32(int(from) + i);
                const __mmask16 sees = _mm512_cmple_epi32_mask(first, key) & _mm512_cmplt_epi32_mask(key, end);
                store(scores + i * RUN, _mm512_mask_blend_ps(sees, splat(LOWEST), load(scores + i * RUN)));
            }
        }
        const vec old = load(max_of(state));
        vec tops[4] = {old, old, old, old};
        for (int i = 0; i < keys; i += 4)
            for (int j = 0; j < 4; ++j) tops[j] = _mm512_max_ps(tops[j], load(scores + (i + j) * RUN));
        const vec top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
        vec sums[2] = {load(sum_of(state)), vec{}};
        if (_mm512_cmp_ps_mask(top, old, _CMP_GT_OQ)) {
            const vec shrink = power((old - top) * scale_);
            for (int64_t d = 0; d < RUN * D_; d += RUN) store(state + d, load(state + d) * shrink);
            sums[0] *= shrink;
            store(max_of(state), top);
        }
        // A lane that has seen no key has weights of 0.
        const vec shift = _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(top, splat(LOWEST), _CMP_GT_OQ), top, splat(scale_));
        const __m512i in_turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                                 19, 3, 18, 2, 17, 1, 16, 0);
        for (int i = 0; i < keys * RUN; i += 2 * RUN) {
            const vec even = power(load(scores + i) * scale_ - shift), odd = power(load(scores + i + RUN) * scale_ - shift);
            sums[0] += even, sums[1] += odd;
            _mm512_store_si512(weights + i, _mm512_permutexvar_epi16(in_turn, (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
        }
        store(sum_of(state), sums[0] + sums[1]);
    }

    void finish(const Tile& tile, int64_t R, float* states) const {
        for (int64_t lane = 0; lane < R; lane += RUN) {
            float* from = state(states, lane);
            const vec top = load(max_of(from)) * scale_;
            vec factor = splat(1.0f), total = load(sum_of(from));
            if (a_.sinks) {
                vec sink;
                for (int i = 0; i < RUN; ++i) sink[i] = a_.sinks[tile.head * group_ + (lane + i) % group_] * LOG2E;
                const vec most = largest_of(top, sink);
                factor = power(top - most);
                total = total * factor + power(sink - most);
            }
            factor /= total;
            for (int64_t d = 0; d < D_; d += RUN) {
                __m512i rows[RUN];
                for (int i = 0; i < RUN; ++i) rows[i] = (__m512i)(load(from + (d + i) * RUN) * factor);
                transpose16(rows);
                for (int64_t r = lane; r < std::min(lane + RUN, R); ++r) {
                    const int64_t row = tile.first + r / group_, head = tile.head * group_ + r % group_;
                    narrow(static_cast<bf16*>(a_.out) + (row * a_.Hq + head) * D_ + d, (vec)rows[r - lane]);
                }
            }
        }
    }

    const Arguments& a_;
    const Plan& plan_;
    float* partials_;
    std::atomic<int>* done_;
    const int64_t group_, D_, state_;  // state_: floats of RUN lanes' state
    const float scale_;                // from scores to powers of two
    const bf16* keys_[BLOCK / RUN];    // of the block, in the pages
    bf16 *queries_, *values_, *weights_;  // weights_: [2][BLOCK / 2 words][RUN]
    float *scores_, *own_;
    int *first_, *end_;  // of each lane: the keys that it sees
};

}  // namespace
}  // namespace paged

#endif
