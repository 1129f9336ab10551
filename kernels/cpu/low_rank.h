// The low-rank matrices of adapters: outputs of a linear get B A x. Each row's sums have one order, whatever the other rows are.

#pragma once

#include "packed.h"

extern "C" {

struct Delta {           // of one matrix
    const void *a, *b;  // [rank, K], [rank, N]
    int64_t rank;        // 0: the matrix stays as it is
    int64_t is_narrow;   // a and b are bfloat16; else of the type of inputs and outputs
};

enum DeltaOf { Q_DELTA, K_DELTA, V_DELTA, OUT_DELTA, GATE_DELTA, UP_DELTA, DOWN_DELTA, NUM_DELTAS };

struct LayerDeltas {
    Delta of[NUM_DELTAS];
};

}  // extern "C"

namespace low_rank {

constexpr int BLOCK = 4;  // rows of a matrix at a time: each is read from start to end, as the hardware expects

// Sums of x[i] rows[r][i], for R rows of K numbers that follow each other.
template <int R, class W>
inline void dots(const float* x, const W* rows, int64_t K, float* out) {
    vec sums[R] = {};
    for (int64_t i = 0; i < K; i += LANES)
        for (int r = 0; r < R; ++r) sums[r] = packed::multiply_add(load(x + i), widen(rows + r * K + i), sums[r]);
    for (int r = 0; r < R; ++r) out[r] = sum(sums[r]);
}
template <int R>
inline void dots(const bf16* x, const bf16* rows, int64_t K, float* out) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    __m512 sums[R][2] = {};
    for (int64_t i = 0; i < K; i += 32) {
        const __mmask32 here = K - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (K - i)) - 1;
        const __m512i own = _mm512_maskz_loadu_epi16(here, x + i);
        for (int r = 0; r < R; ++r) {
            __m512& half = sums[r][i / 32 % 2];
            half = _mm512_dpbf16_ps(half, (__m512bh)own, (__m512bh)_mm512_maskz_loadu_epi16(here, rows + r * K + i));
        }
    }
    for (int r = 0; r < R; ++r) out[r] = to_float(from_float<bf16>(sum(sums[r][0] + sums[r][1])));
#else
    vec sums[R] = {};
    for (int64_t i = 0; i < K; i += LANES)
        for (int r = 0; r < R; ++r) sums[r] = packed::multiply_add(widen(x + i), widen(rows + r * K + i), sums[r]);
    for (int r = 0; r < R; ++r) out[r] = to_float(from_float<bf16>(sum(sums[r])));
#endif
}

// Numbers [first, last) of A x, for one row x.
template <class T, class W>
inline void shrink_by(const W* a, const T* x, int64_t K, int64_t first, int64_t last, float* inner) {
    int64_t r = first;
    for (; r + BLOCK <= last; r += BLOCK) dots<BLOCK>(x, a + r * K, K, inner + r);
    for (; r < last; ++r) dots<1>(x, a + r * K, K, inner + r);
}
template <class T>
inline void shrink(const Delta& delta, const T* x, int64_t K, int64_t first, int64_t last, float* inner) {
    if (delta.is_narrow) shrink_by(static_cast<const bf16*>(delta.a), x, K, first, last, inner);
    else shrink_by(static_cast<const T*>(delta.a), x, K, first, last, inner);
}

// Outputs [first, first + count) of B inner, a multiple of LANES. b: of the first of them.
template <class W>
inline void expand_by(const W* b, int64_t rank, const float* inner, int64_t N, int64_t count, float* out) {
    std::fill(out, out + count, 0.0f);
    int64_t r = 0;
    for (; r + BLOCK <= rank; r += BLOCK)
        for (int64_t n = 0; n < count; n += LANES) {
            vec y = load(out + n);
            for (int i = 0; i < BLOCK; ++i) y = packed::multiply_add(splat(inner[r + i]), widen(b + (r + i) * N + n), y);
            store(out + n, y);
        }
    for (; r < rank; ++r)
        for (int64_t n = 0; n < count; n += LANES)
            store(out + n, packed::multiply_add(splat(inner[r]), widen(b + r * N + n), load(out + n)));
}
template <class T>
inline void expand(const Delta& delta, const float* inner, int64_t N, int64_t first, int64_t last, float* out) {
    if (delta.is_narrow) expand_by(static_cast<const bf16*>(delta.b) + first, delta.rank, inner, N, last - first, out);
    else expand_by(static_cast<const T*>(delta.b) + first, delta.rank, inner, N, last - first, out);
}

// Outputs with what an adapter adds, rounded as memory of type T would.
template <class T>
inline vec added(vec y, vec more) { return rounded<T>(rounded<T>(y) + rounded<T>(more)); }

}  // namespace low_rank
