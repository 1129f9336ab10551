// Products of rows rounded to int8 with weights of integer codes (AVX512-VNNI, or AVX2).
//
// A row is rounded with a scale for each run of columns, at most 64 and within a group of the weight: an outlier costs
// only its neighbours precision. Integers are multiplied two or four at a time, and the sum of a run is scaled in float32.

#pragma once

#include "packed.h"

#include <memory>

#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || (defined(__AVX2__) && !defined(__AVX512F__))
#define ROUNDS_ROWS

namespace packed {

// Whether products with a weight are those of rounded rows.
inline bool is_rounded(const Matrix& w) { return w.is_rounded && w.kind != PLAIN && w.kind != E4M3 && w.kind != NF4; }

constexpr int MOST_COLUMNS = 64;        // of a run
constexpr int MOST_CODED = 8;           // rows for which codes are decoded as they are multiplied
constexpr int64_t BLOCK = 64;           // rows whose sums stay in the first-level cache
constexpr int PAIR = 2;                 // panels that are multiplied together

inline int64_t run_of(const Matrix& w) {  // columns that are summed before they are scaled
    if (w.group <= MOST_COLUMNS) return w.group;
    return w.group == w.K || w.group % MOST_COLUMNS == 0 ? MOST_COLUMNS : PANEL;
}

// Codes as unsigned bytes, of four columns in a word: the code of an element is the byte less `zero`.
inline int zero_of(const Matrix& w) { return w.kind == INT8 ? 128 : w.kind == E2M1 ? 12 : w.offsets ? 0 : 8; }

#if defined(__AVX512F__)

template <Kind KIND>
inline __m512i bytes_of(__m512i word, int j) {  // the j-th word of bytes
    if constexpr (KIND == INT8) return _mm512_xor_si512(word, _mm512_set1_epi8(-128));
    const __m512i nibbles = _mm512_and_si512(_mm512_srli_epi16(word, 4 * j), _mm512_set1_epi8(15));
    if constexpr (KIND == INT4) return nibbles;
    const __m128i from_zero = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);  // doubled
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(from_zero), nibbles);
}

inline __m512i dot(__m512i acc, __m512i row, __m512i bytes) {  // not the intrinsic: GCC 12 keeps its sums in memory
    asm("vpdpbusd %1, %2, %0" : "+v"(acc) : "v"(row), "v"(bytes));
    return acc;
}

// Rounded rows, with the scale and the sum of each run. All rows of a run are adjacent.
struct Rows {
    int64_t T;
    std::unique_ptr<int8_t[]> bytes;         // [runs][T][columns of a run]
    std::unique_ptr<float[]> scales, sums;  // [runs][T]

    Rows(int64_t T, int64_t widest)  // not set to zero: the vectors would be
        : T(T), bytes(new int8_t[T * (widest + MOST_COLUMNS)]), scales(new float[T * widest / PANEL]), sums(new float[T * widest / PANEL]) {}

    // Rounds row t for products with w. All rows are rounded before `multiply_rounded`.
    template <class X>
    void round(int64_t t, const X* x, const Matrix& w) {
        // Columns stand as in the bytes of codes, see Matrix.
        const __m128i order = columns_of(w.kind) == 8 ? _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
                                                      : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const int64_t run = run_of(w);
        for (int64_t from = 0, at = t; from < w.K; from += run, at += T) {
            const int64_t columns = std::min(run, w.K - from);
            __m512 largest = _mm512_setzero_ps();
            for (int64_t k = 0; k < columns; k += 16) largest = _mm512_max_ps(largest, _mm512_abs_ps(widen(x + from + k)));
            scales[at] = _mm512_reduce_max_ps(largest) / 127;
            const __m512 factor = _mm512_set1_ps(scales[at] > 1e-30f ? 1.0f / scales[at] : 0.0f);
            __m512i total = _mm512_setzero_si512();
            for (int64_t k = 0; k < columns; k += 16) {
                const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(widen(x + from + k), factor));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(&bytes[at * run + k]), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(integers), order));
                total = _mm512_add_epi32(total, integers);
            }
            sums[at] = float(_mm512_reduce_add_epi32(total));
        }
    }
};

