// Products of rows with weights stored as small codes and scales (kernels/packed.py): out[t, n] = sum_k x[t, k] w[n, k].
//
// A weight [N, K] is packed in panels of 16 outputs. Its codes are decoded a run of columns at a time, for all rows of a
// block, into numbers of the instruction that multiplies them. Sums of a run are scaled in float32. The order of sums is
// the same for any number of rows and threads, so a row's result depends on no other row.
//
// Codes are multiplied as they are: in int16 or int8 (int4, int8, e2m1), bfloat16 (e4m3) or float32. Beside integers, rows
// of bfloat16 are rounded to integers with a scale for each run. To int16 the error is at most 2^-16 of the run's largest
// number, where bfloat16 itself has 2^-9. An instruction multiplies twice as many int8, but their error is 2^-8: only
// where a server is told to. Vectors are the compilers' own (vector_size), so that the float32 path serves every CPU.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace packed {

#if defined(__AVX512F__)
constexpr int LANES = 16, MOST_ROWS = 6, MOST_CODED = 8;  // rows that fill the register file with sums of two panels
using vec = __m512;
#else
constexpr int LANES = 8, MOST_ROWS = 2, MOST_CODED = 2;
using vec = float __attribute__((vector_size(LANES * 4)));
#endif
using ivec = int32_t __attribute__((vector_size(LANES * 4)));
using bf16 = uint16_t;

constexpr int PANEL = 16, PARTS = PANEL / LANES;
constexpr int MOST_COLUMNS = 128;         // of a run: sums of int16 times int8 stay within int32
constexpr int MOST_ROUNDED_COLUMNS = 64;  // of a run of rows in int8: an outlier costs only its neighbours precision
constexpr int64_t BLOCK = 64;             // rows whose sums stay in the first-level cache

enum Kind : int64_t { PLAIN, INT4, INT8, E2M1, E4M3 };  // PLAIN: bfloat16 in panels, which decoder.cpp multiplies
constexpr int columns_of(int64_t kind) { return kind == INT4 || kind == E2M1 ? 8 : 4; }  // whose codes share a word

// A weight in panels. One 32-bit word of a panel's output holds the codes of consecutive columns: of bytes four, in the
// order 0, 2, 1, 3; of nibbles eight, even columns in the low half. So each half of a word gives every second column.
struct Matrix {
    int64_t kind, N, K, group, is_rounded;  // is_rounded: rows of bfloat16 may be rounded to int8
    const uint32_t* codes;  // [N/16][K/columns of a word][16]
    const float* scales;    // [N/16][K/group][16]; of e2m1 halved, as its codes are decoded doubled
    const float* offsets;   // as scales; null: int4 codes are signed, code - 8
    int64_t num_groups() const { return (K + group - 1) / group; }
    int64_t run() const {  // columns that are summed before they are scaled
        const int64_t most = is_rounded ? MOST_ROUNDED_COLUMNS : MOST_COLUMNS;
        if (group <= most) return group;
        return group == K || group % most == 0 ? most : PANEL;
    }
    int zero() const { return kind == INT8 ? 128 : kind == E2M1 ? 12 : offsets ? 0 : 8; }  // added to a code that has no sign
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
#else
    return a * b + c;
#endif
}
inline vec splat_bits(const uint32_t* p) {
    return (vec)(ivec{} + int32_t(*p));
}
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// --- numbers of float32: one column in a word -----------------------------------------------------------------------

// Floats with MANTISSA bits after the sign bit and the exponent: magnitudes as float32. BIAS: 127 less their own.
template <int MANTISSA, int BIAS>
inline vec small_float(ivec code, int32_t sign_bit) {
    const ivec magnitude = code & (sign_bit - 1);
    const ivec normal = (magnitude << (23 - MANTISSA)) + (BIAS << 23);
    const vec subnormal = __builtin_convertvector(magnitude, vec) * (1.0f / float(1 << (126 - BIAS + MANTISSA)));
    const ivec bits = magnitude < (1 << MANTISSA) ? (ivec)subnormal : normal;
    return (vec)(bits | ((code & sign_bit) != 0 ? ivec{} + INT32_MIN : ivec{}));
}

