// A stack of Llama-shaped decoder layers over paged KV, bf16, one parallel region per forward pass.
//
// Between layers and operations the threads wait at a spinning barrier of our own. Waking OpenMP's passive threads for
// each operation takes longer than a decode step's arithmetic (45 us a region on the machine this was written on).
// Every row is computed in the same order whatever the other rows are, so results do not depend on the batch.

#include "rounded.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

inline __m512 load16(const bf16* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline void store16(bf16* p, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
inline __m512 round16(__m512 x) {  // to bf16 and back, where transformers' own code rounds
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x))), 16));
}

// exp for x <= 88, relative error below 2e-7 (Cephes polynomial after range reduction)
inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

// Pins each thread of a pass to one core, if all of the machine's cores are ours. Otherwise Linux wakes a thread on the
// core of the thread that woke it, and for milliseconds both share that core while the other core is idle.
class OwnCore {
   public:
    OwnCore(int tid, int nt) : is_master_(tid == 0) {
        if (CPU_COUNT(&allowed()) != nt) return;
        int cpu = 0;
        for (int seen = -1; (seen += CPU_ISSET(cpu, &allowed()) != 0) < tid; ++cpu) {}
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        is_set_ = sched_setaffinity(0, sizeof one, &one) == 0;
    }
    ~OwnCore() {  // unpins the caller's thread: threads that it starts would inherit the one core
        if (is_set_ && is_master_) sched_setaffinity(0, sizeof(cpu_set_t), &allowed());
    }

   private:
    static cpu_set_t& allowed() {
        static cpu_set_t set = [] {
            cpu_set_t all;
            CPU_ZERO(&all);
            sched_getaffinity(0, sizeof all, &all);
            return all;
        }();
        return set;
    }
    bool is_master_, is_set_ = false;
};

// Waiting threads spin for some microseconds, then sleep. A thread that spins on would occupy a core that the awaited
// thread could use at once when another process has taken its core.
struct Barrier {
    std::atomic<int> waiting{0}, phase{0}, sleeping{0};
    int size = 1;

    void wait() {
        if (size == 1) return;
        const int now = phase.load(std::memory_order_relaxed);
        if (waiting.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            waiting.store(0, std::memory_order_relaxed);
            phase.store(now + 1);
            if (sleeping.load()) futex(FUTEX_WAKE_PRIVATE, size);
            return;
        }
        for (int spin = 0; spin < SPINS; ++spin) {
            if (phase.load(std::memory_order_acquire) != now) return;
            _mm_pause();
        }
        sleeping.fetch_add(1);
        while (phase.load() == now) futex(FUTEX_WAIT_PRIVATE, now);
        sleeping.fetch_sub(1);
    }

   private:
    static constexpr int SPINS = 1000;

    void futex(int operation, int value) {
        syscall(SYS_futex, reinterpret_cast<int*>(&phase), operation, value, nullptr, nullptr, 0);
    }
};

// --- norms and rotary embeddings ------------------------------------------------------------------------------------

void rms_norm(const bf16* x, const bf16* weight, float eps, int E, bf16* out) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < E; i += 16) {
        __m512 v = load16(x + i);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / float(E) + eps));
    for (int i = 0; i < E; i += 16)
        store16(out + i, _mm512_mul_ps(round16(_mm512_mul_ps(load16(x + i), scale)), load16(weight + i)));
}

void rotate(bf16* x, const bf16* cos, const bf16* sin, int D) {  // the "rotate half" convention
    const int half = D / 2;
    for (int i = 0; i < half; i += 16) {
        __m512 a = load16(x + i), b = load16(x + half + i);
        __m512 low = _mm512_sub_ps(round16(_mm512_mul_ps(a, load16(cos + i))), round16(_mm512_mul_ps(b, load16(sin + i))));
        __m512 high = _mm512_add_ps(round16(_mm512_mul_ps(b, load16(cos + half + i))), round16(_mm512_mul_ps(a, load16(sin + half + i))));
        store16(x + i, low);
        store16(x + half + i, high);
    }
}

}  // namespace

