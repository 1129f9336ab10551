// The steps of a Llama-shaped layer between its matrix products, over rows of float or bf16, for any CPU.
//
// Numbers are rounded to the rows' type where transformers' own code rounds. A row's result does not depend on others.

#include "numbers.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

template <class T>
inline float rounded(float x) { return to_float(from_float<T>(x)); }

// exp for |x| <= 87, relative error below 2e-7 (Cephes polynomial after range reduction); vectorises, unlike std::exp
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float n = (x * 1.44269504f + magic) - magic;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + (r + 1.0f);
    const int32_t power = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return p * scale;
}

template <class T>
void rms_norm(const T* x, const T* weight, float eps, int64_t E, T* out) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < E; ++i) sum += to_float(x[i]) * to_float(x[i]);
    const float scale = 1.0f / std::sqrt(sum / float(E) + eps);
#pragma omp simd
    for (int64_t i = 0; i < E; ++i) out[i] = from_float<T>(rounded<T>(to_float(x[i]) * scale) * to_float(weight[i]));
}

template <class T>
void rotate(T* x, const T* cos, const T* sin, int64_t D) {  // the "rotate half" convention
    const int64_t half = D / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float a = to_float(x[i]), b = to_float(x[half + i]);
        const float low = rounded<T>(a * to_float(cos[i])) - rounded<T>(b * to_float(sin[i]));
        const float high = rounded<T>(b * to_float(cos[half + i])) + rounded<T>(a * to_float(sin[half + i]));
        x[i] = from_float<T>(low);
        x[half + i] = from_float<T>(high);
    }
}

// Waking a sleeping thread takes some 50 us: with fewer elements than this, one thread is faster.
constexpr int64_t WORTH_A_THREAD = 1 << 15;

inline int threads_for(int64_t elements, int num_threads) { return elements < WORTH_A_THREAD ? 1 : num_threads; }

template <class T>
void add_and_norm(T* x, const T* addend, const T* weight, float eps, int64_t rows, int64_t E, T* out, int num_threads) {
#pragma omp parallel for num_threads(threads_for(rows* E, num_threads))
    for (int64_t t = 0; t < rows; ++t) {
        T* row = x + t * E;
        if (addend) {
            const T* more = addend + t * E;
#pragma omp simd
            for (int64_t i = 0; i < E; ++i) row[i] = from_float<T>(to_float(row[i]) + to_float(more[i]));
        }
        rms_norm(row, weight, eps, E, out + t * E);
    }
}

template <class T>
void silu_and_multiply(const T* x, int64_t rows, int64_t I, T* out, int num_threads) {
#pragma omp parallel for num_threads(threads_for(rows* I, num_threads))
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t i = 0; i < I; i += 16) {
            const T *gates = x + 2 * (t * I + i), *ups = gates + 16;
            T* to = out + t * I + i;
#pragma omp simd
            for (int64_t j = 0; j < 16; ++j) {
                const float gate = to_float(gates[j]);
                to[j] = from_float<T>(rounded<T>(gate / (1.0f + exponential(-gate))) * to_float(ups[j]));
            }
        }
}

}  // namespace

extern "C" {

struct HeadSteps {  // strides in elements; tokens of a page and elements of a token are adjacent
    int64_t Hq, Hkv, D, page_size, page_stride, head_stride;
    double eps;
    const void *bias, *q_norm, *k_norm;  // or null: [(Hq + 2 Hkv) D], [D], [D]
    void *keys, *values;                 // of page 0, head 0, token 0
};

}  // extern "C"

namespace {

template <class T>
void finish_heads(const HeadSteps& s, T* qkv, const T* cos, const T* sin, const int64_t* slots, int64_t rows, int num_threads) {
    const int64_t width = (s.Hq + 2 * s.Hkv) * s.D;
#pragma omp parallel for num_threads(threads_for(rows* width, num_threads))
    for (int64_t t = 0; t < rows; ++t) {
        T* row = qkv + t * width;
        if (s.bias) {
            const T* bias = static_cast<const T*>(s.bias);
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) row[i] = from_float<T>(to_float(row[i]) + to_float(bias[i]));
        }
        for (int64_t h = 0; h < s.Hq + s.Hkv; ++h) {
            const T* norm = static_cast<const T*>(h < s.Hq ? s.q_norm : s.k_norm);
            if (norm) rms_norm(row + h * s.D, norm, float(s.eps), s.D, row + h * s.D);
            rotate(row + h * s.D, cos + t * s.D, sin + t * s.D, s.D);
        }
        if (slots[t] < 0) continue;
        for (int64_t h = 0; h < s.Hkv; ++h) {
            const int64_t at = slots[t] / s.page_size * s.page_stride + h * s.head_stride + slots[t] % s.page_size * s.D;
            std::memcpy(static_cast<T*>(s.keys) + at, row + (s.Hq + h) * s.D, s.D * sizeof(T));
            std::memcpy(static_cast<T*>(s.values) + at, row + (s.Hq + s.Hkv + h) * s.D, s.D * sizeof(T));
        }
    }
}

}  // namespace

extern "C" {

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
void crossdock_finish_heads(const HeadSteps* steps, void* qkv, const void* cos, const void* sin, const int64_t* slots,
                            int64_t rows, int is_bf16, int num_threads) {
    if (is_bf16)
        finish_heads(*steps, static_cast<bf16*>(qkv), static_cast<const bf16*>(cos), static_cast<const bf16*>(sin), slots, rows,
                     num_threads);
    else
        finish_heads(*steps, static_cast<float*>(qkv), static_cast<const float*>(cos), static_cast<const float*>(sin), slots,
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