// Each kind of numbers says how many columns share a word, how to decode the j-th number of a word of codes, to convert
// a run of a row, and to multiply. `sum` is that of the converted run.
struct Floats {
    static constexpr int PER_WORD = 1;
    using sums = vec;

    static vec start(float, int) { return vec{}; }
    static vec dot(vec acc, vec a, vec b) { return multiply_add(a, b, acc); }
    static vec value(vec acc) { return acc; }

    template <Kind KIND>
    static vec decoded(vec codes, int j, int zero) {
        const ivec word = (ivec)codes;
        const int byte = j % 2 * 16 + j / 2 * 8, nibble = j % 2 * 16 + j / 2 * 4;
        if constexpr (KIND == INT4) return __builtin_convertvector(((word >> nibble) & 15) - zero, vec);
        if constexpr (KIND == INT8) return __builtin_convertvector((word << (24 - byte)) >> 24, vec);
        if constexpr (KIND == E2M1) return small_float<1, 127>((word >> nibble) & 15, 8);
        return small_float<3, 120>((word >> byte) & 255, 128);
    }

    template <Kind, class X>
    static void convert(const X* x, int columns, uint32_t* to, float& scale, float& sum) {
        scale = 1, sum = 0;
        for (int k = 0; k < columns; ++k) {
            const float number = to_float(x[k]);
            std::memcpy(to + k, &number, 4);
            sum += number;
        }
    }
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
inline __m512 load16(const bf16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16));
}

// Rounds 16 columns at a time to integers of at most MOST; `put(k, integers)` stores them. Returns their sum.
template <class Put>
inline int rounded(const bf16* x, int columns, float most, float& scale, Put put) {
    __m512 largest = _mm512_setzero_ps();
    for (int k = 0; k < columns; k += 16) largest = _mm512_max_ps(largest, _mm512_abs_ps(load16(x + k)));
    scale = _mm512_reduce_max_ps(largest) / most;
    const __m512 factor = _mm512_set1_ps(scale > 1e-30f ? 1.0f / scale : 0.0f);
    __m512i total = _mm512_setzero_si512();
    for (int k = 0; k < columns; k += 16) {
        const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(load16(x + k), factor));
        put(k, integers);
        total = _mm512_add_epi32(total, integers);
    }
    return _mm512_reduce_add_epi32(total);
}

// --- numbers of int16: two columns in a word ------------------------------------------------------------------------

struct Words {
    static constexpr int PER_WORD = 2;
    using sums = __m512i;

    static __m512i start(float, int) { return _mm512_setzero_si512(); }
    static __m512i dot(__m512i acc, vec a, vec b) {  // not the intrinsic: GCC 12 keeps its sums in memory
        asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
        return acc;
    }
    static vec value(__m512i acc) { return _mm512_cvtepi32_ps(acc); }

    template <Kind KIND>
    static vec decoded(vec codes, int j, int zero) {
        const __m512i word = _mm512_castps_si512(codes);
        if constexpr (KIND == INT8)
            return _mm512_castsi512_ps(_mm512_srai_epi16(j == 0 ? _mm512_slli_epi16(word, 8) : word, 8));
        // The index of the permutation has five bits, of which one is the next nibble's: each value stands twice.
        const __m256i doubled = _mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        const __m256i counted = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m256i values = KIND == E2M1 ? doubled : _mm256_sub_epi16(counted, _mm256_set1_epi16(int16_t(zero)));
        return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_srli_epi16(word, 4 * j), _mm512_broadcast_i64x4(values)));
    }

    template <Kind>
    static void convert(const bf16* x, int columns, uint32_t* to, float& scale, float& sum) {
        sum = float(rounded(x, columns, 32767, scale, [&](int k, __m512i integers) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + k / 2), _mm512_cvtepi32_epi16(integers));
        }));
    }
};

// --- numbers of int8: four columns in a word, unsigned codes by signed rows -----------------------------------------