extern "C" {

struct Layer {
    const bf16 *input_norm, *qkv_bias, *q_norm, *k_norm, *post_norm;
    bf16 *keys, *values;  // of page 0, head 0, token 0
    int64_t window;       // 0: no window
    packed::Matrix qkv, out, gate_up, down;
};

struct Stack {
    int64_t num_layers, E, Hq, Hkv, D, I;
    double eps, qk_eps, scale;
    int64_t page_size, page_stride, head_stride;  // strides in elements; tokens of a head are adjacent
    const Layer* layers;
};

struct Delta {         // of one matrix: outputs get B A x
    const bf16 *a, *b;  // [rank, K], [rank, N]
    int64_t rank;       // 0: the matrix stays as it is
};

struct LayerDeltas {
    Delta q, k, v, out, gate, up, down;
};

struct DecoderBatch {
    int64_t T, S, P;
    const int32_t *query_start, *kv_len, *page_table;
    const int64_t* slots;
    const bf16 *cos, *sin;               // [T, D]
    const LayerDeltas* const* adapters;  // of each row, all layers; null: no row has one, or this row has none
    int64_t rank;                        // the largest
};

}  // extern "C"

namespace {

// --- attention: key blocks of 64 against tiles of query rows, online softmax ----------------------------------------

constexpr int KEYS = 64, MAX_ROWS = 96, MAX_DIM = 256;

inline void transpose16(__m512i (&r)[16]) {  // 16 x 16 of 32 bits
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

template <int MB>
inline void score_rows(const bf16* q, const bf16* keys, int D, float scale, float* scores) {
    __m512 acc[MB][4];
    for (int m = 0; m < MB; ++m)
        for (int n = 0; n < 4; ++n) acc[m][n] = _mm512_setzero_ps();
    for (int d = 0; d < D; d += 2) {
        __m512bh b[4];
        for (int n = 0; n < 4; ++n)
            b[n] = reinterpret_cast<__m512bh>(_mm512_load_si512(keys + d * KEYS + n * 32));
        for (int m = 0; m < MB; ++m) {
            int32_t pair;
            std::memcpy(&pair, q + m * D + d, 4);
            __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
            for (int n = 0; n < 4; ++n) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], a, b[n]);
        }
    }
    for (int m = 0; m < MB; ++m)
        for (int n = 0; n < 4; ++n)
            _mm512_store_ps(scores + m * KEYS + n * 16, _mm512_mul_ps(acc[m][n], _mm512_set1_ps(scale)));
}

template <int MB>
inline void value_rows(const bf16* p, const bf16* values, int D, int num_keys, int d0, float* out) {
    __m512 acc[MB][4];
    for (int m = 0; m < MB; ++m)
        for (int n = 0; n < 4; ++n) acc[m][n] = d0 + n * 16 < D ? _mm512_load_ps(out + m * D + d0 + n * 16) : _mm512_setzero_ps();
    for (int k = 0; k < num_keys; k += 2) {
        __m512bh b[4];
        for (int n = 0; n < 4; ++n)
            b[n] = reinterpret_cast<__m512bh>(_mm512_load_si512(values + k * D + (d0 + n * 16 < D ? d0 + n * 16 : d0) * 2));
        for (int m = 0; m < MB; ++m) {
            int32_t pair;
            std::memcpy(&pair, p + m * KEYS + k, 4);
            __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
            for (int n = 0; n < 4; ++n) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], a, b[n]);
        }
    }
    for (int m = 0; m < MB; ++m)
        for (int n = 0; n < 4; ++n)
            if (d0 + n * 16 < D) _mm512_store_ps(out + m * D + d0 + n * 16, acc[m][n]);
}

// One thread's share of attention, the same in every layer of a pass.
class Attention {
   public:
    Attention(const Stack& s, const DecoderBatch& b, int tid, int nt) : s_(s), b_(b) {
        const int64_t group = s.Hq / s.Hkv, per_tile = std::max<int64_t>(1, MAX_ROWS / group);
        std::vector<Item> items;
        for (int64_t i = 0; i < b.S; ++i)
            for (int64_t q = b.query_start[i]; q < b.query_start[i + 1]; q += per_tile)
                for (int64_t h = 0; h < s.Hkv; ++h) {
                    const int64_t end = std::min<int64_t>(q + per_tile, b.query_start[i + 1]);
                    const int64_t last = b.kv_len[i] - (b.query_start[i + 1] - end);  // keys its last row sees
                    items.push_back({i, h, q, end, (last + KEYS - 1) / KEYS * (4 + (end - q) * group)});
                }
        std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
        std::vector<int64_t> load(nt, 0);
        for (const Item& item : items) {
            const int least = int(std::min_element(load.begin(), load.end()) - load.begin());
            load[least] += item.cost;
            if (least == tid) mine_.push_back(item);
        }
    }

