// The steps of Llama-shaped layers (layer_steps.h) over rows, a call for each step.

#include "layer_steps.h"
#include "low_rank.h"

#include <numeric>
#include <vector>

extern "C" {

// What adapters change in the outputs y of `count` matrices from `first` on, of x [rows, K]. A row of y has the matrices one
// after the other, of `widths` outputs; or 16 outputs of each in turn.
struct Adapted {
    const LayerDeltas* const* adapters;  // of each row, all layers; null: the row has none
    int64_t layer, first, count, widths[3];
    const void* x;
    int64_t K, is_in_turn;
};

}  // extern "C"

namespace {

// Waking a sleeping thread takes some 50 us: with fewer elements than this, one thread is faster.
constexpr int64_t WORTH_A_THREAD = 1 << 15;

inline int threads_for(int64_t elements, int num_threads) { return elements < WORTH_A_THREAD ? 1 : num_threads; }

using low_rank::BLOCK;

template <class T>
void add_low_rank(const Adapted& a, T* y, int64_t t0, int64_t t1) {
    using packed::PANEL;
    static thread_local std::vector<float> inner;
    const int64_t row = std::accumulate(a.widths, a.widths + a.count, int64_t(0)), panel = a.is_in_turn ? a.count * PANEL : PANEL;
    for (int64_t i = 0, from = 0; i < a.count; from += a.is_in_turn ? PANEL : a.widths[i], ++i)
        low_rank::for_blocks(a.adapters, t0, t1, [&](int64_t t, auto rows) {
            constexpr int M = decltype(rows)::value;
            const Delta& delta = a.adapters[t][a.layer].of[a.first + i];
            if (!delta.rank) return;
            const int64_t N = a.widths[i];
            inner.resize(std::max<size_t>(inner.size(), M * delta.rank));
            low_rank::shrink<M>(delta, static_cast<const T*>(a.x) + t * a.K, a.K, 0, delta.rank, inner.data(), delta.rank);
            auto add = [&](int m, int64_t n, vec more) __attribute__((always_inline)) {
                T* to = y + (t + m) * row + from + n / PANEL * panel + n % PANEL;
                narrow(to, widen(to) + rounded<T>(more));
            };
            low_rank::expand_rows<M, T>(delta, inner.data(), N, add);
        });
}

// Adds what adapters change in the rows of y, and takes a step of each row at once, while y is in the cache. So adapters wake
// no thread more often. Threads take blocks in turn: rows of decodes, each with another adapter to read, come first in a batch.
template <class T, class Step>
void over_rows(const Adapted* adapted, T* y, int64_t rows, int64_t width, int num_threads, Step step) {
#pragma omp parallel for schedule(static, 1) num_threads(threads_for(rows* width, num_threads))
    for (int64_t t0 = 0; t0 < rows; t0 += BLOCK) {
        const int64_t t1 = std::min(rows, t0 + BLOCK);
        if (adapted) add_low_rank(*adapted, y, t0, t1);
        for (int64_t t = t0; t < t1; ++t) step(t);
    }
}

template <class T>
void add_and_norm(const Adapted* adapted, T* x, T* addend, const T* weight, float eps, int64_t rows, int64_t E, T* out, int num_threads) {
    over_rows(adapted, addend, rows, E, num_threads, [=](int64_t t) {
        T* row = x + t * E;
        if (addend) steps::add(row, addend + t * E, E);
        if (out) steps::rms_norm(row, weight, eps, E, out + t * E);
    });
}

template <class T>
void silu_and_multiply(const Adapted* adapted, T* x, int64_t rows, int64_t I, T* out, int num_threads) {
    over_rows(adapted, x, rows, I, num_threads, [=](int64_t t) {
        for (int64_t i = t * I; i < (t + 1) * I; i += LANES) {
            const T* gates = x + i / 16 * 32 + i % 16;
            narrow(out + i, steps::silu<T>(widen(gates)) * widen(gates + 16));
        }
    });
}

template <class T>
void finish_heads(const Adapted* adapted, const steps::Heads& s, T* qkv, const T* cos, const T* sin, const int64_t* slots, int64_t rows, int num_threads) {
    const int64_t width = (s.Hq + 2 * s.Hkv) * s.D;
    over_rows(adapted, qkv, rows, width, num_threads, [=](int64_t t) {
        steps::finish_heads(s, qkv + t * width, cos + t * s.D, sin + t * s.D, slots[t]);
    });
}

}  // namespace

extern "C" {

// Each of these first adds what adapters change in the outputs that it reads, if `adapted` is not null.

// x[rows, E] += addend, if there is one; out = RMS norm of x times weight, if there is an out.
void crossdock_add_and_norm(void* x, void* addend, const void* weight, double eps, int64_t rows, int64_t E, void* out,
                            const Adapted* adapted, int is_bf16, int num_threads) {
    if (is_bf16)
        add_and_norm(adapted, static_cast<bf16*>(x), static_cast<bf16*>(addend), static_cast<const bf16*>(weight), float(eps),
                     rows, E, static_cast<bf16*>(out), num_threads);
    else
        add_and_norm(adapted, static_cast<float*>(x), static_cast<float*>(addend), static_cast<const float*>(weight), float(eps),
                     rows, E, static_cast<float*>(out), num_threads);
}

// qkv[rows, (Hq + 2 Hkv) D]: adds the bias, norms and rotates heads, stores keys and values; a negative slot stores none.
void crossdock_finish_heads(const steps::Heads* heads, void* qkv, const void* cos, const void* sin, const int64_t* slots,
                            int64_t rows, const Adapted* adapted, int is_bf16, int num_threads) {
    if (is_bf16)
        finish_heads(adapted, *heads, static_cast<bf16*>(qkv), static_cast<const bf16*>(cos), static_cast<const bf16*>(sin), slots,
                     rows, num_threads);
    else
        finish_heads(adapted, *heads, static_cast<float*>(qkv), static_cast<const float*>(cos), static_cast<const float*>(sin),
                     slots, rows, num_threads);
}

// x[rows, 2 I], 16 gates alternating with 16 ups: out[rows, I] = silu(gate) * up.
void crossdock_silu_and_multiply(void* x, int64_t rows, int64_t I, void* out, const Adapted* adapted, int is_bf16,
                                 int num_threads) {
    if (is_bf16)
        silu_and_multiply(adapted, static_cast<bf16*>(x), rows, I, static_cast<bf16*>(out), num_threads);
    else
        silu_and_multiply(adapted, static_cast<float*>(x), rows, I, static_cast<float*>(out), num_threads);
}
}
