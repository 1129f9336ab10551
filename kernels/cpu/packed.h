// Products of rows with weights: out[t, n] = sum_k x[t, k] w[n, k]. A weight [N, K] lies in panels of 16 outputs.
//
// A weight is plain bfloat16, or small codes and scales (kernels/packed.py). Codes are dequantised to the numbers that an
// instruction multiplies: to float32 beside rows of float32, and beside rows of bfloat16 to bfloat16, rounded as a plain
// weight is. With few rows this happens in registers, with many rows once for all of them. So a product is that of the
// dequantised weight, and its sums have one order for any number of rows and threads: a row's result depends on no other
// row. Rows rounded to int8 have kernels of their own (rounded.h).
//
// Vectors are the compilers' own (vector_size), so that float32 serves every CPU.

#pragma once

#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

namespace packed {

#if defined(__AVX512F__)
constexpr int LANES = 16;
using vec = __m512;
#else
constexpr int LANES = 8;
using vec = float __attribute__((vector_size(LANES * 4)));
#endif
using ivec = int32_t __attribute__((vector_size(LANES * 4)));
constexpr int PANEL = 16, PARTS = PANEL / LANES;  // vectors of a panel

enum Kind : int64_t { PLAIN, INT4, INT8, E2M1, E4M3 };
constexpr int columns_of(int64_t kind) { return kind == PLAIN ? 2 : kind == INT4 || kind == E2M1 ? 8 : 4; }  // of a word

// A weight in panels. One 32-bit word of an output holds consecutive columns, the first in its lowest bits.
struct Matrix {
    int64_t kind, N, K, group, is_rounded;  // is_rounded: rows of bfloat16 may be rounded to int8
    const uint32_t* codes;  // [N/16][K/columns of a word][16]
    const float* scales;    // [N/16][K/group][16]
    const float* offsets;   // as scales; null: int4 codes are signed, code - 8
    int64_t num_groups() const { return (K + group - 1) / group; }
    const uint32_t* words(int64_t panel) const { return codes + panel * (K / columns_of(kind)) * PANEL; }
    const float* grid(const float* values, int64_t panel, int64_t g) const { return values + (panel * num_groups() + g) * PANEL; }
};

inline vec splat(float x) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(x);
#else
    return vec{} + x;
#endif
}
inline vec load(const void* p) {
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(void* p, vec v) { std::memcpy(p, &v, sizeof v); }
inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }

// With few rows the weights come from memory, and the hardware alone prefetches them too late. Each tile of several rows
// asks for its own weights this much ahead: 7.6 ms instead of 8.6 for a step of 8 rows, 11.8 instead of 13.9 for 16 (AMD
// Zen 5, two threads; 1 KiB gains less, 4 KiB as much). One row alone is slower with it, by 5 %.
constexpr int AHEAD = 2048;  // bytes

// --- numbers of float32: one column at a time -----------------------------------------------------------------------

struct Floats {
    using element = float;
    static constexpr int STEP = 1;  // columns of a product
    static vec row(const float* x) { return splat(*x); }
    static vec dot(vec acc, vec a, vec b) { return multiply_add(a, b, acc); }
};

// The values of codes whose lowest four bits are of e2m1; bit 3 is the sign.
inline vec e2m1(ivec code) {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps((__m512i)code, _mm512_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6));
#else
    const ivec magnitude = code & 7, sign = (code & 8) << 28;
#if defined(__AVX2__)
    const vec value = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6), (__m256i)magnitude);
#else
    const vec small = __builtin_convertvector(magnitude, vec) * 0.5f, normal = (vec)((magnitude << 22) + (126 << 23));
    const vec value = magnitude < 2 ? small : normal;
#endif
    return (vec)((ivec)value | sign);
#endif
}

// The values of codes of e4m3 in the highest byte: its bits are those of a float whose exponent is 120 less.
inline vec e4m3(ivec code) { return (vec)((code >> 4) & int32_t(0x87f00000)) * 0x1p120f; }

// A source gives the weights of NB panels from panel n: `enter` a group, `read` the words of columns, and each `number`.
template <Kind KIND, bool HAS_OFFSETS, int NB>
struct CodedFloats {
    using Numbers = Floats;
    static constexpr int V = NB * PARTS, COLUMNS = columns_of(KIND);
    const Matrix& w;
    const int64_t n;
    const uint32_t* codes[NB];
    vec scales[V] = {}, offsets[V] = {};
    ivec words[V] = {};