    void run(const Layer& layer, const bf16* q, int64_t ldq, bf16* out, int64_t ldo) {
        for (const Item& item : mine_) tile(item, layer, q, ldq, out, ldo);
    }

   private:
    struct Item {
        int64_t sequence, head, first, end, cost;  // query rows [first, end) of the flat batch
    };

    void pack(const Layer& layer, const Item& item, int64_t from, int64_t count) {
        const int64_t D = s_.D;
        const int32_t* table = b_.page_table + item.sequence * b_.P;
        alignas(64) static const bf16 zeros[MAX_DIM] = {};
        const bf16 *k[KEYS], *v[KEYS];
        for (int64_t j = 0; j < KEYS; ++j) {
            if (j < count) {
                const int64_t token = from + j;
                const int64_t at = table[token / s_.page_size] * s_.page_stride + item.head * s_.head_stride + token % s_.page_size * D;
                k[j] = layer.keys + at;
                v[j] = layer.values + at;
            } else {
                k[j] = v[j] = zeros;
            }
        }
        for (int j = 0; j < KEYS; j += 16)
            for (int64_t d = 0; d < D; d += 32) {
                __m512i r[16];
                for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(k[j + i] + d);
                transpose16(r);
                for (int i = 0; i < 16; ++i) _mm512_store_si512(keys_ + (d + 2 * i) * KEYS + j * 2, r[i]);
            }
        for (int j = 0; j < KEYS; j += 2)
            for (int64_t d = 0; d < D; d += 16) {
                // interleave two keys: a0 b0 a1 b1 ...
                __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v[j] + d));
                __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v[j + 1] + d));
                __m512i both = _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
                _mm512_store_si512(values_ + j * D + d * 2, both);
            }
    }

    void tile(const Item& item, const Layer& layer, const bf16* q, int64_t ldq, bf16* out, int64_t ldo) {
        const int64_t D = s_.D, group = s_.Hq / s_.Hkv;
        const int R = int((item.end - item.first) * group);
        // row r is query first + r / group, head item.head * group + r % group
        for (int r = 0; r < R; ++r)
            std::memcpy(queries_ + r * D, q + (item.first + r / group) * ldq + (item.head * group + r % group) * D, D * 2);
        std::memset(out_, 0, sizeof(float) * R * D);
        for (int r = 0; r < R; ++r) {
            max_[r] = -1e30f;
            sum_[r] = 0;
        }
        const int64_t past = b_.kv_len[item.sequence] - b_.query_start[item.sequence + 1];  // position = past + row
        const int64_t last = past + item.end;  // the tile's last row sees the keys before this one
        int64_t from = 0;
        if (layer.window) from = std::max<int64_t>(0, past + item.first - layer.window + 1) / KEYS * KEYS;
        for (; from < last; from += KEYS) {
            const int count = int(std::min<int64_t>(KEYS, last - from));
            pack(layer, item, from, count);
            int r = 0;
            for (; r + 6 <= R; r += 6) score_rows<6>(queries_ + r * D, keys_, int(D), float(s_.scale), scores_ + r * KEYS);
            for (; r + 3 <= R; r += 3) score_rows<3>(queries_ + r * D, keys_, int(D), float(s_.scale), scores_ + r * KEYS);
            for (; r < R; ++r) score_rows<1>(queries_ + r * D, keys_, int(D), float(s_.scale), scores_ + r * KEYS);
            for (r = 0; r < R; ++r) softmax(r, past + item.first + r / group, from, count, layer.window);
            const int even = (count + 1) / 2 * 2;
            for (int d = 0; d < D; d += 64) {
                for (r = 0; r + 6 <= R; r += 6) value_rows<6>(weights_ + r * KEYS, values_, int(D), even, d, out_ + r * D);
                for (; r + 3 <= R; r += 3) value_rows<3>(weights_ + r * KEYS, values_, int(D), even, d, out_ + r * D);
                for (; r < R; ++r) value_rows<1>(weights_ + r * KEYS, values_, int(D), even, d, out_ + r * D);
            }
        }
        for (int r = 0; r < R; ++r) {
            const __m512 scale = _mm512_set1_ps(1.0f / sum_[r]);
            bf16* to = out + (item.first + r / group) * ldo + (item.head * group + r % group) * D;
            for (int d = 0; d < D; d += 16) store16(to + d, _mm512_mul_ps(_mm512_load_ps(out_ + r * D + d), scale));
        }
    }

    void softmax(int r, int64_t position, int64_t from, int count, int64_t window) {
        float* scores = scores_ + r * KEYS;
        const int64_t low = window ? std::max<int64_t>(0, position - window + 1 - from) : 0;  // first key seen
        const int64_t high = std::min<int64_t>(count, position + 1 - from);                  // end of the keys seen
        __mmask16 seen[4];
        __m512 top = _mm512_set1_ps(-1e30f);
        for (int n = 0; n < 4; ++n) {
            const int64_t a = std::clamp<int64_t>(low - n * 16, 0, 16), b = std::clamp<int64_t>(high - n * 16, 0, 16);
            seen[n] = b > a ? __mmask16(((1u << b) - 1) & ~((1u << a) - 1)) : __mmask16(0);
            top = _mm512_mask_max_ps(top, seen[n], top, _mm512_load_ps(scores + n * 16));
        }
        const float peak = std::max(max_[r], _mm512_reduce_max_ps(top));
        __m512 total = _mm512_setzero_ps();
        for (int n = 0; n < 4; ++n) {
            __m512 p = exp16(_mm512_sub_ps(_mm512_load_ps(scores + n * 16), _mm512_set1_ps(peak)));
            p = _mm512_maskz_mov_ps(seen[n], p);
            total = _mm512_add_ps(total, p);
            store16(weights_ + r * KEYS + n * 16, p);
        }
        if (peak > max_[r]) {
            const float shrink = std::exp(max_[r] - peak);
            sum_[r] *= shrink;
            for (int d = 0; d < s_.D; d += 16)
                _mm512_store_ps(out_ + r * s_.D + d, _mm512_mul_ps(_mm512_load_ps(out_ + r * s_.D + d), _mm512_set1_ps(shrink)));
            max_[r] = peak;
        }
        sum_[r] += _mm512_reduce_add_ps(total);
    }

    const Stack& s_;
    const DecoderBatch& b_;
    std::vector<Item> mine_;
    alignas(64) bf16 keys_[MAX_DIM * KEYS];    // [D/2][KEYS][2]
    alignas(64) bf16 values_[KEYS * MAX_DIM];  // [KEYS/2][D][2]
    alignas(64) bf16 queries_[MAX_ROWS * MAX_DIM];
    alignas(64) bf16 weights_[MAX_ROWS * KEYS];
    alignas(64) float scores_[MAX_ROWS * KEYS];
    alignas(64) float out_[MAX_ROWS * MAX_DIM];
    float max_[MAX_ROWS], sum_[MAX_ROWS];
};