// Computes the products of rows [t, t + MB) with two panels from panel n to sums [MB][2]. Past the last panel the last
// is read again. `decoded`: the bytes of the panels, [words][2][16]; null: they are decoded from the codes.
template <int MB, Kind KIND, bool IS_DECODED>
__attribute__((noinline)) void rounded_tile(const Rows& x, int64_t t, const Matrix& w, int64_t n, const uint32_t* decoded, vec* sums) {
    constexpr int J = columns_of(KIND) / 4;
    const int64_t run = run_of(w), panel[PAIR] = {n, std::min(n + 1, w.N / PANEL - 1)};
    const int zero = zero_of(w);
    vec out[MB][PAIR] = {};
    for (int64_t from = 0, at = t; from < w.K; from += run, at += x.T) {
        const int8_t* rows = &x.bytes[at * run];
        __m512i acc[MB][PAIR];
        for (int m = 0; m < MB; ++m)
            for (int v = 0; v < PAIR; ++v) acc[m][v] = _mm512_set1_epi32(-zero * int(x.sums[at + m]));
        for (int64_t k = from, end = std::min(from + run, w.K); k < end; k += 4 * J, rows += 4 * J) {
            __m512i word[PAIR];
            for (int v = 0; !IS_DECODED && v < PAIR; ++v) word[v] = _mm512_loadu_si512(w.words(panel[v]) + k / (4 * J) * PANEL);
            for (int j = 0; j < J; ++j) {
                __m512i b[PAIR];
                for (int v = 0; v < PAIR; ++v)
                    b[v] = IS_DECODED ? _mm512_loadu_si512(decoded + ((k / 4 + j) * PAIR + v) * PANEL) : bytes_of<KIND>(word[v], j);
                for (int m = 0; m < MB; ++m) {
                    int32_t four;
                    std::memcpy(&four, rows + m * run + 4 * j, 4);
                    for (int v = 0; v < PAIR; ++v) acc[m][v] = dot(acc[m][v], _mm512_set1_epi32(four), b[v]);
                }
            }
        }
        for (int v = 0; v < PAIR; ++v) {
            vec scale = load(w.grid(w.scales, panel[v], from / w.group));
            if constexpr (KIND == E2M1) scale *= 0.5f;
            for (int m = 0; m < MB; ++m) out[m][v] = multiply_add(_mm512_cvtepi32_ps(acc[m][v]) * splat(x.scales[at + m]), scale, out[m][v]);
        }
        for (int v = 0; w.offsets && v < PAIR; ++v) {
            const vec offset = load(w.grid(w.offsets, panel[v], from / w.group));
            for (int m = 0; m < MB; ++m) out[m][v] = multiply_add(splat(x.sums[at + m] * x.scales[at + m]), offset, out[m][v]);
        }
    }
    std::memcpy(sums, out, sizeof out);
}

template <int MB, Kind KIND, bool IS_DECODED>
void rounded_tiles(const Rows& x, int64_t t, int64_t end, const Matrix& w, int64_t n, const uint32_t* decoded, vec* sums) {
    for (; t + MB <= end; t += MB, sums += MB * PAIR) rounded_tile<MB, KIND, IS_DECODED>(x, t, w, n, decoded, sums);
    if constexpr (MB > 1) rounded_tiles<(MB > 4 ? 4 : MB / 2), KIND, IS_DECODED>(x, t, end, w, n, decoded, sums);
}

template <Kind KIND>
void decode(const Matrix& w, int64_t n, uint32_t* to) {
    constexpr int J = columns_of(KIND) / 4;
    for (int v = 0; v < PAIR; ++v)
        for (int64_t i = 0; i < w.K / (4 * J); ++i) {
            const __m512i word = _mm512_loadu_si512(w.words(std::min(n + v, w.N / PANEL - 1)) + i * PANEL);
            for (int j = 0; j < J; ++j) _mm512_storeu_si512(to + ((i * J + j) * PAIR + v) * PANEL, bytes_of<KIND>(word, j));
        }
}

// This thread's share of the products of T rounded rows. `write(t, first panel, acc)` as for `multiply`.
template <class Write>
void multiply_rounded(const Rows& rows, int64_t T, const Matrix& w, int tid, int nt, Write write) {
    const int64_t panels = w.N / PANEL, pairs = (panels + 1) / PAIR, blocks = (T + BLOCK - 1) / BLOCK;
    const int64_t tasks = pairs * blocks, first = tasks * tid / nt, last = tasks * (tid + 1) / nt;
    static thread_local std::vector<uint32_t> memory;
    memory.resize(w.K / 4 * PAIR * PANEL + PANEL);
    uint32_t* decoded = memory.data() + (64 - uintptr_t(memory.data()) % 64) % 64 / 4;
    for (int64_t task = first; task < last; ++task) {
        const int64_t n = task / blocks * PAIR, t = task % blocks * BLOCK, end = std::min(T, t + BLOCK);
        vec sums[BLOCK][PAIR];
        with_kind(w, [&](auto kind, auto) {
            constexpr Kind KIND = kind.value == INT4 || kind.value == E2M1 ? kind.value : INT8;
            if (end - t <= MOST_CODED) return rounded_tiles<MOST_CODED, KIND, false>(rows, t, end, w, n, nullptr, *sums);
            if (task == first || t == 0) decode<KIND>(w, n, decoded);
            rounded_tiles<6, KIND, true>(rows, t, end, w, n, decoded, *sums);
        });
        for (int64_t i = t; i < end; ++i) {
            if (n + 1 < panels)
                write(i, n, sums[i - t]);
            else
                write(i, n, reinterpret_cast<vec(&)[1]>(sums[i - t]));
        }
    }
}