    CodedFloats(const Matrix& w, int64_t n) : w(w), n(n) {
        for (int p = 0; p < NB; ++p) codes[p] = w.words(n + p);
    }
    int64_t group() const { return w.group; }
    void enter(int64_t g) {
        for (int v = 0; v < V; ++v) {
            scales[v] = load(w.grid(w.scales, n + v / PARTS, g) + v % PARTS * LANES);
            if constexpr (HAS_OFFSETS) offsets[v] = load(w.grid(w.offsets, n + v / PARTS, g) + v % PARTS * LANES);
            if constexpr (KIND == INT4 && !HAS_OFFSETS) offsets[v] = scales[v] * -8.0f;
        }
    }
    void read(int64_t k) {
        for (int v = 0; v < V; ++v) {
            const uint32_t* from = codes[v / PARTS] + k / COLUMNS * PANEL + v % PARTS * LANES;
            prefetch(reinterpret_cast<const char*>(from) + AHEAD / 2);
            words[v] = (ivec)load(from);
        }
    }
    vec code(int j, int v) const {
        if constexpr (KIND == INT4) return __builtin_convertvector((words[v] >> (4 * j)) & 15, vec);
        if constexpr (KIND == INT8) return __builtin_convertvector((words[v] << (24 - 8 * j)) >> 24, vec);
        if constexpr (KIND == E2M1) return e2m1(words[v] >> (4 * j));
        return e4m3(words[v] << (24 - 8 * j));
    }
    vec number(int j, int v) const {
        if constexpr (HAS_OFFSETS || KIND == INT4) return multiply_add(code(j, v), scales[v], offsets[v]);
        return code(j, v) * scales[v];
    }
};

// Plain bfloat16, widened.
template <int NB>
struct WidenedFloats {
    using Numbers = Floats;
    static constexpr int V = NB * PARTS, COLUMNS = 2;
    const int64_t K;
    const uint32_t *codes[NB], *words[NB] = {};

    WidenedFloats(const Matrix& w, int64_t n) : K(w.K) {
        for (int p = 0; p < NB; ++p) codes[p] = w.words(n + p);
    }
    int64_t group() const { return K; }
    void enter(int64_t) {}
    void read(int64_t k) {
        for (int p = 0; p < NB; ++p) {
            words[p] = codes[p] + k / 2 * PANEL;
            prefetch(reinterpret_cast<const char*>(words[p]) + AHEAD);
        }
    }
    vec number(int j, int v) const {
        const ivec word = (ivec)load(words[v / PARTS] + v % PARTS * LANES);
        return (vec)(j == 0 ? word << 16 : word & int32_t(0xffff0000));
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// --- numbers of bfloat16: two columns at a time ---------------------------------------------------------------------

struct Pairs {
    using element = bf16;
    static constexpr int STEP = 2;
    static vec row(const bf16* x) {
        int32_t pair;
        std::memcpy(&pair, x, 4);
        return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
    }
    static vec dot(vec acc, vec a, vec b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
};

// Outputs 0 to 7 and 8 to 15 of a panel are dequantised apart, in float32: their lanes are two columns of each output, so
// that the instruction which rounds both to bfloat16 also puts them side by side.
template <Kind KIND, bool HAS_OFFSETS, int NB>
struct CodedPairs {
    using Numbers = Pairs;
    static constexpr int V = NB, COLUMNS = columns_of(KIND);
    // What the codes of `halves` are multiplied by, beside the scale: of int8 256, of e4m3 2^-8.
    static constexpr float FACTOR = KIND == INT8 ? 1.0f / 256 : KIND == E4M3 ? 256.0f : 1.0f;
    const Matrix& w;
    const int64_t n;
    __m512 scales[V][2] = {}, offsets[V][2] = {}, values;  // values: of the 16 codes
    __m512i words[V][2] = {};
    const uint32_t* codes[NB];

    CodedPairs(const Matrix& w, int64_t n) : w(w), n(n) {
        for (int p = 0; p < NB; ++p) codes[p] = w.words(n + p);
        const float zero = HAS_OFFSETS ? 0.0f : 8.0f;
        values = KIND == E2M1 ? _mm512_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6)
                              : _mm512_sub_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), splat(zero));
    }
    static __m512i half(int h) {  // the lanes of its outputs, each twice
        const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        return h == 0 ? first : _mm512_add_epi32(first, _mm512_set1_epi32(8));
    }
    int64_t group() const { return w.group; }
    void enter(int64_t g) {
        for (int v = 0; v < V; ++v)
            for (int h = 0; h < 2; ++h) {
                scales[v][h] = _mm512_permutexvar_ps(half(h), load(w.grid(w.scales, n + v, g))) * FACTOR;
                if constexpr (HAS_OFFSETS) offsets[v][h] = _mm512_permutexvar_ps(half(h), load(w.grid(w.offsets, n + v, g)));
            }
    }
    void read(int64_t k) {
        const __m512i odd = _mm512_set1_epi64(int64_t(4) << 32);
        for (int v = 0; v < V; ++v) {
            const uint32_t* from = codes[v] + k / COLUMNS * PANEL;
            prefetch(reinterpret_cast<const char*>(from) + AHEAD / 2);
            const __m512i word = _mm512_loadu_si512(from);
            if constexpr (COLUMNS == 8)  // every second lane shifted to its own column
                for (int h = 0; h < 2; ++h) words[v][h] = _mm512_srlv_epi32(_mm512_permutexvar_epi32(half(h), word), odd);
            else
                words[v][0] = word;
        }
    }
    void halves(int j, int v, __m512 (&out)[2]) const {
        if constexpr (COLUMNS == 8) {
            for (int h = 0; h < 2; ++h) out[h] = _mm512_permutexvar_ps(_mm512_srli_epi32(words[v][h], 8 * j), values);
            return;
        }
        // The bytes of two columns of all outputs, as the high bytes of 16 bits each.
        const __m128i chosen = j == 0 ? _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13)
                                      : _mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15);
        __m512i both = _mm512_shuffle_epi8(words[v][0], _mm512_broadcast_i32x4(chosen));
        if constexpr (KIND == E4M3)  // as float16: its exponent has one bit more
            both = _mm512_and_si512(_mm512_srai_epi16(both, 1), _mm512_set1_epi16(int16_t(0xbf80)));
        const __m256i low = _mm512_castsi512_si256(both), high = _mm512_extracti64x4_epi64(both, 1);
        if constexpr (KIND == E4M3) {
            out[0] = _mm512_cvtph_ps(low), out[1] = _mm512_cvtph_ps(high);
        } else {
            out[0] = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(low)), out[1] = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(high));
        }
    }
    vec number(int j, int v) const {
        __m512 of[2];
        halves(j, v, of);
        for (int h = 0; h < 2; ++h) of[h] = HAS_OFFSETS ? _mm512_fmadd_ps(of[h], scales[v][h], offsets[v][h]) : _mm512_mul_ps(of[h], scales[v][h]);
        return (vec)_mm512_cvtne2ps_pbh(of[1], of[0]);
    }
};
#endif