struct Bytes {
    static constexpr int PER_WORD = 4;
    using sums = __m512i;

    static __m512i start(float sum, int zero) { return _mm512_set1_epi32(-zero * int(sum)); }
    static __m512i dot(__m512i acc, vec a, vec b) {
        asm("vpdpbusd %1, %2, %0" : "+v"(acc) : "v"(a), "v"(b));
        return acc;
    }
    static vec value(__m512i acc) { return _mm512_cvtepi32_ps(acc); }

    template <Kind KIND>
    static vec decoded(vec codes, int j, int) {
        const __m512i word = _mm512_castps_si512(codes);
        if constexpr (KIND == INT8) return _mm512_castsi512_ps(_mm512_xor_si512(word, _mm512_set1_epi8(-128)));
        const __m512i nibbles = _mm512_and_si512(_mm512_srli_epi16(word, 4 * j), _mm512_set1_epi8(15));
        if constexpr (KIND == INT4) return _mm512_castsi512_ps(nibbles);
        const __m128i from_zero = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        return _mm512_castsi512_ps(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(from_zero), nibbles));
    }

    // Columns stand as those of the codes, see Matrix.
    template <Kind KIND>
    static void convert(const bf16* x, int columns, uint32_t* to, float& scale, float& sum) {
        const __m128i order = columns_of(KIND) == 4 ? _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)
                                                    : _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        sum = float(rounded(x, columns, 127, scale, [&](int k, __m512i integers) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k / 4), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(integers), order));
        }));
    }
};
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// --- numbers of bfloat16: two columns in a word, for codes of e4m3 --------------------------------------------------

struct Pairs {
    static constexpr int PER_WORD = 2;
    using sums = vec;

    static vec start(float, int) { return _mm512_setzero_ps(); }
    static vec dot(vec acc, vec a, vec b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
    static vec value(vec acc) { return acc; }

    template <Kind>
    static vec decoded(vec word, int j, int) {
        const __m512i codes = _mm512_srli_epi16(_mm512_castps_si512(word), 8 * j);
        const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(127));
        const __m512i subnormal = _mm512_broadcast_i32x4(
            _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));  // 0 to 7 times 2^-9
        const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
        const __mmask32 is_small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
        const __m512i bits = _mm512_mask_permutexvar_epi16(normal, is_small, magnitude, subnormal);
        const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(codes, 8), _mm512_set1_epi16(INT16_MIN));
        return _mm512_castsi512_ps(_mm512_or_si512(bits, sign));
    }

    template <Kind>
    static void convert(const bf16* x, int columns, uint32_t* to, float& scale, float& sum) {
        std::memcpy(to, x, columns * sizeof(bf16));
        scale = 1, sum = 0;
        for (int k = 0; k < columns; ++k) sum += to_float(x[k]);
    }
};
#endif

// --- rows, and their products ---------------------------------------------------------------------------------------

// Rows as numbers of the instruction, with the scale and the sum of each run of columns. All rows of a run are adjacent.
struct Rows {
    int64_t T;
    std::unique_ptr<uint32_t[]> words;     // [runs][T][columns of a run / PER_WORD]
    std::unique_ptr<float[]> scales, sums;  // [runs][T]

    Rows(int64_t T, int64_t widest)  // not set to zero: the vectors would be
        : T(T), words(new uint32_t[T * (widest + MOST_COLUMNS)]), scales(new float[T * widest / PANEL]), sums(new float[T * widest / PANEL]) {}

    template <class Numbers, Kind KIND, class X>
    void convert(int64_t t, const X* x, const Matrix& w) {
        const int64_t run = w.run();
        for (int64_t k = 0, at = t; k < w.K; k += run, at += T)
            Numbers::template convert<KIND>(x + k, int(std::min(run, w.K - k)), &words[at * run / Numbers::PER_WORD], scales[at], sums[at]);
    }
};

constexpr int PANELS = 2, V = PANELS * PARTS;  // panels that are multiplied together, and their vectors

