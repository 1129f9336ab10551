// The steps of Llama-shaped layers (layer_steps.h) over rows, a call for each step.

#include "layer_steps.h"
#include "low_rank.h"

#include <vector>

namespace {

// Waking a sleeping thread takes some 50 us: with fewer elements than this, one thread is faster.
constexpr int64_t WORTH_A_THREAD = 1 << 15;

inline int threads_for(int64_t elements, int num_threads) { return elements < WORTH_A_THREAD ? 1 : num_threads; }

template <class T>
void add_and_norm(T* x, const T* addend, const T* weight, float eps, int64_t rows, int64_t E, T* out, int num_threads) {
#pragma omp parallel for num_threads(threads_for(rows* E, num_threads))
    for (int64_t t = 0; t < rows; ++t) {
        T* row = x + t * E;
        if (addend) steps::add(row, addend + t * E, E);
        steps::rms_norm(row, weight, eps, E, out + t * E);
    }
}

template <class T>
void silu_and_multiply(const T* x, int64_t rows, int64_t I, T* out, int num_threads) {
#pragma omp parallel for num_threads(threads_for(rows* I, num_threads))
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t i = t * I; i < (t + 1) * I; i += LANES) {
            const T* gates = x + i / 16 * 32 + i % 16;
            narrow(out + i, steps::silu<T>(widen(gates)) * widen(gates + 16));
        }
}

template <class T>
void finish_heads(const steps::Heads& s, T* qkv, const T* cos, const T* sin, const int64_t* slots, int64_t rows, int num_threads) {
    const int64_t width = (s.Hq + 2 * s.Hkv) * s.D;
#pragma omp parallel for num_threads(threads_for(rows* width, num_threads))
    for (int64_t t = 0; t < rows; ++t) steps::finish_heads(s, qkv + t * width, cos + t * s.D, sin + t * s.D, slots[t]);
}

// A thread has whole rows: rows of one adapter follow each other, and find its matrices in the cache.
template <class T>
void add_low_rank(const LayerDeltas* const* adapters, int64_t layer, int64_t first, int64_t count, const int64_t* widths,
                  const T* x, int64_t K, int64_t rows, T* y, int64_t y_row, int64_t y_panel, int num_threads) {
#pragma omp parallel num_threads(threads_for(rows* K, num_threads))
    {
        std::vector<float> inner, more;
#pragma omp for
        for (int64_t t = 0; t < rows; ++t) {
            if (!adapters[t]) continue;
            T* from = y + t * y_row;
            for (int64_t i = 0; i < count; from += widths[i++]) {
                const Delta& delta = adapters[t][layer].of[first + i];
                if (!delta.rank) continue;
                const int64_t N = widths[i];
                inner.resize(delta.rank), more.resize(N);
                low_rank::shrink(delta, x + t * K, K, 0, delta.rank, inner.data());
                low_rank::expand<T>(delta, inner.data(), N, 0, N, more.data());
                T* panels = y_panel == packed::PANEL ? from : y + t * y_row + i * packed::PANEL;
                for (int64_t n = 0; n < N; n += LANES) {
                    T* to = panels + n / packed::PANEL * y_panel + n % packed::PANEL;
                    narrow(to, low_rank::added<T>(widen(to), load(more.data() + n)));
                }
            }
        }
    }
}

}  // namespace

extern "C" {

// Adds what adapters change to outputs y of `count` matrices from `first` on, of x [rows, K]. y: rows of y_row numbers, with
// the matrices one after the other; or, where panels of a matrix lie y_panel > 16 numbers apart, 16 outputs of each in turn.
void crossdock_add_low_rank(const LayerDeltas* const* adapters, int64_t layer, int64_t first, int64_t count,
                            const int64_t* widths, const void* x, int64_t K, int64_t rows, void* y, int64_t y_row,
                            int64_t y_panel, int is_bf16, int num_threads) {
    if (is_bf16)
        add_low_rank(adapters, layer, first, count, widths, static_cast<const bf16*>(x), K, rows, static_cast<bf16*>(y), y_row,
                     y_panel, num_threads);
    else
        add_low_rank(adapters, layer, first, count, widths, static_cast<const float*>(x), K, rows, static_cast<float*>(y),
                     y_row, y_panel, num_threads);
}

// x[rows, E] += addend, if there is one; out = RMS norm of x times weight.
void crossdock_add_and_norm(void* x, const void* addend, const void* weight, double eps, int64_t rows, int64_t E, void* out,
                            int is_bf16, int num_threads) {
    if (is_bf16)
        add_and_norm(static_cast<bf16*>(x), static_cast<const bf16*>(addend), static_cast<const bf16*>(weight), float(eps),
                     rows, E, static_cast<bf16*>(out), num_threads);
    else
        add_and_norm(static_cast<float*>(x), static_cast<const float*>(addend), static_cast<const float*>(weight), float(eps),
                     rows, E, static_cast<float*>(out), num_threads);
}

// qkv[rows, (Hq + 2 Hkv) D]: adds the bias, norms and rotates heads, stores keys and values; a negative slot stores none.
void crossdock_finish_heads(const steps::Heads* heads, void* qkv, const void* cos, const void* sin, const int64_t* slots,
                            int64_t rows, int is_bf16, int num_threads) {
    if (is_bf16)
        finish_heads(*heads, static_cast<bf16*>(qkv), static_cast<const bf16*>(cos), static_cast<const bf16*>(sin), slots, rows,
                     num_threads);
    else
        finish_heads(*heads, static_cast<float*>(qkv), static_cast<const float*>(cos), static_cast<const float*>(sin), slots,
                     rows, num_threads);
}

// x[rows, 2 I], 16 gates alternating with 16 ups: out[rows, I] = silu(gate) * up.
void crossdock_silu_and_multiply(const void* x, int64_t rows, int64_t I, void* out, int is_bf16, int num_threads) {
    if (is_bf16)
        silu_and_multiply(static_cast<const bf16*>(x), rows, I, static_cast<bf16*>(out), num_threads);
    else
        silu_and_multiply(static_cast<const float*>(x), rows, I, static_cast<float*>(out), num_threads);
}
}