#else

inline int64_t runs_of(const Matrix& w) { return (w.K + run_of(w) - 1) / run_of(w); }

// Rounded rows, with the scale and the sum of each run.
struct Rows {
    int64_t T;
    std::unique_ptr<int8_t[]> bytes;        // [T][K]; beside codes of int8 these are int16
    std::unique_ptr<float[]> scales, sums;  // [T][runs]

    Rows(int64_t T, int64_t widest)
        : T(T), bytes(new int8_t[2 * T * widest]), scales(new float[T * widest / PANEL]), sums(new float[T * widest / PANEL]) {}

    // Rounds row t for products with w. All rows are rounded before `multiply_rounded`.
    template <class X>
    void round(int64_t t, const X* x, const Matrix& w) {
        // Columns stand as in the bytes of codes (see Matrix), of int8 as in the halves of words: 0, 2 and 1, 3.
        const __m128i of_nibbles = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        const __m128i of_bytes = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
        const int64_t run = run_of(w), width = w.kind == INT8 ? 2 : 1;
        for (int64_t from = 0, at = t * runs_of(w); from < w.K; from += run, ++at) {
            const int64_t columns = std::min(run, w.K - from);
            vec most = {};
            for (int64_t k = 0; k < columns; k += LANES) {
                const vec numbers = widen(x + from + k);
                most = largest_of(most, largest_of(numbers, -numbers));
            }
            float largest = 0;
            for (int i = 0; i < LANES; ++i) largest = std::max(largest, most[i]);
            scales[at] = largest / 127;
            const vec factor = splat(scales[at] > 1e-30f ? 1.0f / scales[at] : 0.0f);
            vec total = {};
            for (int64_t k = 0; k < columns; k += 16) {
                const vec low = nearest_integer(widen(x + from + k) * factor), high = nearest_integer(widen(x + from + k + LANES) * factor);
                total += low + high;
                __m128i words[2];
                const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), _mm256_permute4x64_epi64(both, 0xd8));
                __m128i* to = reinterpret_cast<__m128i*>(bytes.get() + (t * w.K + from + k) * width);
                if (width == 2)
                    for (int i = 0; i < 2; ++i) _mm_storeu_si128(to + i, _mm_shuffle_epi8(words[i], of_bytes));
                else
                    _mm_storeu_si128(to, _mm_shuffle_epi8(_mm_packs_epi16(words[0], words[1]), of_nibbles));
            }
            sums[at] = sum(total);
        }
    }
};

