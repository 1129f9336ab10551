// The tiles of AMX: 16 rows of 64 bytes, whose products a core computes in bf16 with sums of float.

#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define WITH_AMX

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace amx {

constexpr int RUN = 16;        // rows of a tile, and words of a row
constexpr int PAIR = 2 * RUN;  // two tiles, and the bf16 of a tile's row

// Asks Linux for the state of AMX, once for all threads of the process.
inline bool may_use_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    static const bool may = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
    return may;
}

// Sets the rows of eight tiles for this thread: they begin as zeros.
struct alignas(64) Shape {
    uint8_t palette = 1, row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {RUN, RUN, RUN, RUN, RUN, RUN, RUN, RUN};

    void use() const { _tile_loadconfig(this); }
};

}  // namespace amx

#endif
