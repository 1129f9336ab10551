// The steps of a Llama-shaped layer between its matrix products, for one row of float or bf16, on any CPU.
//
// Numbers are rounded to the row's type where transformers' own code rounds. A row's result does not depend on others.

#pragma once

#include "numbers.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace steps {
namespace {

// exp for |x| <= 87, relative error below 2e-7 (Cephes polynomial after range reduction)
__attribute__((always_inline)) inline vec exponential(vec x) {
    x = least_of(largest_of(x, splat(-87.0f)), splat(87.0f));
    const vec n = nearest_integer(x * 1.44269504f);
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return times_power_of_two(p * (r * r) + (r + 1.0f), n);
}

template <class T>
void rms_norm(const T* x, const T* weight, float eps, int64_t E, T* out) {  // E: a multiple of 16, as all sizes here
    vec squares = {};
    for (int64_t i = 0; i < E; i += LANES) squares += widen(x + i) * widen(x + i);
    const float scale = 1.0f / std::sqrt(sum(squares) / float(E) + eps);
    for (int64_t i = 0; i < E; i += LANES) narrow(out + i, rounded<T>(widen(x + i) * scale) * widen(weight + i));
}

template <class T>
void rotate(T* x, const T* cos, const T* sin, int64_t D) {  // the "rotate half" convention
    const int64_t half = D / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const vec a = widen(x + i), b = widen(x + half + i);
        narrow(x + i, rounded<T>(a * widen(cos + i)) - rounded<T>(b * widen(sin + i)));
        narrow(x + half + i, rounded<T>(b * widen(cos + half + i)) + rounded<T>(a * widen(sin + half + i)));
    }
}

template <class T>
void add(T* x, const T* addend, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) narrow(x + i, widen(x + i) + widen(addend + i));
}

template <class T>
inline vec silu(vec x) { return rounded<T>(x / (1.0f + exponential(-x))); }

struct Heads {  // strides in elements; tokens of a page and elements of a token are adjacent
    int64_t Hq, Hkv, D, page_size, page_stride, head_stride;
    double eps;
    const void *bias, *q_norm, *k_norm;  // or null: [(Hq + 2 Hkv) D], [D], [D]
    void *keys, *values;                 // of page 0, head 0, token 0
};

// row[(Hq + 2 Hkv) D]: adds the bias, norms and rotates heads, stores keys and values; a negative slot stores none.
template <class T>
void finish_heads(const Heads& s, T* row, const T* cos, const T* sin, int64_t slot) {
    if (s.bias) add(row, static_cast<const T*>(s.bias), (s.Hq + 2 * s.Hkv) * s.D);
    for (int64_t h = 0; h < s.Hq + s.Hkv; ++h) {
        const T* norm = static_cast<const T*>(h < s.Hq ? s.q_norm : s.k_norm);
        if (norm) rms_norm(row + h * s.D, norm, float(s.eps), s.D, row + h * s.D);
        rotate(row + h * s.D, cos, sin, s.D);
    }
    if (slot < 0) return;
    for (int64_t h = 0; h < s.Hkv; ++h) {
        const int64_t at = slot / s.page_size * s.page_stride + h * s.head_stride + slot % s.page_size * s.D;
        std::memcpy(static_cast<T*>(s.keys) + at, row + (s.Hq + h) * s.D, s.D * sizeof(T));
        std::memcpy(static_cast<T*>(s.values) + at, row + (s.Hq + s.Hkv + h) * s.D, s.D * sizeof(T));
    }
}

}  // namespace
}  // namespace steps