inline __m256i four_bytes(const int8_t* p) {  // of a row, for all outputs
    int32_t word;
    std::memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

// Adds the products of columns [k, end) of MB rows with panel `codes` of int8: as int16, two at a time.
template <int MB>
inline void add_bytes(const uint32_t* codes, const int8_t* rows, int64_t stride, int64_t columns, __m256i (&acc)[MB][PARTS]) {
    for (int64_t k = 0; k < columns; k += 4, codes += PANEL, rows += 8) {
        __m256i even[PARTS], odd[PARTS];
        for (int v = 0; v < PARTS; ++v) {
            const __m256i word = (__m256i)load(codes + v * LANES);
            prefetch(reinterpret_cast<const char*>(codes + v * LANES) + AHEAD / 2);
            even[v] = _mm256_srai_epi16(_mm256_slli_epi16(word, 8), 8), odd[v] = _mm256_srai_epi16(word, 8);
        }
        for (int m = 0; m < MB; ++m) {
            const __m256i first = four_bytes(rows + 2 * m * stride), second = four_bytes(rows + 2 * m * stride + 4);
            for (int v = 0; v < PARTS; ++v) acc[m][v] = _mm256_add_epi32(acc[m][v], _mm256_madd_epi16(even[v], first));
            for (int v = 0; v < PARTS; ++v) acc[m][v] = _mm256_add_epi32(acc[m][v], _mm256_madd_epi16(odd[v], second));
        }
    }
}

// The same for nibbles. Products of unsigned and signed bytes are summed in int16 as long as none can overflow:
// 32 * 15 * 127 of int4, 16 * 24 * 127 of e2m1, in two halves.
template <int MB, Kind KIND>
inline void add_nibbles(const uint32_t* codes, const int8_t* rows, int64_t stride, int64_t columns, __m256i (&acc)[MB][PARTS]) {
    constexpr int64_t MOST = KIND == INT4 ? 32 : 16;
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i from_zero = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    for (int64_t from = 0; from < columns; from += MOST) {
        __m256i few[MB][PARTS] = {};
        for (int64_t k = from; k < std::min(from + MOST, columns); k += 8, codes += PANEL, rows += 8) {
            __m256i word[PARTS];
            for (int v = 0; v < PARTS; ++v) {
                word[v] = (__m256i)load(codes + v * LANES);
                prefetch(reinterpret_cast<const char*>(codes + v * LANES) + AHEAD / 2);
            }
            for (int j = 0; j < 2; ++j) {
                __m256i bytes[PARTS];
                for (int v = 0; v < PARTS; ++v) {
                    bytes[v] = _mm256_and_si256(j ? _mm256_srli_epi16(word[v], 4) : word[v], mask);
                    if constexpr (KIND == E2M1) bytes[v] = _mm256_shuffle_epi8(from_zero, bytes[v]);
                }
                for (int m = 0; m < MB; ++m) {
                    const __m256i row = four_bytes(rows + m * stride + 4 * j);
                    for (int v = 0; v < PARTS; ++v) few[m][v] = _mm256_add_epi16(few[m][v], _mm256_maddubs_epi16(bytes[v], row));
                }
            }
        }
        for (int m = 0; m < MB; ++m)
            for (int v = 0; v < PARTS; ++v) acc[m][v] = _mm256_add_epi32(acc[m][v], _mm256_madd_epi16(few[m][v], ones));
    }
}

// Computes the products of rows [t, t + MB) with panel n to sums [MB][PARTS].
template <int MB, Kind KIND>
__attribute__((noinline)) void rounded_tile(const Rows& x, int64_t t, const Matrix& w, int64_t n, vec* sums) {
    constexpr int WIDTH = KIND == INT8 ? 2 : 1;
    const int64_t run = run_of(w), runs = runs_of(w);
    const int zero = KIND == INT8 ? 0 : zero_of(w);
    const uint32_t* codes = w.words(n);
    vec out[MB][PARTS] = {};
    for (int64_t from = 0, at = t * runs; from < w.K; from += run, ++at, codes += run / columns_of(KIND) * PANEL) {
        const int8_t* rows = &x.bytes[(t * w.K + from) * WIDTH];
        const int64_t columns = std::min(run, w.K - from);
        __m256i acc[MB][PARTS];
        for (int m = 0; m < MB; ++m)
            for (int v = 0; v < PARTS; ++v) acc[m][v] = _mm256_set1_epi32(-zero * int(x.sums[at + m * runs]));
        if constexpr (KIND == INT8)
            add_bytes<MB>(codes, rows, w.K, columns, acc);
        else
            add_nibbles<MB, KIND>(codes, rows, w.K, columns, acc);
        for (int v = 0; v < PARTS; ++v) {
            vec scale = load(w.grid(w.scales, n, from / w.group) + v * LANES);
            if constexpr (KIND == E2M1) scale *= 0.5f;
            for (int m = 0; m < MB; ++m) out[m][v] = multiply_add(_mm256_cvtepi32_ps(acc[m][v]) * splat(x.scales[at + m * runs]), scale, out[m][v]);
        }
        for (int v = 0; w.offsets && v < PARTS; ++v) {
            const vec offset = load(w.grid(w.offsets, n, from / w.group) + v * LANES);
            for (int m = 0; m < MB; ++m) out[m][v] = multiply_add(splat(x.sums[at + m * runs] * x.scales[at + m * runs]), offset, out[m][v]);
        }
    }
    std::memcpy(sums, out, sizeof out);
}

template <int MB, Kind KIND, class Write>
void rounded_tiles(const Rows& x, int64_t t, int64_t end, const Matrix& w, int64_t n, Write& write) {
    vec sums[MB][PARTS];
    for (; t + MB <= end; t += MB) {
        rounded_tile<MB, KIND>(x, t, w, n, *sums);
        for (int m = 0; m < MB; ++m) write(t + m, n, sums[m]);
    }
    if constexpr (MB > 1) rounded_tiles<MB / 2, KIND>(x, t, end, w, n, write);
}

// This thread's share of the products of T rounded rows. `write(t, panel, acc)` as for `multiply`.
template <class Write>
void multiply_rounded(const Rows& rows, int64_t T, const Matrix& w, int tid, int nt, Write write) {
    const int64_t panels = w.N / PANEL, pairs = (panels + 1) / PAIR;
    const int64_t first = pairs * tid / nt * PAIR, last = std::min(pairs * (tid + 1) / nt * PAIR, panels);
    for (int64_t t = 0; t < T; t += BLOCK)  // whose bytes stay in the second-level cache
        for (int64_t n = first; n < last; ++n)
            with_kind(w, [&](auto kind, auto) {
                constexpr Kind KIND = kind.value == INT4 || kind.value == E2M1 ? kind.value : INT8;
                rounded_tiles<4, KIND>(rows, t, std::min(T, t + BLOCK), w, n, write);
            });
}

#endif

}  // namespace packed

#endif