// Weights that are numbers already, [panel][columns of a product][16]. `fetched`: what comes next, see `Ahead`.
template <class Numbers_, int NB, bool IS_AHEAD>
struct Stored {
    using Numbers = Numbers_;
    static constexpr int V = NB * PARTS, COLUMNS = Numbers::STEP;
    const uint32_t* w;
    const int64_t panel;  // words
    const uint32_t* fetched;
    const uint32_t* at = nullptr;

    int64_t group() const { return panel; }  // at least K
    void enter(int64_t) {}
    void read(int64_t k) {
        at = w + k / COLUMNS * PANEL;
        if (fetched) __builtin_prefetch(fetched + k / COLUMNS * PANEL, 0, 2);
        for (int p = 0; IS_AHEAD && p < NB; ++p) prefetch(reinterpret_cast<const char*>(at + p * panel) + AHEAD);
    }
    vec number(int, int v) const { return load(at + v / PARTS * panel + v % PARTS * LANES); }
};

// --- tiles ----------------------------------------------------------------------------------------------------------

// Computes the products of MB rows to sums [MB][V]. Only `count` rows exist; the last one is computed in place of others.
template <int MB, class Source>
__attribute__((noinline)) void tile(Source w, const typename Source::Numbers::element* x, int64_t K, int count, vec* sums) {
    using Numbers = typename Source::Numbers;
    constexpr int V = Source::V, STEPS = Source::COLUMNS / Numbers::STEP;
    int64_t row[MB];
    for (int m = 0; m < MB; ++m) row[m] = std::min(m, count - 1) * K;
    vec acc[MB][V] = {};
    for (int64_t from = 0, g = 0; from < K; from += w.group(), ++g) {
        w.enter(g);
        for (int64_t k = from, end = std::min(K, from + w.group()); k < end; k += Source::COLUMNS) {
            w.read(k);
#pragma GCC unroll 8
            for (int j = 0; j < STEPS; ++j) {
                vec b[V];
                for (int v = 0; v < V; ++v) b[v] = w.number(j, v);
                for (int m = 0; m < MB; ++m) {
                    const vec a = Numbers::row(x + row[m] + k + j * Numbers::STEP);
                    for (int v = 0; v < V; ++v) acc[m][v] = Numbers::dot(acc[m][v], a, b[v]);
                }
            }
        }
    }
    std::memcpy(sums, acc, sizeof acc);
}