// Codes of two panels from panel n, decoded as they are multiplied. Past the last panel the last is read again.
template <class Numbers_, Kind KIND>
struct Coded {
    using Numbers = Numbers_;
    static constexpr int COLUMNS = columns_of(KIND), PER_CODE = COLUMNS / Numbers::PER_WORD;
    const Matrix& w;
    const int64_t n;
    const int zero = w.zero();

    int64_t panel(int v) const { return std::min(n + v / PARTS, w.N / PANEL - 1); }
    vec word(int64_t i, int v) const {  // the i-th of a row's words of codes
        return load(w.codes + (panel(v) * (w.K / COLUMNS) + i) * PANEL + v % PARTS * LANES);
    }
    vec number(vec word, int64_t, int j, int) const { return Numbers::template decoded<KIND>(word, j, zero); }
    vec grid(const float* values, int64_t group, int v) const {  // scales or offsets of a group
        return load(values + (panel(v) * w.num_groups() + group) * PANEL + v % PARTS * LANES);
    }
};

// The same panels, decoded before: for many rows.
template <class Codes>
struct Decoded : Codes {
    static constexpr int PER_CODE = Codes::PER_CODE;
    float* const numbers;  // [words of a row][PER_CODE][V][LANES]

    Decoded(const Codes& codes, float* numbers) : Codes(codes), numbers(numbers) {
        for (int v = 0; v < V; ++v)
            for (int64_t i = 0; i < codes.w.K / Codes::COLUMNS; ++i) {
                const vec word = codes.word(i, v);
                for (int j = 0; j < PER_CODE; ++j) store(numbers + ((i * PER_CODE + j) * V + v) * LANES, codes.number(word, i, j, v));
            }
    }
    vec word(int64_t, int) const { return vec{}; }
    vec number(vec, int64_t i, int j, int v) const { return load(numbers + ((i * PER_CODE + j) * V + v) * LANES); }
};

// Computes the products of rows [t, t + MB) to sums [MB][V].
template <int MB, class Codes>
__attribute__((noinline)) void multiply_rows(const Rows& x, int64_t t, const Codes& codes, vec* sums) {
    using Numbers = typename Codes::Numbers;
    constexpr int J = Codes::PER_CODE;
    const Matrix& w = codes.w;
    const int64_t columns = w.run(), width = columns / Numbers::PER_WORD;
    vec out[MB][V] = {};
    for (int64_t from = 0, at = t; from < w.K; from += columns, at += x.T) {
        const uint32_t* words = &x.words[at * width];
        typename Numbers::sums acc[MB][V];
        for (int m = 0; m < MB; ++m)
            for (int v = 0; v < V; ++v) acc[m][v] = Numbers::start(x.sums[at + m], codes.zero);
        const int64_t last = std::min(from + columns, w.K) / Codes::COLUMNS;
        for (int64_t i = from / Codes::COLUMNS; i < last; ++i, words += J) {
            vec coded[V];
            for (int v = 0; v < V; ++v) coded[v] = codes.word(i, v);
            for (int j = 0; j < J; ++j) {
                vec b[V];
                for (int v = 0; v < V; ++v) b[v] = codes.number(coded[v], i, j, v);
                for (int m = 0; m < MB; ++m) {
                    const vec a = splat_bits(words + m * width + j);
                    for (int v = 0; v < V; ++v) acc[m][v] = Numbers::dot(acc[m][v], a, b[v]);
                }
            }
        }
        for (int v = 0; v < V; ++v) {
            const vec scale = codes.grid(w.scales, from / w.group, v);
            for (int m = 0; m < MB; ++m)
                out[m][v] = multiply_add(Numbers::value(acc[m][v]) * splat(x.scales[at + m]), scale, out[m][v]);
        }
        for (int v = 0; w.offsets && v < V; ++v) {
            const vec offset = codes.grid(w.offsets, from / w.group, v);
            for (int m = 0; m < MB; ++m) out[m][v] = multiply_add(splat(x.sums[at + m] * x.scales[at + m]), offset, out[m][v]);
        }
    }
    std::memcpy(sums, out, sizeof out);
}

