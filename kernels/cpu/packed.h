// Products of rows with weights: out[t, n] = sum_k x[t, k] w[n, k]. A weight [N, K] lies in panels of 16 outputs.
//
// A weight is plain bfloat16, or small codes and scales (kernels/packed.py). Codes become the numbers that an instruction
// multiplies: beside rows of float32 dequantised float32, beside rows of bfloat16 the codes themselves in bfloat16, which
// holds all but the levels of NF4 exactly; then the sum of each group is scaled in float32. With few rows this happens in registers,
// with many rows once for all of them. Sums have one order for any number of rows and threads: a row's result depends on
// no other row. Rows rounded to int8 have kernels of their own (rounded.h).

#pragma once

#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

namespace packed {

constexpr int PANEL = 16, PARTS = PANEL / LANES;  // vectors of a panel

enum Kind : int64_t { PLAIN, INT4, INT8, E2M1, E4M3, NF4 };
constexpr bool has_nibbles(int64_t kind) { return kind == INT4 || kind == E2M1 || kind == NF4; }
constexpr int columns_of(int64_t kind) { return kind == PLAIN ? 2 : has_nibbles(kind) ? 8 : 4; }  // of a word

// A weight in panels. One 32-bit word of an output holds consecutive columns. Of nibbles, the even columns are in the low
// half and the odd ones in the high half; all else has the first column in the lowest bits.
struct Matrix {
    int64_t kind, N, K, group, is_rounded;  // is_rounded: rows of bfloat16 may be rounded to int8
    const uint32_t* codes;  // [N/16][K/columns of a word][16]
    const float* scales;    // [N/16][K/group][16]
    const float* offsets;   // as scales; null: int4 codes are signed, code - 8
    int64_t num_groups() const { return (K + group - 1) / group; }
    const uint32_t* words(int64_t panel) const { return codes + panel * (K / columns_of(kind)) * PANEL; }
    const float* grid(const float* values, int64_t panel, int64_t g) const { return values + (panel * num_groups() + g) * PANEL; }
};

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
    const vec small = __builtin_convertvector(magnitude, vec) * 0.5f, normal = (vec)((magnitude << 22) + (126 << 23));
    return (vec)((ivec)(magnitude < 2 ? small : normal) | sign);
#endif
}