// --- adapters --------------------------------------------------------------------------------------------------------

inline float dot(const bf16* x, const bf16* y, int64_t K) {
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < K; i += 32) {
        const __mmask32 here = K - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (K - i)) - 1;
        const __m512i a = _mm512_maskz_loadu_epi16(here, x + i), b = _mm512_maskz_loadu_epi16(here, y + i);
        __m512& sum = sums[i / 32 % 2];
        sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
    const __m512 sum = round16(_mm512_set1_ps(_mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]))));
    return _mm512_cvtss_f32(sum);
}

// The products A x of the rows that have adapters, for matrices of one input, and what they add to outputs.
class Deltas {
   public:
    Deltas(const DecoderBatch& b) : b_(b), inner_(b.adapters ? b.T * 3 * b.rank : 0) {}
    explicit operator bool() const { return b_.adapters != nullptr; }

    // This thread's share of A x for the rows x [T, K]; other threads need it after a barrier.
    void shrink(const bf16* x, int64_t K, int64_t layer, std::initializer_list<Delta LayerDeltas::*> names, int tid, int nt) {
        for (int64_t t = 0; t < b_.T; ++t) {
            if (!b_.adapters[t]) continue;
            float* inner = inner_.data() + t * 3 * b_.rank;
            for (Delta LayerDeltas::*name : names) {
                const Delta& delta = b_.adapters[t][layer].*name;
                for (int64_t r = delta.rank * tid / nt; r < delta.rank * (tid + 1) / nt; ++r)
                    inner[r] = dot(x + t * K, delta.a + r * K, K);
                inner += b_.rank;
            }
        }
    }

