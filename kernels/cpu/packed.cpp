// Products with weights in panels (packed.h) one by one, and the way back to plain weights, for any CPU.

#include "amx_products.h"
#include "rounded.h"

#include <omp.h>

namespace {

using namespace packed;

template <class X>
void linear(const Matrix& w, const X* x, int64_t T, X* out, int num_threads) {
    auto write = [&](int64_t t, int64_t n, auto& acc) {
        constexpr int COUNT = sizeof(acc) / sizeof(vec);
        for (int v = 0; v < COUNT; ++v) narrow(out + t * w.N + n * PANEL + v * LANES, acc[v]);
    };
    constexpr int NB = PARTS == 1 ? 3 : 1;
#if defined(ROUNDS_ROWS)
    if (is_rounded(w)) {
        Rows rows(T, w.K);
#pragma omp parallel num_threads(num_threads)
        {
            const int tid = omp_get_thread_num(), nt = omp_get_num_threads();
            for (int64_t t = T * tid / nt; t < T * (tid + 1) / nt; ++t) rows.round(t, x + t * w.K, w);
#pragma omp barrier
            multiply_rounded(rows, T, w, tid, nt, write);
        }
        return;
    }
#endif
    std::conditional_t<HAS_PAIRS, const X*, const float*> rows;
    std::vector<float> wide;
    if constexpr (HAS_PAIRS || std::is_same_v<X, float>) {
        rows = x;
    } else {
        wide.resize(T * w.K);
        for (int64_t i = 0; i < T * w.K; ++i) wide[i] = to_float(x[i]);
        rows = wide.data();
    }
#pragma omp parallel num_threads(num_threads)
    multiply_rows<NB>(rows, T, w, w, omp_get_thread_num(), omp_get_num_threads(), write);
}

// Writes panel n as plain weights, rows [16, K] of out.
template <class X>
void plain_panel(const Matrix& w, int64_t n, X* out) {
    std::vector<float> numbers(w.K * PANEL);  // [K][16]
    numbers_of<float, 1>(w, n, reinterpret_cast<uint32_t*>(numbers.data()));
    for (int64_t k = 0; k < w.K; k += PANEL) {
        float square[PANEL][PANEL];
        for (int i = 0; i < PANEL; ++i)
            for (int j = 0; j < PANEL; ++j) square[i][j] = numbers[(k + j) * PANEL + i];
        for (int i = 0; i < PANEL; ++i)
            for (int p = 0; p < PARTS; ++p) narrow(out + (n * PANEL + i) * w.K + k + p * LANES, load(square[i] + p * LANES));
    }
}

template <class X>
void dequantise(const Matrix& w, X* out, int num_threads) {
#pragma omp parallel for num_threads(num_threads)
    for (int64_t n = 0; n < w.N / PANEL; ++n) plain_panel(w, n, out);
}

}  // namespace

extern "C" {

// Computes out [T, N] = x [T, K] times a weight.
void crossdock_packed_linear_bf16(const Matrix* w, const bf16* x, int64_t T, bf16* out, int num_threads) { linear(*w, x, T, out, num_threads); }
void crossdock_packed_linear_f32(const Matrix* w, const float* x, int64_t T, float* out, int num_threads) { linear(*w, x, T, out, num_threads); }

// Reports whether rows can be rounded to int8.
int crossdock_rounds_rows() {
#if defined(ROUNDS_ROWS)
    return 1;
#else
    return 0;
#endif
}

// Writes a packed weight to out [N, K].
void crossdock_dequantise_bf16(const Matrix* w, bf16* out, int num_threads) { dequantise(*w, out, num_threads); }
void crossdock_dequantise_f32(const Matrix* w, float* out, int num_threads) { dequantise(*w, out, num_threads); }
}
