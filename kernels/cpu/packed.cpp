// Products with packed weights (packed.h) one by one, and the way back to plain weights, for any CPU.

#include "packed.h"

#include <omp.h>

namespace {

using namespace packed;

inline void put(float* to, vec x) { store(to, x); }
inline void put(bf16* to, vec x) {  // to nearest, ties to even
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
#else
    for (int i = 0; i < LANES; ++i) {
        uint32_t bits;
        const float one = x[i];
        std::memcpy(&bits, &one, 4);
        to[i] = x[i] != x[i] ? bf16(0x7fc0) : bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
#endif
}

template <class X>
void linear(const Matrix& w, const X* x, int64_t T, X* out, int num_threads) {
    Rows rows(T, w.K);
#pragma omp parallel num_threads(num_threads)
    {
        const int tid = omp_get_thread_num(), nt = omp_get_num_threads();
        for (int64_t t = T * tid / nt; t < T * (tid + 1) / nt; ++t) prepare(rows, t, x + t * w.K, w);
#pragma omp barrier
        packed_product<X>(rows, T, w, tid, nt, [&](int64_t t, int64_t n, auto& acc) {
            constexpr int COUNT = sizeof(acc) / sizeof(vec);
            for (int v = 0; v < COUNT; ++v) put(out + t * w.N + n * PANEL + v * LANES, acc[v]);
        });
    }
}

// Writes two panels from panel n as plain weights, rows [32, K] of out.
template <Kind KIND, class X>
void plain_panels(const Matrix& w, int64_t n, X* out) {
    using Codes = Coded<Floats, KIND>;
    std::vector<float> numbers(w.K * PANELS * PANEL), plain(w.K);  // numbers: [K][32]
    const Decoded<Codes> codes(Codes{w, n}, numbers.data());
    for (int64_t i = 0; i < PANELS * PANEL && n * PANEL + i < w.N; ++i) {
        const int64_t grid = (n + i / PANEL) * w.num_groups() * PANEL + i % PANEL;
        for (int64_t k = 0; k < w.K; ++k) {
            const int64_t at = grid + k / w.group * PANEL;
            plain[k] = numbers[k * PANELS * PANEL + i] * w.scales[at] + (w.offsets ? w.offsets[at] : 0.0f);
        }
        for (int64_t k = 0; k < w.K; k += LANES) put(out + (n * PANEL + i) * w.K + k, load(&plain[k]));
    }
}

template <class X>
void dequantise(const Matrix& w, X* out, int num_threads) {
#pragma omp parallel for num_threads(num_threads)
    for (int64_t n = 0; n < w.N / PANEL; n += PANELS)
        with_numbers<float>(w, [&](auto, auto kind) { plain_panels<kind.value>(w, n, out); });
}

}  // namespace

extern "C" {

// Computes out [T, N] = x [T, K] times a packed weight.
void crossdock_packed_linear_bf16(const Matrix* w, const bf16* x, int64_t T, bf16* out, int num_threads) { linear(*w, x, T, out, num_threads); }
void crossdock_packed_linear_f32(const Matrix* w, const float* x, int64_t T, float* out, int num_threads) { linear(*w, x, T, out, num_threads); }

// Writes a packed weight to out [N, K].
void crossdock_dequantise_bf16(const Matrix* w, bf16* out, int num_threads) { dequantise(*w, out, num_threads); }
void crossdock_dequantise_f32(const Matrix* w, float* out, int num_threads) { dequantise(*w, out, num_threads); }
}