// The levels of NF4, the quantiles of a normal distribution between -1 and 1 (TABLES of kernels/packed.py).
alignas(64) constexpr float NF4_LEVELS[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// The levels of codes whose lowest four bits are of NF4.
inline vec nf4(ivec code) {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps((__m512i)code, load(NF4_LEVELS));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(load(NF4_LEVELS), (__m256i)code);
    const __m256 high = _mm256_permutevar8x32_ps(load(NF4_LEVELS + LANES), (__m256i)code);
    return _mm256_blendv_ps(low, high, (__m256)(code << 28));
#else
    vec value = {};
    for (int i = 0; i < LANES; ++i) value[i] = NF4_LEVELS[code[i] & 15];
    return value;
#endif
}

// The values of codes of e4m3 in the highest byte: its bits are those of a float whose exponent is 120 less.
inline vec e4m3(ivec code) { return (vec)((code >> 4) & int32_t(0x87f00000)) * 0x1p120f; }

// A source gives the weights of NB panels from panel n: `enter` a group, `read` the words of columns, and each `number`.
template <Kind KIND, bool HAS_OFFSETS, int NB>
struct CodedFloats {
    using Numbers = Floats;
    static constexpr int V = NB * PARTS, COLUMNS = columns_of(KIND);
    static constexpr bool IS_WIDENED = false;
    static constexpr bool IS_GROUPED = false;  // whether numbers are codes, so that sums of groups are to be scaled
    // Without an offset for 8 and a mask, a tile of four rows needs 15 of the 16 registers of AVX2, not 18.
    static constexpr bool IS_SIGNED = KIND == INT4 && !HAS_OFFSETS;
    const Matrix& w;
    const int64_t n;
    const uint32_t* codes[NB];
    vec scales[V] = {}, offsets[V] = {};
    ivec words[V] = {};
#if defined(__AVX2__) && !defined(__AVX512F__)
    // A shuffle of bytes makes eight codes of e2m1 integers, twice their values: 1.6 instead of 2.5 ms for 19 M weights.
    static constexpr bool IS_DOUBLED = KIND == E2M1;
    ivec doubled[V][2] = {};  // bytes of columns 0, 4, 1, 5 and 2, 6, 3, 7
#else
    static constexpr bool IS_DOUBLED = false;
#endif

    CodedFloats(const Matrix& w, int64_t n) : w(w), n(n) {
        for (int p = 0; p < NB; ++p) codes[p] = w.words(n + p);
    }
    int64_t group() const { return w.group; }
    void enter(int64_t g) {
        for (int v = 0; v < V; ++v) {
            scales[v] = load(w.grid(w.scales, n + v / PARTS, g) + v % PARTS * LANES);
            if constexpr (HAS_OFFSETS) offsets[v] = load(w.grid(w.offsets, n + v / PARTS, g) + v % PARTS * LANES);
            if constexpr (IS_DOUBLED) scales[v] *= 0.5f;
        }
    }
    void read(int64_t k) {
        for (int v = 0; v < V; ++v) {
            const uint32_t* from = codes[v / PARTS] + k / COLUMNS * PANEL + v % PARTS * LANES;
            prefetch(reinterpret_cast<const char*>(from) + AHEAD / 2);
            words[v] = (ivec)load(from);
            if constexpr (IS_SIGNED) words[v] ^= int32_t(0x88888888);  // code - 8 of each nibble in two's complement
#if defined(__AVX2__) && !defined(__AVX512F__)
            const __m256i integers = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
            for (int half = 0; IS_DOUBLED && half < 2; ++half)
                doubled[v][half] = (ivec)_mm256_shuffle_epi8(integers, (__m256i)((words[v] >> 4 * half) & 0x0f0f0f0f));
#endif
        }
    }
    vec code(int j, int v) const {
#if defined(__AVX2__) && !defined(__AVX512F__)
        if constexpr (IS_DOUBLED) return __builtin_convertvector((doubled[v][j / 2 % 2] << (24 - 16 * (j % 2) - 8 * (j / 4))) >> 24, vec);
#endif
        const int nibble = j % 2 * 16 + j / 2 * 4;
        if constexpr (IS_SIGNED) return __builtin_convertvector((words[v] << (28 - nibble)) >> 28, vec);
        if constexpr (KIND == INT4) return __builtin_convertvector((words[v] >> nibble) & 15, vec);
        if constexpr (KIND == INT8) return __builtin_convertvector((words[v] << (24 - 8 * j)) >> 24, vec);
        if constexpr (KIND == E2M1) return e2m1(words[v] >> nibble);
        if constexpr (KIND == NF4) return nf4(words[v] >> nibble);
        return e4m3(words[v] << (24 - 8 * j));
    }
    vec number(int j, int v) const {
        if constexpr (HAS_OFFSETS) return multiply_add(code(j, v), scales[v], offsets[v]);
        return code(j, v) * scales[v];
    }
};

// Plain bfloat16, widened.
template <int NB>
struct WidenedFloats {
    using Numbers = Floats;
    static constexpr int V = NB * PARTS, COLUMNS = 2;
    static constexpr bool IS_GROUPED = false, IS_WIDENED = true;
    const int64_t K, panel = K / COLUMNS * PANEL * 4;  // bytes
    const uint32_t *codes[NB], *words[NB] = {};
    const char* fetched;
    int64_t stride;  // bytes

    // For one of the tiles of different rows that follow each other. Together they fetch the next panel.
    WidenedFloats(const Matrix& w, int64_t n, int64_t tile = 0, int64_t tiles = 1) : K(w.K) {
        for (int p = 0; p < NB; ++p) codes[p] = w.words(n + p);
        fetched = reinterpret_cast<const char*>(codes[0]) + (tiles > 1 ? panel + panel * tile / tiles : AHEAD);
        stride = 4 * PANEL / tiles;
    }
    int64_t group() const { return K; }
    void enter(int64_t) {}
    void read(int64_t k) {
        for (int p = 0; p < NB; ++p) {
            words[p] = codes[p] + (k >> 1) * PANEL;
            prefetch(fetched + p * panel);
        }
        fetched += stride;
    }
    // The words are loaded again from here on: the compiler cannot know that they are the same.
    void reload() {
        for (int p = 0; p < NB; ++p) asm("" : "+r"(words[p]));
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

// The magnitudes of codes of a byte as bfloat16. A table has the low bytes of 128 numbers and then the high ones. Of e4m3
// they are those of the lowest seven bits, of int8 1 to 128: 0 is left out.
struct Magnitudes {
    __m512i table[4];

    explicit Magnitudes(Kind kind) {
        alignas(64) uint8_t bytes[256];
        for (int i = 0; i < 128; ++i) {
            const float small = float(i & 7) / 512, normal = std::ldexp(float(8 + (i & 7)), (i >> 3) - 10);
            const bf16 number = from_float<bf16>(kind == INT8 ? float(i + 1) : i < 8 ? small : normal);
            bytes[i] = uint8_t(number), bytes[128 + i] = uint8_t(number >> 8);
        }
        for (int i = 0; i < 4; ++i) table[i] = _mm512_load_si512(bytes + 64 * i);
    }
    __m512i bytes(int high, __m512i index) const {
#if defined(__AVX512VBMI__)
        return _mm512_permutex2var_epi8(table[2 * high], index, table[2 * high + 1]);
#else
        alignas(64) uint8_t each[64], all[128];
        _mm512_store_si512(each, index), _mm512_store_si512(all, table[2 * high]), _mm512_store_si512(all + 64, table[2 * high + 1]);
        for (uint8_t& one : each) one = all[one & 127];
        return _mm512_load_si512(each);
#endif
    }
};

// Codes as bfloat16, from tables.
template <Kind KIND, bool HAS_OFFSETS, int NB>
struct CodedPairs {
    using Numbers = Pairs;
    static constexpr int V = NB, COLUMNS = columns_of(KIND);
    static constexpr bool IS_GROUPED = true, IS_WIDENED = false;
    const Matrix& w;
    const int64_t n;
    const uint32_t* codes[NB];
    __m512i words[V][2] = {}, table;
    const Magnitudes magnitudes{KIND};

    CodedPairs(const Matrix& w, int64_t n) : w(w), n(n) {
        for (int p = 0; p < NB; ++p) codes[p] = w.words(n + p);
        // The index of the permutation has five bits, of which one is the next nibble's: each value stands twice.
        alignas(64) bf16 values[32];
        const float magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        for (int i = 0; i < 32; ++i) {
            const float of_e2m1 = i & 8 ? -magnitudes[i % 8] : magnitudes[i % 8], of_int4 = float(i % 16 - (HAS_OFFSETS ? 0 : 8));
            values[i] = from_float<bf16>(KIND == NF4 ? NF4_LEVELS[i % 16] : KIND == E2M1 ? of_e2m1 : of_int4);
        }
        table = _mm512_load_si512(values);
    }
    int64_t group() const { return w.group; }
    void enter(int64_t) {}
    void read(int64_t k) {
        for (int v = 0; v < V; ++v) {
            const uint32_t* from = codes[v] + k / COLUMNS * PANEL;
            prefetch(reinterpret_cast<const char*>(from) + AHEAD / 2);
            words[v][0] = _mm512_loadu_si512(from);
            if constexpr (COLUMNS == 4) pairs_of_bytes(words[v]);
        }
    }
    // Replaces a word of four columns by the numbers of the first two columns and of the last two.
    void pairs_of_bytes(__m512i (&word)[2]) const {
        const __m128i apart = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        const __m512i bytes = _mm512_shuffle_epi8(word[0], _mm512_broadcast_i32x4(apart)), sign = _mm512_set1_epi8(-128);
        const __m512i index = KIND == INT8 ? _mm512_add_epi8(_mm512_abs_epi8(bytes), _mm512_set1_epi8(-1)) : bytes;
        __m512i low = magnitudes.bytes(0, index), high = magnitudes.bytes(1, index);
        if constexpr (KIND == INT8) {
            const __mmask64 some = _mm512_test_epi8_mask(bytes, bytes);
            low = _mm512_maskz_mov_epi8(some, low), high = _mm512_maskz_mov_epi8(some, high);
        }
        high = _mm512_ternarylogic_epi64(high, bytes, sign, 0xf8);  // high | (bytes & sign)
        word[0] = _mm512_unpacklo_epi8(low, high), word[1] = _mm512_unpackhi_epi8(low, high);
    }
    vec number(int j, int v) const {
        if constexpr (COLUMNS == 4) return _mm512_castsi512_ps(words[v][j]);
        return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_srli_epi16(words[v][0], 4 * j), table));
    }
};
#endif

// Weights that are numbers already, [panel][columns of a product][16]. `fetched`: what comes next, see `Ahead`.
template <class Numbers_, int NB, bool IS_AHEAD, bool IS_GROUPED_>
struct Stored {
    using Numbers = Numbers_;
    static constexpr int V = NB * PARTS, COLUMNS = Numbers::STEP;
    static constexpr bool IS_GROUPED = IS_GROUPED_, IS_WIDENED = false;
    const Matrix& w;
    const int64_t n;
    const uint32_t* numbers;
    const uint32_t* fetched;
    const int64_t panel = w.K / COLUMNS * PANEL;  // words
    const uint32_t* at = nullptr;

    int64_t group() const { return IS_GROUPED ? w.group : w.K; }
    void enter(int64_t) {}
    void read(int64_t k) {
        at = numbers + k / COLUMNS * PANEL;
        if (fetched) __builtin_prefetch(fetched + k / COLUMNS * PANEL, 0, 2);
        for (int p = 0; IS_AHEAD && p < NB; ++p) prefetch(reinterpret_cast<const char*>(at + p * panel) + AHEAD);
    }
    vec number(int, int v) const { return load(at + v / PARTS * panel + v % PARTS * LANES); }
};

// --- tiles ----------------------------------------------------------------------------------------------------------

// Rows of one product, with the sums of each group of their columns where the weight has offsets.
template <class X>
struct RowsOf {
    const X* x;         // [T, K]
    const float* sums;  // [T, groups]
};

// Adds the scaled sums of group g to `out`, and what its offsets add.
template <int MB, int V>
inline void add_group(const vec (&acc)[MB][V], const Matrix& w, int64_t n, int64_t g, const float* const (&row_sums)[MB], vec (&out)[MB][V]) {
    for (int v = 0; v < V; ++v) {
        const vec scale = load(w.grid(w.scales, n + v / PARTS, g) + v % PARTS * LANES);
        for (int m = 0; m < MB; ++m) out[m][v] = multiply_add(acc[m][v], scale, out[m][v]);
    }
    for (int v = 0; w.offsets && v < V; ++v) {
        const vec offset = load(w.grid(w.offsets, n + v / PARTS, g) + v % PARTS * LANES);
        for (int m = 0; m < MB; ++m) out[m][v] = multiply_add(splat(row_sums[m][g]), offset, out[m][v]);
    }
}

// Whether 16 registers are too few for the sums, numbers, words, a row's number and a mask of a tile. Then each column
// loads its words again: else GCC spills the sums, and 6 rows of two vectors take 1.25 times as long (Zen 3).
template <class Source, int MB>
constexpr bool must_reload() {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return Source::IS_WIDENED && (MB + 2) * Source::V + 2 > 16;
#else
    return false;
#endif
}

// Computes the products of MB rows to sums [MB][V]. Only `count` rows exist; the last one is computed in place of others.
template <int MB, class Source>
__attribute__((noinline)) void tile(Source source, const Matrix& w, RowsOf<typename Source::Numbers::element> rows, int count, vec* sums) {
    using Numbers = typename Source::Numbers;
    constexpr int V = Source::V, STEPS = Source::COLUMNS / Numbers::STEP;
    const int64_t K = w.K;
    int64_t row[MB];
    const float* row_sums[MB];
    for (int m = 0; m < MB; ++m) row[m] = std::min(m, count - 1) * K, row_sums[m] = rows.sums + std::min(m, count - 1) * w.num_groups();
    vec out[MB][V] = {};
    for (int64_t from = 0, g = 0; from < K; from += source.group(), ++g) {
        source.enter(g);
        vec acc[MB][V];
        for (int m = 0; m < MB; ++m)
            for (int v = 0; v < V; ++v) acc[m][v] = Source::IS_GROUPED ? vec{} : out[m][v];
        for (int64_t k = from, end = std::min(K, from + source.group()); k < end; k += Source::COLUMNS) {
            source.read(k);
#pragma GCC unroll 8
            for (int j = 0; j < STEPS; ++j) {
                if constexpr (must_reload<Source, MB>())
                    if (j > 0) source.reload();
                vec b[V];
                for (int v = 0; v < V; ++v) b[v] = source.number(j, v);
                for (int m = 0; m < MB; ++m) {
                    const vec a = Numbers::row(rows.x + row[m] + k + j * Numbers::STEP);
                    for (int v = 0; v < V; ++v) acc[m][v] = Numbers::dot(acc[m][v], a, b[v]);
                }
            }
        }
        if constexpr (Source::IS_GROUPED)
            add_group(acc, w, source.n, g, row_sums, out);
        else
            std::memcpy(out, acc, sizeof out);
    }
    std::memcpy(sums, out, sizeof out);
}

// Writes the numbers of columns [begin, end) of a source to memory, in the order of `Stored`. `panel`: the words from one panel to the next.
template <class Source>
__attribute__((noinline)) void write_numbers(Source&& w, int64_t begin, int64_t end, int64_t panel, uint32_t* to) {
    using Of = std::remove_reference_t<Source>;
    constexpr int STEP = Of::Numbers::STEP;
    for (int64_t from = begin, g = begin / w.group(); from < end; from = ++g * w.group()) {
        w.enter(g);
        for (int64_t k = from, last = std::min(end, (g + 1) * w.group()); k < last; k += Of::COLUMNS) {
            w.read(k);
#pragma GCC unroll 8
            for (int j = 0; j < Of::COLUMNS / STEP; ++j)
                for (int v = 0; v < Of::V; ++v)
                    store(to + v / PARTS * panel + ((k - begin) / STEP + j) * PANEL + v % PARTS * LANES, w.number(j, v));
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

// Rows [t, end) with NB panels of numbers from panel n.
template <class Numbers, int NB, bool IS_GROUPED, class Write>
void block(RowsOf<typename Numbers::element> x, const Matrix& w, const uint32_t* numbers, int64_t t, int64_t end, int64_t n, Ahead ahead, Write& write) {
    constexpr int V = NB * PARTS, MOST = MOST_SUMS / V;
    vec sums[MOST][V];
    auto rows = [&](auto count) {
        constexpr int MB = decltype(count)::value;
        for (; t + MB <= end; t += MB) {
            const Stored<Numbers, NB, (MB > 1), IS_GROUPED> stored{w, n, numbers, ahead.next(w.K / Numbers::STEP * PANEL)};
            tile<MB>(stored, w, {x.x + t * w.K, x.sums + t * w.num_groups()}, MB, *sums);
            for (int m = 0; m < MB; ++m) write(t + m, n, sums[m]);
        }
    };
    rows(std::integral_constant<int, MOST>());
    if constexpr (MOST > 8) rows(std::integral_constant<int, 8>());
    if constexpr (MOST > 4) rows(std::integral_constant<int, 4>());
    if constexpr (MOST > 2) rows(std::integral_constant<int, 2>());
    rows(std::integral_constant<int, 1>());
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
        case NF4: return act(std::integral_constant<Kind, NF4>{}, std::false_type{});
        default: return act(std::integral_constant<Kind, E4M3>{}, std::false_type{});
    }
}

constexpr int FEW = PARTS == 1 ? 8 : 6;  // rows of a tile whose numbers are made in registers

// Rows up to which this is done: for two tiles it is faster than memory, unless numbers take long to make. Of AVX2: 5.0
// instead of 6.5 ms for 8 rows of int8, 5.3 instead of 5.8 of int4; 9.8 instead of 6.2 of e4m3 (AMD Zen 4, 19 M weights).
// To widen bfloat16 takes next to nothing, and panels of half the bytes stay in the first cache: 321 instead of 362 ms
// for 256 rows (Zen 3, one thread's share of 106 M weights), so such weights are always widened in registers.
inline int64_t most_few(const Matrix& w) {
    if (PARTS > 1 && w.kind == PLAIN) return INT64_MAX;
    if (PARTS > 1) return w.kind == E4M3 || w.kind == NF4 ? FEW : 8;
    return w.kind == INT8 ? FEW : 2 * FEW;
}

// Writes the numbers of NB panels from panel n, as rows of X are multiplied by.
template <class X, int NB>
void numbers_of(const Matrix& w, int64_t n, uint32_t* to) {
    with_kind(w, [&](auto kind, auto has_offsets) {
        if constexpr (kind.value != PLAIN || std::is_same_v<X, float>)
            write_numbers(typename SourcesOf<X>::template Source<kind.value, has_offsets.value, NB>(w, n), 0, w.K,
                          w.K / SourcesOf<X>::Numbers::STEP * PANEL, to);
    });
}

// Products of `count` rows with panels [n, end), NB at a time, whose numbers are made in registers. Returns the first
// panel that is left.
template <class X, Kind KIND, bool HAS_OFFSETS, int NB, int MB, class Write>
int64_t in_registers(RowsOf<X> x, int64_t count, const Matrix& w, int64_t n, int64_t end, Write& write) {
    using Source = typename SourcesOf<X>::template Source<KIND, HAS_OFFSETS, NB>;
    for (; n + NB <= end; n += NB) {
        int64_t t = 0;
        auto rows = [&](auto size) {
            constexpr int MOST = decltype(size)::value;
            vec sums[MOST][NB * PARTS];
            const int64_t exist = std::min<int64_t>(MOST, count - t);
            const auto source = [&] {
                if constexpr (Source::IS_WIDENED) return Source(w, n, t / MOST, (count + MOST - 1) / MOST);
                else return Source(w, n);
            };
            tile<MOST>(source(), w, {x.x + t * w.K, x.sums + t * w.num_groups()}, int(exist), *sums);
            for (int64_t m = 0; m < exist; ++m) write(t + m, n, sums[m]);
            t += exist;
        };
        while (t < count) {
            const int64_t left = count - t;
            if (MB > 4 && (left <= 4 || (left > MB && left <= 8)))  // a row that does not exist takes as long as any
                rows(std::integral_constant<int, std::min(MB, 4)>());
            else
                rows(std::integral_constant<int, MB>());
        }
    }
    return n;
}

// This thread's share of the products of few rows. Threads share pairs of panels.
template <class X, class Write>
void multiply_few(RowsOf<X> x, int64_t T, const Matrix& w, int tid, int nt, Write& write) {
    const int64_t panels = w.N / PANEL, pairs = (panels + 1) / 2;
    const int64_t first = pairs * tid / nt * 2, end = std::min(pairs * (tid + 1) / nt * 2, panels);
    with_kind(w, [&](auto kind, auto has_offsets) {
        auto rows = [&](auto size, auto most) {
            constexpr int NB = decltype(size)::value, MB = decltype(most)::value;
            int64_t n = in_registers<X, kind.value, has_offsets.value, NB, MB>(x, T, w, first, end, write);
            if constexpr (NB > 2) n = in_registers<X, kind.value, has_offsets.value, 2, MB>(x, T, w, n, end, write);
            if constexpr (NB > 1) in_registers<X, kind.value, has_offsets.value, 1, MB>(x, T, w, n, end, write);
        };
        const std::integral_constant<int, PARTS == 1 ? 4 : 2> widest;  // panels whose sums hide the latency of one row's
        const std::integral_constant<int, PARTS == 1 ? 2 : 1> wide;
        if constexpr (kind.value != PLAIN || std::is_same_v<X, float>) {
            if (T == 1) return rows(widest, std::integral_constant<int, 1>());
            if (T == 2) return rows(widest, std::integral_constant<int, 2>());
            if (T <= 4 || (PARTS > 1 && T > FEW && kind.value != PLAIN)) return rows(wide, std::integral_constant<int, 4>());
            return rows(wide, std::integral_constant<int, FEW>());
        }
    });
}

// Returns the sums of the groups of all rows, which offsets are multiplied by, [T, groups].
inline const float* sums_of_groups(const bf16* x, int64_t T, const Matrix& w) {
    static thread_local std::vector<float> sums;
    const int64_t groups = w.num_groups();
    sums.assign(T * groups, 0.0f);
    for (int64_t i = 0; i < T * groups; ++i) {
        const int64_t from = i % groups * w.group, end = std::min(from + w.group, w.K);
        float sum[PANEL] = {};
        for (int64_t k = from; k < end; k += PANEL)
            for (int j = 0; j < PANEL; ++j) sum[j] += to_float(x[i / groups * w.K + k + j]);
        for (int j = 0; j < PANEL; ++j) sums[i] += sum[j];
    }
    return sums.data();
}

// This thread's share of x [T, K] times a weight: consecutive groups of NB panels, each over blocks of rows.
// `write(t, first panel, acc)` stores 16 outputs of row t for each of the panels in acc. Panels of pairs stay together.
template <int NB, class X, class Write>
void multiply(const X* rows, int64_t T, const Matrix& w, int tid, int nt, Write write) {
    using Numbers = typename SourcesOf<X>::Numbers;
    constexpr int64_t ROWS = 96;
    constexpr bool IS_PAIRS = std::is_same_v<X, bf16>;
    RowsOf<X> x{rows, nullptr};
    if constexpr (IS_PAIRS)
        if (w.offsets) x.sums = sums_of_groups(rows, T, w);
    const bool is_stored = w.kind == PLAIN && IS_PAIRS;
    if (!is_stored && T <= most_few(w)) return multiply_few(x, T, w, tid, nt, write);
    const int64_t panel = w.K / Numbers::STEP * PANEL, panels = w.N / PANEL;
    const int64_t groups = panels / NB, blocks = (T + ROWS - 1) / ROWS;
    static thread_local std::vector<uint32_t> memory;
    if (!is_stored) memory.resize(panel * NB + PANEL);
    uint32_t* made = memory.data() + (64 - uintptr_t(memory.data()) % 64) % 64 / 4;
    auto numbers = [&](auto size, int64_t n, int64_t t, int64_t end, bool are_made, Ahead ahead) {
        constexpr int COUNT = decltype(size)::value, TOGETHER = PARTS == 1 ? COUNT : 1;
        if (is_stored) return block<Numbers, COUNT, false>(x, w, w.codes + n * panel, t, end, n, ahead, write);
        if (!are_made) numbers_of<X, COUNT>(w, n, made);
        for (int p = 0; p < COUNT; p += TOGETHER)  // of AVX2 tiles of 6 rows and one panel: 0.70 of the time of 3 rows and two
            block<Numbers, TOGETHER, IS_PAIRS>(x, w, made + p * panel, t, end, n + p, Ahead{}, write);
    };
    const int64_t tasks = groups * blocks, first = tasks * tid / nt, last = tasks * (tid + 1) / nt;
    for (int64_t task = first; task < last; ++task) {
        const int64_t n = task / blocks * NB, t = task % blocks * ROWS;
        const bool is_last = t + ROWS >= T && task + 1 < last;  // of the blocks of rows that share these panels
        const Ahead ahead = is_last ? Ahead{w.codes + (n + NB) * panel, NB} : Ahead{};
        numbers(std::integral_constant<int, NB>(), n, t, std::min(T, t + ROWS), task > first && t > 0, ahead);
    }
    for (int64_t n = groups * NB + tid; n < panels; n += nt)  // panels that do not fill a group
        numbers(std::integral_constant<int, 1>(), n, 0, T, false, Ahead{});
}

}  // namespace packed