// Writes the numbers of a source to memory, in the order of `Stored`.
template <class Source>
__attribute__((noinline)) void write_numbers(Source w, int64_t K, uint32_t* to) {
    constexpr int STEP = Source::Numbers::STEP;
    for (int64_t from = 0, g = 0; from < K; from += w.group(), ++g) {
        w.enter(g);
        for (int64_t k = from, end = std::min(K, from + w.group()); k < end; k += Source::COLUMNS) {
            w.read(k);
#pragma GCC unroll 8
            for (int j = 0; j < Source::COLUMNS / STEP; ++j)
                for (int v = 0; v < Source::V; ++v)
                    store(to + (v / PARTS * (K / STEP) + k / STEP + j) * PANEL + v % PARTS * LANES, w.number(j, v));
        }
    }
}

// Panels that a thread multiplies next. While a tile is computed from the caches, it fetches one of them from memory:
// with 4 to 64 rows, memory and arithmetic take about as long, and without this one waits for the other.
struct Ahead {
    const uint32_t* panel = nullptr;
    int64_t count = 0;

    const uint32_t* next(int64_t size) {
        if (count == 0) return nullptr;
        --count;
        return std::exchange(panel, panel + size);
    }
};

constexpr int MOST_SUMS = PARTS == 1 ? 24 : 12;  // vectors of sums that the register file holds beside others

// Rows [t, end) with NB panels of numbers from w.
template <class Numbers, int NB, class Write>
void block(const typename Numbers::element* x, int64_t K, const uint32_t* w, int64_t t, int64_t end, int64_t n, Ahead ahead, Write& write) {
    constexpr int V = NB * PARTS, MOST = MOST_SUMS / V;
    const int64_t panel = K / Numbers::STEP * PANEL;
    vec sums[MOST][V];
    auto rows = [&](auto count) {
        constexpr int MB = decltype(count)::value;
        for (; t + MB <= end; t += MB) {
            tile<MB>(Stored<Numbers, NB, (MB > 1)>{w, panel, ahead.next(panel)}, x + t * K, K, MB, *sums);
            for (int m = 0; m < MB; ++m) write(t + m, n, sums[m]);
        }
    };
    rows(std::integral_constant<int, MOST>());
    if constexpr (MOST > 8) rows(std::integral_constant<int, 8>());
    if constexpr (MOST > 4) rows(std::integral_constant<int, 4>());
    if constexpr (MOST > 2) rows(std::integral_constant<int, 2>());
    rows(std::integral_constant<int, 1>());
}

// Rows [t, t + count) with NB panels from panel n, whose numbers are made in registers.
template <class Source, int MB, int NB, class X, class Write>
void in_registers(const X* x, const Matrix& w, int64_t t, int count, int64_t n, Write& write) {
    vec sums[MB][NB * PARTS];
    tile<MB>(Source(w, n), x + t * w.K, w.K, count, *sums);
    for (int m = 0; m < count; ++m) write(t + m, n, sums[m]);
}

// --- sources by kind ------------------------------------------------------------------------------------------------

// Whether rows of bfloat16 are multiplied as they are; else they are widened to float32 before.
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

template <class X>
struct SourcesOf {
    using Numbers = Floats;
    template <Kind KIND, bool HAS_OFFSETS, int NB>
    using Source = std::conditional_t<KIND == PLAIN, WidenedFloats<NB>, CodedFloats<KIND, HAS_OFFSETS, NB>>;
};
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <>
struct SourcesOf<bf16> {
    using Numbers = Pairs;
    template <Kind KIND, bool HAS_OFFSETS, int NB>
    using Source = CodedPairs<KIND, HAS_OFFSETS, NB>;
};
#endif

// Calls `act` with a kind and whether it has offsets, as constants.
template <class Act>
inline void with_kind(const Matrix& w, Act act) {
    auto of_kind = [&](auto kind) {
        if (w.offsets)
            act(kind, std::true_type{});
        else
            act(kind, std::false_type{});
    };
    switch (w.kind) {
        case PLAIN: return act(std::integral_constant<Kind, PLAIN>{}, std::false_type{});
        case INT4: return of_kind(std::integral_constant<Kind, INT4>{});
        case INT8: return of_kind(std::integral_constant<Kind, INT8>{});
        case E2M1: return act(std::integral_constant<Kind, E2M1>{}, std::false_type{});
        default: return act(std::integral_constant<Kind, E4M3>{}, std::false_type{});
    }
}

