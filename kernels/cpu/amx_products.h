// Products of rows of bf16 with plain weights by AMX. A panel's words (packed.h) are tiles as they lie in memory.
//
// Used for any number of rows: with few rows a step waits for its weights, whatever multiplies them, and so a row's result
// depends on no other row. (All layers of SmolLM2-135M on two cores of a Xeon: 64 rows 17.8 ms, by oneDNN's AMX 51, by
// AVX512-BF16 77; 8 rows 10.6, by AVX512-BF16 12.5; 2026-11-27.)

#pragma once

#include "amx.h"
#include "packed.h"

#if defined(WITH_AMX)

namespace packed {

// Whether rows of bf16 are multiplied by a weight here.
inline bool is_in_tiles(const Matrix& w) { return w.kind == PLAIN && w.K % amx::PAIR == 0 && amx::may_use_tiles(); }

// Computes the products of 1 to PAIR rows with NB panels to sums [NB][PAIR][RUN]. `fetched`: `lines` cache lines of what comes next
// are fetched for each tile. The rows of tiles are set: those of tiles 0, 1 and 4 are the first rows, of 2, 3 and 5 the others.
template <int NB, bool HAS_OTHERS>
__attribute__((noinline)) void tiles(const bf16* x, int64_t K, const uint32_t* panel, const char* fetched, int lines, float* sums) {
    using namespace amx;
    asm volatile("" ::: "memory");  // compilers do not see what loads of tiles read
    const bf16* others = x + RUN * K;
    const uint32_t* second = panel + K / 2 * PANEL;
    _tile_zero(0);
    if constexpr (NB == 2) _tile_zero(1);
    if constexpr (HAS_OTHERS) _tile_zero(2);
    if constexpr (HAS_OTHERS && NB == 2) _tile_zero(3);
    for (int64_t k = 0; k < K; k += PAIR, fetched += 64 * lines) {
        for (int i = 0; i < lines; ++i) __builtin_prefetch(fetched + 64 * i, 0, 2);
        _tile_loadd(4, x + k, K * 2);
        _tile_loadd(6, panel + k / 2 * PANEL, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (NB == 2) {
            _tile_loadd(7, second + k / 2 * PANEL, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (HAS_OTHERS) {
            _tile_loadd(5, others + k, K * 2);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (NB == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    if constexpr (NB == 2) _tile_stored(1, sums + PAIR * RUN, 64);
    if constexpr (HAS_OTHERS) _tile_stored(2, sums + RUN * RUN, 64);
    if constexpr (HAS_OTHERS && NB == 2) _tile_stored(3, sums + (PAIR + RUN) * RUN, 64);
}

// Rows [t, end) times NB panels from panel n.
template <int NB, class Write>
void tile_rows(const bf16* x, const Matrix& w, int64_t t, int64_t end, int64_t n, Write& write) {
    using namespace amx;
    alignas(64) float sums[NB][PAIR][RUN];
    const int64_t blocks = (end - t + PAIR - 1) / PAIR, bytes = NB * w.K * PAIR;  // of panels
    for (int64_t block = 0; t < end; t += PAIR, ++block) {
        const int count = int(std::min<int64_t>(PAIR, end - t)), others = count - RUN;
        const int lines = int(NB * RUN * (block + 1) / blocks - NB * RUN * block / blocks);
        const char* fetched = reinterpret_cast<const char*>(w.words(n)) + bytes + NB * RUN * block / blocks * (w.K / PAIR) * 64;
        if (count < PAIR) {
            Shape shape;
            shape.rows[0] = shape.rows[1] = shape.rows[4] = uint8_t(std::min(count, RUN));
            shape.rows[2] = shape.rows[3] = shape.rows[5] = uint8_t(std::max(others, 1));
            shape.use();
        }
        if (others > 0)
            tiles<NB, true>(x + t * w.K, w.K, w.words(n), fetched, lines, **sums);
        else
            tiles<NB, false>(x + t * w.K, w.K, w.words(n), fetched, lines, **sums);
        if (count < PAIR && blocks > 1) Shape().use();
        for (int m = 0; m < count; ++m) {
            vec row[NB];
            for (int v = 0; v < NB; ++v) row[v] = load(sums[v][m]);
            write(t + m, n, row);
        }
    }
}

constexpr int64_t TILE_BYTES = 1 << 20;  // of rows whose products a thread computes panel by panel: they stay in its second cache

// This thread's share of x [T, K] times a weight, as `multiply`. K: a multiple of amx::PAIR.
template <class Write>
void multiply_tiles(const bf16* x, int64_t T, const Matrix& w, int tid, int nt, Write& write) {
    if (T == 0) return;
    const int64_t panels = w.N / PANEL, pairs = (panels + 1) / 2;
    const int64_t blocks = (T * w.K * 2 + TILE_BYTES - 1) / TILE_BYTES, rows = (T + blocks - 1) / blocks;
    const int64_t size = (rows + amx::PAIR - 1) / amx::PAIR * amx::PAIR, tasks = pairs * blocks;
    amx::Shape().use();
    for (int64_t task = tasks * tid / nt; task < tasks * (tid + 1) / nt; ++task) {
        const int64_t n = task % pairs * 2, t = std::min(T, task / pairs * size), end = std::min(T, t + size);
        if (n + 1 < panels)
            tile_rows<2>(x, w, t, end, n, write);
        else
            tile_rows<1>(x, w, t, end, n, write);
    }
    _tile_release();
}

}  // namespace packed

#endif

namespace packed {

// This thread's share of x [T, K] times a weight: by AMX where it takes the weight, else as `multiply`.
template <int NB, class X, class Write>
void multiply_rows(const X* x, int64_t T, const Matrix& w, int tid, int nt, Write write) {
#if defined(WITH_AMX)
    if constexpr (std::is_same_v<X, bf16>)
        if (is_in_tiles(w)) return multiply_tiles(x, T, w, tid, nt, write);
#endif
    multiply<NB>(x, T, w, tid, nt, write);
}

}  // namespace packed
