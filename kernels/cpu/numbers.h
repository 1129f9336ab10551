// Numbers of float32 and bfloat16, and vectors of float32.
//
// Vectors are the compilers' own (vector_size), so that the same code serves AVX-512, AVX2 and NEON. Intrinsics are used
// only where the compilers have no equivalent.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using bf16 = uint16_t;

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline bf16 from_float<bf16>(float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const bf16 rounded = bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return x != x ? bf16(0x7fc0) : rounded;
}

#if defined(__AVX512F__)
constexpr int LANES = 16;
using vec = __m512;
#else
constexpr int LANES = 8;
using vec = float __attribute__((vector_size(LANES * 4)));
#endif
using ivec = int32_t __attribute__((vector_size(LANES * 4)));

inline vec splat(float x) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(x);  // x may be only a bit pattern, not a number
#else
    return vec{x, x, x, x, x, x, x, x};  // not vec{} + x: compilers then add before they broadcast, as 0 + -0 is 0
#endif
}
inline vec load(const void* p) {
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(void* p, vec v) { std::memcpy(p, &v, sizeof v); }

inline float sum(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#endif
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; ++i) v[i] += v[i + step];
    return v[0];
}

inline vec largest_of(vec a, vec b) { return a > b ? a : b; }
inline vec least_of(vec a, vec b) { return a < b ? a : b; }
inline vec nearest_integer(vec x) {  // of |x| < 2^22
#if defined(__AVX512F__)
    return _mm512_roundscale_ps(x, 8);
#else
    const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    return (x + magic) - magic;
#endif
}
inline vec times_power_of_two(vec x, vec n) {  // of integers n from -126 to 127
#if defined(__AVX512F__)
    return _mm512_scalef_ps(x, n);
#else
    return (vec)((ivec)x + (__builtin_convertvector(n, ivec) << 23));
#endif
}

// LANES numbers in memory as float32, and back.
inline vec widen(const float* p) { return load(p); }
inline vec widen(const bf16* p) {
#if defined(__AVX512F__)
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
#else
    float wide[LANES];
    for (int i = 0; i < LANES; ++i) wide[i] = to_float(p[i]);
    return load(wide);
#endif
}
inline void narrow(float* p, vec v) { store(p, v); }
inline void narrow(bf16* p, vec v) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
#else
    float wide[LANES];
    store(wide, v);
    for (int i = 0; i < LANES; ++i) p[i] = from_float<bf16>(wide[i]);
#endif
}

// The numbers that memory of type T would hold.
template <class T>
inline vec rounded(vec v) {
    if (sizeof(T) == sizeof(float)) return v;
#if defined(__AVX512BF16__)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16));
#else
    T narrowed[LANES];
    narrow(narrowed, v);
    return widen(narrowed);
#endif
}