constexpr int FEW = PARTS == 1 ? 8 : 6;  // rows whose numbers are made in registers

// Writes the numbers of NB panels from panel n, as rows of X are multiplied by.
template <class X, int NB>
void numbers_of(const Matrix& w, int64_t n, uint32_t* to) {
    with_kind(w, [&](auto kind, auto has_offsets) {
        if constexpr (kind.value != PLAIN || std::is_same_v<X, float>)
            write_numbers(typename SourcesOf<X>::template Source<kind.value, has_offsets.value, NB>(w, n), w.K, to);
    });
}

// This thread's share of the products of few rows.
template <class X, class Write>
void multiply_few(const X* x, int64_t T, const Matrix& w, int tid, int nt, Write& write) {
    with_kind(w, [&](auto kind, auto has_offsets) {
        constexpr Kind KIND = kind.value;
        auto rows = [&](auto size, auto most) {  // NB panels at a time, then those that are left
            constexpr int NB = decltype(size)::value, MB = decltype(most)::value;
            const int64_t panels = w.N / PANEL, groups = panels / NB;
            for (int64_t n = groups * tid / nt * NB; n < groups * (tid + 1) / nt * NB; n += NB)
                in_registers<typename SourcesOf<X>::template Source<KIND, has_offsets.value, NB>, MB, NB>(x, w, 0, int(T), n, write);
            if (NB > 1 && panels % NB && tid == nt - 1)
                in_registers<typename SourcesOf<X>::template Source<KIND, has_offsets.value, 1>, MB, 1>(x, w, 0, int(T), panels - 1, write);
        };
        const std::integral_constant<int, 2> two;
        const std::integral_constant<int, PARTS == 1 ? 2 : 1> wide;
        if constexpr (KIND != PLAIN || std::is_same_v<X, float>) {
            if (T == 1) return rows(two, std::integral_constant<int, 1>());
            if (T == 2) return rows(two, two);
            if (T <= 4) return rows(wide, std::integral_constant<int, 4>());
            return rows(wide, std::integral_constant<int, FEW>());
        }
    });
}

// This thread's share of x [T, K] times a weight: consecutive groups of NB panels, each over blocks of rows.
// `write(t, first panel, acc)` stores 16 outputs of row t for each of the panels in acc, at most NB.
template <int NB, class X, class Write>
void multiply(const X* x, int64_t T, const Matrix& w, int tid, int nt, Write write) {
    using Numbers = typename SourcesOf<X>::Numbers;
    constexpr int64_t ROWS = 96;
    const bool is_stored = w.kind == PLAIN && std::is_same_v<X, bf16>;
    if (!is_stored && T <= FEW) return multiply_few(x, T, w, tid, nt, write);
    const int64_t panel = w.K / Numbers::STEP * PANEL, panels = w.N / PANEL;
    const int64_t groups = panels / NB, blocks = (T + ROWS - 1) / ROWS;
    static thread_local std::vector<uint32_t> memory;
    if (!is_stored) memory.resize(panel * NB + PANEL);
    uint32_t* numbers = memory.data() + (64 - uintptr_t(memory.data()) % 64) % 64 / 4;
    const int64_t tasks = groups * blocks, first = tasks * tid / nt, last = tasks * (tid + 1) / nt;
    for (int64_t task = first; task < last; ++task) {
        const int64_t n = task / blocks * NB, t = task % blocks * ROWS;
        if (!is_stored && (task == first || t == 0)) numbers_of<X, NB>(w, n, numbers);
        const bool is_last = t + ROWS >= T && task + 1 < last;  // of the blocks of rows that share these panels
        const Ahead ahead = is_stored && is_last ? Ahead{w.codes + (n + NB) * panel, NB} : Ahead{};
        block<Numbers, NB>(x, w.K, is_stored ? w.codes + n * panel : numbers, t, std::min(T, t + ROWS), n, ahead, write);
    }
    for (int64_t n = groups * NB + tid; n < panels; n += nt) {  // panels that do not fill a group
        if (!is_stored) numbers_of<X, 1>(w, n, numbers);
        block<Numbers, 1>(x, w.K, is_stored ? w.codes + n * panel : numbers, 0, T, n, Ahead{}, write);
    }
}

}  // namespace packed
