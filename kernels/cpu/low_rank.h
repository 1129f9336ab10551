// The low-rank matrices of adapters: outputs of a linear get B A x. Each row's sums have one order, whatever the other rows are.

#pragma once

#include "packed.h"

#include <algorithm>

extern "C" {

struct Delta {           // of one matrix
    const void *a, *b;  // [rank, K], [N / 16, rank, 16]
    int64_t rank;        // 0: the matrix stays as it is
    int64_t is_narrow;   // a and b are bfloat16; else of the type of inputs and outputs
};

enum DeltaOf { Q_DELTA, K_DELTA, V_DELTA, OUT_DELTA, GATE_DELTA, UP_DELTA, DOWN_DELTA, NUM_DELTAS };

struct LayerDeltas {
    Delta of[NUM_DELTAS];
};

}  // extern "C"

namespace low_rank {

constexpr int BLOCK = 4;  // rows with one adapter that are computed together: each number of a matrix is loaded once for them

// Calls `act(t, M)` for blocks of M rows of [t, end) that follow each other with one adapter; M is a constant, BLOCK or 1.
template <class Act>
inline void for_blocks(const LayerDeltas* const* adapters, int64_t t, int64_t end, Act act) {
    while (t < end) {
        if (!adapters[t])
            ++t;
        else if (t + BLOCK <= end && std::count(adapters + t, adapters + t + BLOCK, adapters[t]) == BLOCK)
            act(t, std::integral_constant<int, BLOCK>()), t += BLOCK;
        else
            act(t++, std::integral_constant<int, 1>());
    }
}

// out[m][r] = sum of x[m][i] a[r][i], for M and R rows of K numbers that follow each other. `stride`: between rows of out.
template <int M, int R, class T, class W>
inline void dots(const T* x, const W* a, int64_t K, float* out, int64_t stride) {
    vec sums[M][R] = {};
    for (int64_t i = 0; i < K; i += LANES) {
        vec own[M];
        for (int m = 0; m < M; ++m) own[m] = widen(x + m * K + i);
        for (int r = 0; r < R; ++r) {
            const vec other = widen(a + r * K + i);
            for (int m = 0; m < M; ++m) sums[m][r] = packed::multiply_add(own[m], other, sums[m][r]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int r = 0; r < R; ++r) out[m * stride + r] = to_float(from_float<T>(sum(sums[m][r])));
}
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <int M, int R>
inline void dots(const bf16* x, const bf16* a, int64_t K, float* out, int64_t stride) {
    __m512 sums[M][R] = {};
    for (int64_t i = 0; i < K; i += 32) {
        const __mmask32 here = K - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (K - i)) - 1;
        __m512i own[M];
        for (int m = 0; m < M; ++m) own[m] = _mm512_maskz_loadu_epi16(here, x + m * K + i);
        for (int r = 0; r < R; ++r) {
            const __m512i other = _mm512_maskz_loadu_epi16(here, a + r * K + i);
            for (int m = 0; m < M; ++m) sums[m][r] = _mm512_dpbf16_ps(sums[m][r], (__m512bh)own[m], (__m512bh)other);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int r = 0; r < R; ++r) out[m * stride + r] = to_float(from_float<bf16>(sum(sums[m][r])));
}
#endif

// Numbers [first, last) of inner[m] = A x[m], for M rows x. `stride`: between rows of inner.
template <int M, class T, class W>
inline void shrink_by(const W* a, const T* x, int64_t K, int64_t first, int64_t last, float* inner, int64_t stride) {
    constexpr int R = M == 1 || packed::PARTS == 1 ? 4 : 2;  // sums that fit into the registers
    int64_t r = first;
    for (; r + R <= last; r += R) dots<M, R>(x, a + r * K, K, inner + r, stride);
    for (; r < last; ++r) dots<M, 1>(x, a + r * K, K, inner + r, stride);
}
template <int M, class T>
inline void shrink(const Delta& delta, const T* x, int64_t K, int64_t first, int64_t last, float* inner, int64_t stride) {
    if (delta.is_narrow) shrink_by<M>(static_cast<const bf16*>(delta.a), x, K, first, last, inner, stride);
    else shrink_by<M>(static_cast<const T*>(delta.a), x, K, first, last, inner, stride);
}

// LANES numbers of B for outputs from n on, of rank r.
template <class W>
inline vec of_rank(const W* b, int64_t rank, int64_t r, int64_t n) {
    return widen(b + (n / packed::PANEL * rank + r) * packed::PANEL + n % packed::PANEL);
}

// LANES outputs from n on of B inner, for one row, in the order of sums of `expand_rows`.
template <class W>
inline vec expand_by(const W* b, int64_t rank, const float* inner, int64_t n) {
    vec y = {};
    for (int64_t r = 0; r < rank; ++r) y = packed::multiply_add(splat(inner[r]), of_rank(b, rank, r, n), y);
    return y;
}
template <class T>
inline vec expand(const Delta& delta, const float* inner, int64_t n) {
    if (delta.is_narrow) return expand_by(static_cast<const bf16*>(delta.b), delta.rank, inner, n);
    return expand_by(static_cast<const T*>(delta.b), delta.rank, inner, n);
}

// Calls `each(m, n, B inner[m])` for LANES of N outputs from n on, in the same order of sums, for M rows and for V such vectors
// at a time. The rows read the matrix together: it should be in the cache.
template <int M, int V, class W, class Each>
inline void expand_rows_by(const W* b, int64_t rank, const float* inner, int64_t N, int64_t n, Each each) {
    for (; n + V * LANES <= N; n += V * LANES) {
        vec sums[M][V] = {};
        for (int64_t r = 0; r < rank; ++r)
            for (int v = 0; v < V; ++v) {
                const vec number = of_rank(b, rank, r, n + v * LANES);
                for (int m = 0; m < M; ++m) sums[m][v] = packed::multiply_add(splat(inner[m * rank + r]), number, sums[m][v]);
            }
        for (int m = 0; m < M; ++m)
            for (int v = 0; v < V; ++v) each(m, n + v * LANES, sums[m][v]);
    }
    if constexpr (V > 1) expand_rows_by<M, 1>(b, rank, inner, N, n, each);
}
template <int M, class T, class Each>
inline void expand_rows(const Delta& delta, const float* inner, int64_t N, Each each) {
    constexpr int V = M == 1 ? 4 : 2;  // sums enough to hide their latency
    if (delta.is_narrow) expand_rows_by<M, V>(static_cast<const bf16*>(delta.b), delta.rank, inner, N, 0, each);
    else expand_rows_by<M, V>(static_cast<const T*>(delta.b), delta.rank, inner, N, 0, each);
}

}  // namespace low_rank
