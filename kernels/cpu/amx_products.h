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

// Computes the products of 1 to PAIR rows with NB panels to sums [NB][PAIR][RUN]. `fetch(k)` fetches words that are read later. The
// rows of tiles are set: those of tiles 0, 1 and 4 are the first rows, of 2, 3 and 5 the others.
template <int NB, bool HAS_OTHERS, class Fetch>
__attribute__((noinline)) void tiles(const bf16* x, int64_t K, const uint32_t* panel, float* sums, const Fetch& fetch) {
    using namespace amx;
    asm volatile("" ::: "memory");  // compilers do not see what loads of tiles read
    const bf16* others = x + RUN * K;
    const uint32_t* second = panel + K / 2 * PANEL;
    _tile_zero(0);
    if constexpr (NB == 2) _tile_zero(1);
    if constexpr (HAS_OTHERS) _tile_zero(2);
    if constexpr (HAS_OTHERS && NB == 2) _tile_zero(3);
    for (int64_t k = 0; k < K; k += PAIR) {
        fetch(k);
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

inline void fetch_lines(const uint32_t* words, int64_t lines) {
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(words + i * PANEL, 0, 2);
}

// Rows [t, end) times NB panels from panel n. `then`: the words that this thread reads next.
template <int NB, class Write>
void tile_rows(const bf16* x, const Matrix& w, int64_t t, int64_t end, int64_t n, const uint32_t* then, Write& write) {
    using namespace amx;
    alignas(64) float sums[NB][PAIR][RUN];
    const int64_t blocks = (end - t + PAIR - 1) / PAIR, lines = w.K / 2;  // of rows; of a panel, each of PANEL words
    const uint32_t* panel = w.words(n);
    // Few rows wait for memory, which is read fastest where just the next tile is fetched: 35 GB/s on two cores of a Xeon, 29 with
    // the next panels, 31 with nothing.
    auto next_tile = [&](int64_t k) __attribute__((always_inline)) {
        for (int p = 0; p < NB; ++p) fetch_lines(k + PAIR < w.K ? panel + (p * lines + k / 2 + RUN) * PANEL : then + p * RUN * PANEL, RUN);
    };
    for (int64_t block = 0; t < end; t += PAIR, ++block) {
        const int count = int(std::min<int64_t>(PAIR, end - t)), others = count - RUN;
        if (count < PAIR) {
            Shape shape;
            shape.rows[0] = shape.rows[1] = shape.rows[4] = uint8_t(std::min(count, RUN));
            shape.rows[2] = shape.rows[3] = shape.rows[5] = uint8_t(std::max(others, 1));
            shape.use();
        }
        // More rows take their time: meanwhile the next panels are fetched, a part with each block of rows.
        const int64_t from = NB * RUN * block / blocks, share = NB * RUN * (block + 1) / blocks - from;  // lines for each tile
        auto next_panels = [&](int64_t k) __attribute__((always_inline)) { fetch_lines(then + (from * w.K + share * k) / PAIR * PANEL, share); };
        auto multiply = [&](const auto& fetch) {
            if (others > 0)
                tiles<NB, true>(x + t * w.K, w.K, panel, **sums, fetch);
            else
                tiles<NB, false>(x + t * w.K, w.K, panel, **sums, fetch);
        };
        if (blocks == 1)
            multiply(next_tile);
        else
            multiply(next_panels);
        if (count < PAIR && blocks > 1) Shape().use();
        for (int m = 0; m < count; ++m) {
            vec row[NB];
            for (int v = 0; v < NB; ++v) row[v] = load(sums[v][m]);
            write(t + m, n, row);
        }
    }
}

constexpr int64_t TILE_BYTES = 1 << 20;  // of rows whose products a thread computes panel by panel: they stay in its second cache

// Returns the words with which this thread's share of a product of few rows begins.
inline const uint32_t* first_words(const Matrix& w, int tid, int nt) {
    return w.words((w.N / PANEL + 1) / 2 * tid / nt * 2);
}

// This thread's share of x [T, K] times a weight, as `multiply`. K: a multiple of amx::PAIR.
template <class Write>
void multiply_tiles(const bf16* x, int64_t T, const Matrix& w, const Matrix& next, int tid, int nt, Write& write) {
    if (T == 0) return;
    const int64_t panels = w.N / PANEL, pairs = (panels + 1) / 2;
    const int64_t blocks = (T * w.K * 2 + TILE_BYTES - 1) / TILE_BYTES, rows = (T + blocks - 1) / blocks;
    const int64_t size = (rows + amx::PAIR - 1) / amx::PAIR * amx::PAIR, tasks = pairs * blocks;
    amx::Shape().use();
    const int64_t last = tasks * (tid + 1) / nt - 1;
    for (int64_t task = tasks * tid / nt; task <= last; ++task) {
        const int64_t n = task % pairs * 2, t = std::min(T, task / pairs * size), end = std::min(T, t + size);
        const uint32_t* then = task < last ? w.words((n + 2) % (2 * pairs)) : first_words(next, tid, nt);
        if (n + 1 < panels)
            tile_rows<2>(x, w, t, end, n, then, write);
        else
            tile_rows<1>(x, w, t, end, n, then, write);
    }
    _tile_release();
}

// --- codes ----------------------------------------------------------------------------------------------------------

constexpr int NUMBERED = 4;           // panels whose codes become numbers together
constexpr int64_t SPAN = 128;         // columns of them: they stay in the first cache
constexpr int64_t MOST_ROWS = 256;    // whose sums a thread keeps
constexpr int64_t LEAST_GROUP = 64;   // columns; with groups of 32 one row would take 1.3 to 1.6 times as long as by `multiply`

// Whether rows of bf16 are multiplied by codes here: any number of rows, as each sum must have one order.
inline bool are_codes_in_tiles(const Matrix& w) { return w.kind != PLAIN && w.group >= LEAST_GROUP && amx::may_use_tiles(); }

// Returns the columns that tiles multiply at a time: half a tile where a whole one would cut groups.
inline int tile_columns(const Matrix& w) { return w.K % amx::PAIR || (w.group < w.K && w.group % amx::PAIR) ? amx::RUN : amx::PAIR; }

// Adds the products of `count` rows, at most MB, with columns [from, end) of panel n, whose numbers are made, to `out` [MB].
template <int MB>
__attribute__((noinline)) void coded_tile(RowsOf<bf16> x, int count, const Matrix& w, int64_t n, int64_t from, int64_t end, const uint32_t* numbers, vec* out) {
    using namespace amx;
    asm volatile("" ::: "memory");  // compilers do not see what loads of tiles read
    alignas(64) float sums[RUN][RUN] = {};
    vec acc[MB];
    std::memcpy(acc, out, sizeof acc);
    const int64_t step = tile_columns(w);
    for (int64_t k = from, last; k < end; k = last) {
        const int64_t g = k / w.group;
        last = std::min(end, (g + 1) * w.group);
        if (w.offsets && k == g * w.group) {
            const vec offset = load(w.grid(w.offsets, n, g));
            for (int m = 0; m < MB; ++m) acc[m] = multiply_add(splat(x.sums[std::min(m, count - 1) * w.num_groups() + g]), offset, acc[m]);
        }
        _tile_zero(0);
        for (int64_t column = k; column < last; column += step, numbers += step / 2 * PANEL) {
            _tile_loadd(4, x.x + column, w.K * 2);
            _tile_loadd(6, numbers, 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, sums, 64);
        const vec scale = load(w.grid(w.scales, n, g));
        for (int m = 0; m < MB; ++m) acc[m] = multiply_add(load(sums[m]), scale, acc[m]);
    }
    std::memcpy(out, acc, sizeof acc);
}

// This thread's share of x [T, K] times a weight of codes, as `multiply`.
template <class Source, class Write>
void multiply_codes(RowsOf<bf16> x, int64_t T, const Matrix& w, int tid, int nt, Write& write) {
    using namespace amx;
    const int64_t panels = w.N / PANEL, groups = (panels + NUMBERED - 1) / NUMBERED, blocks = (T + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t span = w.group > SPAN ? SPAN : SPAN / w.group * w.group, tasks = groups * blocks;
    const int count = int(std::min<int64_t>(T, RUN));
    alignas(64) uint32_t numbers[NUMBERED][SPAN / 2 * PANEL];
    vec sums[NUMBERED * MOST_ROWS];
    Shape shape;
    shape.rows[0] = shape.rows[4] = uint8_t(count);
    shape.bytes[4] = uint16_t(tile_columns(w) * 2), shape.rows[6] = uint8_t(tile_columns(w) / 2);
    shape.use();
    Source source(w, 0);
    for (int64_t task = tasks * tid / nt; task < tasks * (tid + 1) / nt; ++task) {
        const int64_t n = task % groups * NUMBERED, begin = task / groups * MOST_ROWS, end = std::min(T, begin + MOST_ROWS);
        for (int p = 0; p < NUMBERED; ++p) source.codes[p] = w.words(std::min(n + p, panels - 1));
        std::fill_n(sums, NUMBERED * ((end - begin + RUN - 1) / RUN * RUN), vec{});
        for (int64_t from = 0; from < w.K; from += span) {
            const int64_t to = std::min(from + span, w.K);
            write_numbers(source, from, to, SPAN / 2 * PANEL, *numbers);
            vec* out = sums;
            for (int64_t row = begin; row < end; row += RUN)
                for (int p = 0; p < NUMBERED && n + p < panels; ++p, out += RUN) {
                    // To fill the last tile rows before it are computed again: another shape in between takes longer.
                    const int64_t t = std::min(row, T - count);
                    const RowsOf<bf16> rows{x.x + t * w.K, x.sums + t * w.num_groups()};
                    if (count == 1)
                        coded_tile<1>(rows, count, w, n + p, from, to, numbers[p], out);
                    else if (count <= 4)
                        coded_tile<4>(rows, count, w, n + p, from, to, numbers[p], out);
                    else
                        coded_tile<RUN>(rows, count, w, n + p, from, to, numbers[p], out);
                    for (int64_t m = row - t; to == w.K && m < count; ++m) write(t + m, n + p, reinterpret_cast<vec(&)[1]>(out[m]));
                }
        }
    }
    _tile_release();
}

}  // namespace packed

#endif

namespace packed {

// This thread's share of x [T, K] times a weight: by AMX where it takes the weight, else as `multiply`. `next`: the weight that
// is read next; its first words are fetched, so that memory is read while threads wait for each other.
template <int NB, class X, class Write>
void multiply_rows(const X* x, int64_t T, const Matrix& w, [[maybe_unused]] const Matrix& next, int tid, int nt, Write write) {
#if defined(WITH_AMX)
    if constexpr (std::is_same_v<X, bf16>) {
        if (is_in_tiles(w)) return multiply_tiles(x, T, w, next, tid, nt, write);
        if (T > 0 && are_codes_in_tiles(w))
            return with_kind(w, [&](auto kind, auto has_offsets) {
                using Source = typename SourcesOf<X>::template Source<kind.value, has_offsets.value, NUMBERED>;
                if constexpr (kind.value != PLAIN) multiply_codes<Source>({x, w.offsets ? sums_of_groups(x, T, w) : nullptr}, T, w, tid, nt, write);
            });
    }
#endif
    multiply<NB>(x, T, w, tid, nt, write);
}

}  // namespace packed