template <int MB, class Codes>
void multiply_all(const Rows& x, int64_t t, int64_t end, const Codes& codes, vec* sums) {
    for (; t + MB <= end; t += MB, sums += MB * V) multiply_rows<MB>(x, t, codes, sums);
    if constexpr (MB > 1) multiply_all<(MB > 4 ? 4 : MB / 2)>(x, t, end, codes, sums);
}

// Computes the products of rows [t, end), at most BLOCK, with two panels from panel n to sums [end - t][V].
template <class Numbers, Kind KIND>
void packed_block(const Rows& x, const Matrix& w, int64_t t, int64_t end, int64_t n, vec* sums) {
    const Coded<Numbers, KIND> codes{w, n};
    if (end - t <= MOST_CODED) return multiply_all<MOST_CODED>(x, t, end, codes, sums);
    static thread_local std::vector<float> memory;
    memory.resize((w.K * PANELS + 1) * PANEL);
    float* aligned = memory.data() + (64 - uintptr_t(memory.data()) % 64) % 64 / sizeof(float);
    multiply_all<MOST_ROWS>(x, t, end, Decoded(codes, aligned), sums);
}

// The numbers that multiply rows of X by codes of KIND on this CPU.
template <class X, Kind KIND, bool IS_ROUNDED>
struct NumbersOf {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    using ForE4m3 = Pairs;
#else
    using ForE4m3 = Floats;
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    using ForIntegers = std::conditional_t<IS_ROUNDED, Bytes, Words>;
#else
    using ForIntegers = Floats;
#endif
    using type = std::conditional_t<std::is_same_v<X, float>, Floats, std::conditional_t<KIND == E4M3, ForE4m3, ForIntegers>>;
};

// Calls `act` with the numbers and the kind of a weight, as types.
template <class X, class Act>
inline void with_numbers(const Matrix& w, Act act) {
    auto of_kind = [&](auto kind) {
        constexpr Kind KIND = decltype(kind)::value;
        if (w.is_rounded)
            act(typename NumbersOf<X, KIND, true>::type{}, kind);
        else
            act(typename NumbersOf<X, KIND, false>::type{}, kind);
    };
    switch (w.kind) {
        case INT4: return of_kind(std::integral_constant<Kind, INT4>{});
        case INT8: return of_kind(std::integral_constant<Kind, INT8>{});
        case E2M1: return of_kind(std::integral_constant<Kind, E2M1>{});
        default: return of_kind(std::integral_constant<Kind, E4M3>{});
    }
}

// Prepares row t of X for products with w. All rows are prepared before `packed_product`.
template <class X>
void prepare(Rows& rows, int64_t t, const X* x, const Matrix& w) {
    with_numbers<X>(w, [&](auto numbers, auto kind) { rows.convert<decltype(numbers), kind.value>(t, x, w); });
}

// This thread's share of the products of T rows. `write(t, first panel, acc)` stores the outputs of a row: 16 for each of
// two panels, or of one that is left.
template <class X, class Write>
void packed_product(const Rows& rows, int64_t T, const Matrix& w, int tid, int nt, Write write) {
    const int64_t panels = w.N / PANEL, pairs = (panels + 1) / PANELS, blocks = (T + BLOCK - 1) / BLOCK;
    const int64_t tasks = pairs * blocks, first = tasks * tid / nt, last = tasks * (tid + 1) / nt;
    for (int64_t task = first; task < last; ++task) {
        const int64_t n = task / blocks * PANELS, t = task % blocks * BLOCK, end = std::min(T, t + BLOCK);
        vec sums[BLOCK][V];
        with_numbers<X>(w, [&](auto numbers, auto kind) { packed_block<decltype(numbers), kind.value>(rows, w, t, end, n, *sums); });
        for (int64_t i = t; i < end; ++i) {
            vec(&two)[V] = sums[i - t];
            if (n + 1 < panels)
                write(i, n, two);
            else
                write(i, n, reinterpret_cast<vec(&)[PARTS]>(two));
        }
    }
}

}  // namespace packed