    // 16 outputs of row t from `column` on, of a matrix with N outputs that was `number` among the names of `shrink`.
    __m512 add(__m512 y, int64_t t, int64_t layer, Delta LayerDeltas::*name, int number, int64_t column, int64_t N) const {
        if (!b_.adapters[t]) return y;
        const Delta& delta = b_.adapters[t][layer].*name;
        if (!delta.rank) return y;
        const float* inner = inner_.data() + (t * 3 + number) * b_.rank;
        __m512 sum = _mm512_setzero_ps();
        for (int64_t r = 0; r < delta.rank; ++r)
            sum = _mm512_fmadd_ps(_mm512_set1_ps(inner[r]), load16(delta.b + r * N + column), sum);
        return round16(_mm512_add_ps(round16(y), round16(sum)));
    }

   private:
    const DecoderBatch& b_;
    std::vector<float> inner_;  // [T, 3, rank]
};

}  // namespace

extern "C" {

// Computes all layers over hidden [T, E], in place. scratch: T * (E + (Hq + 2 Hkv) D + Hq D + I) elements.
void crossdock_decode_stack(const Stack* stack, const DecoderBatch* batch, bf16* hidden, bf16* scratch, int num_threads) {
    const Stack& s = *stack;
    const DecoderBatch& b = *batch;
    const int64_t T = b.T, E = s.E, QKV = (s.Hq + 2 * s.Hkv) * s.D, A = s.Hq * s.D, I = s.I;
    bf16* normed = scratch;
    bf16* qkv = normed + T * E;
    bf16* attended = qkv + T * QKV;
    bf16* activated = attended + T * A;
    Barrier barrier;
    Deltas deltas(b);
#if defined(__AVX512VNNI__)
    packed::Rows rows(T, std::max({E, A, I}));
#endif

#pragma omp parallel num_threads(num_threads)
    {
        const int tid = omp_get_thread_num(), nt = omp_get_num_threads();
        const OwnCore core(tid, nt);
#pragma omp single
        barrier.size = nt;
        const int64_t t0 = T * tid / nt, t1 = T * (tid + 1) / nt;
        auto attention = std::make_unique<Attention>(s, b, tid, nt);
        auto prepare = [&](const bf16* x, const packed::Matrix& w) {  // this thread's rows, before all threads need them
            if (!packed::is_rounded(w)) return;
#if defined(__AVX512VNNI__)
            for (int64_t t = t0; t < t1; ++t) rows.round(t, x + t * w.K, w);
            barrier.wait();
#endif
        };
        auto multiply = [&](auto panels, const bf16* x, const packed::Matrix& w, auto write) {
#if defined(__AVX512VNNI__)
            if (packed::is_rounded(w)) return packed::multiply_rounded(rows, T, w, tid, nt, write);
#endif
            packed::multiply<decltype(panels)::value>(x, T, w, tid, nt, write);
        };
        auto shrink = [&](const bf16* x, int64_t K, int64_t layer, std::initializer_list<Delta LayerDeltas::*> names) {
            if (!deltas) return;
            deltas.shrink(x, K, layer, names, tid, nt);
            barrier.wait();
        };
        const std::integral_constant<int, 2> two;
        const std::integral_constant<int, 3> three;

        for (int64_t l = 0; l < s.num_layers; ++l) {
            const Layer& layer = s.layers[l];
            for (int64_t t = t0; t < t1; ++t) rms_norm(hidden + t * E, layer.input_norm, float(s.eps), int(E), normed + t * E);
            prepare(normed, layer.qkv);
            if (!packed::is_rounded(layer.qkv)) barrier.wait();

            auto write_qkv = [&](int64_t t, int64_t n, auto& acc) {
                constexpr int NB = sizeof(acc) / sizeof(__m512);
                for (int j = 0; j < NB; ++j) {
                    __m512 v = acc[j];
                    const int64_t at = (n + j) * 16, W = s.Hkv * s.D;
                    if (layer.qkv_bias) v = _mm512_add_ps(round16(v), load16(layer.qkv_bias + at));
                    if (deltas) {
                        if (at < A) v = deltas.add(v, t, l, &LayerDeltas::q, 0, at, A);
                        else if (at < A + W) v = deltas.add(v, t, l, &LayerDeltas::k, 1, at - A, W);
                        else v = deltas.add(v, t, l, &LayerDeltas::v, 2, at - A - W, W);
                    }
                    store16(qkv + t * QKV + (n + j) * 16, v);
                }
            };
            shrink(normed, E, l, {&LayerDeltas::q, &LayerDeltas::k, &LayerDeltas::v});
            multiply(three, normed, layer.qkv, write_qkv);
            barrier.wait();

            for (int64_t t = t0; t < t1; ++t) {
                bf16* row = qkv + t * QKV;
                const bf16 *cos = b.cos + t * s.D, *sin = b.sin + t * s.D;
                for (int64_t h = 0; h < s.Hq + s.Hkv; ++h) {
                    const bf16* norm = h < s.Hq ? layer.q_norm : layer.k_norm;
                    if (norm) rms_norm(row + h * s.D, norm, float(s.qk_eps), int(s.D), row + h * s.D);
                    rotate(row + h * s.D, cos, sin, int(s.D));
                }
                if (b.slots[t] < 0) continue;
                const int64_t page = b.slots[t] / s.page_size, offset = b.slots[t] % s.page_size;
                for (int64_t h = 0; h < s.Hkv; ++h) {
                    const int64_t at = page * s.page_stride + h * s.head_stride + offset * s.D;
                    std::memcpy(layer.keys + at, row + (s.Hq + h) * s.D, s.D * sizeof(bf16));
                    std::memcpy(layer.values + at, row + (s.Hq + s.Hkv + h) * s.D, s.D * sizeof(bf16));
                }
            }
            barrier.wait();

            attention->run(layer, qkv, QKV, attended, A);
            barrier.wait();

            Delta LayerDeltas::*name = &LayerDeltas::out;
            auto add_to_hidden = [&](int64_t t, int64_t n, auto& acc) {
                constexpr int NB = sizeof(acc) / sizeof(__m512);
                for (int j = 0; j < NB; ++j) {
                    bf16* at = hidden + t * E + (n + j) * 16;
                    const __m512 v = deltas ? deltas.add(acc[j], t, l, name, 0, (n + j) * 16, E) : acc[j];
                    store16(at, _mm512_add_ps(load16(at), round16(v)));
                }
            };
            prepare(attended, layer.out);
            shrink(attended, A, l, {name});
            multiply(three, attended, layer.out, add_to_hidden);
            barrier.wait();

            for (int64_t t = t0; t < t1; ++t) rms_norm(hidden + t * E, layer.post_norm, float(s.eps), int(E), normed + t * E);
            prepare(normed, layer.gate_up);
            if (!packed::is_rounded(layer.gate_up)) barrier.wait();

            auto write_activated = [&](int64_t t, int64_t n, auto& acc) {  // panels alternate: gate, up, gate, up
                constexpr int NB = sizeof(acc) / sizeof(__m512);
                for (int j = 0; j + 1 < NB; j += 2) {
                    __m512 gate = round16(acc[j]), up = round16(acc[j + 1]);
                    if (deltas) {
                        gate = deltas.add(gate, t, l, &LayerDeltas::gate, 0, (n + j) / 2 * 16, I);
                        up = deltas.add(up, t, l, &LayerDeltas::up, 1, (n + j) / 2 * 16, I);
                    }
                    __m512 silu = _mm512_div_ps(
                        gate, _mm512_add_ps(_mm512_set1_ps(1.0f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate))));
                    store16(activated + t * I + (n + j) / 2 * 16, _mm512_mul_ps(round16(silu), up));
                }
            };
            shrink(normed, E, l, {&LayerDeltas::gate, &LayerDeltas::up});
            multiply(two, normed, layer.gate_up, write_activated);
            barrier.wait();

            name = &LayerDeltas::down;
            prepare(activated, layer.down);
            shrink(activated, I, l, {name});
            multiply(three, activated, layer.down, add_to_hidden);
            barrier.wait();
        }
    }
}
}
