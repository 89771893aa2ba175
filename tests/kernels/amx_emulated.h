/* The intrinsics of Intel's AMX in plain C, after the pseudo-code of Intel's manual ("Intel 64 and IA-32
 * Architectures Software Developer's Manual", volume 2: LDTILECFG, TILELOADD, TILESTORED, TILEZERO,
 * TILERELEASE, TDPBF16PS, TDPBSSD). kernels/cpu/src/amx.h is compiled with it by tests.
 *
 * What a CPU refuses with an exception ends the process with a message. As on a CPU, LDTILECFG and
 * TILERELEASE clear the registers, and every thread has its own. */
#ifndef QUIRE_TESTS_AMX_EMULATED_H
#define QUIRE_TESTS_AMX_EMULATED_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EMULATED_TILES = 8, EMULATED_ROWS = 16, EMULATED_BYTES = 64 };

struct emulated_tile {
    uint8_t bytes[EMULATED_ROWS][EMULATED_BYTES];
    int rows, row_bytes; /* 0: not configured */
};

static _Thread_local struct emulated_tile emulated_tiles[EMULATED_TILES];
static _Thread_local int emulated_is_configured;

__attribute__((unused)) static void emulated_fault(const char *instruction, const char *why)
{
    fprintf(stderr, "emulated AMX: %s: %s\n", instruction, why);
    abort();
}

#define EMULATED_REQUIRE(condition, instruction) \
    do { if (!(condition)) emulated_fault(instruction, #condition); } while (0)

__attribute__((unused)) static struct emulated_tile *emulated_tile_of(int number, const char *instruction)
{
    EMULATED_REQUIRE(emulated_is_configured, instruction);
    EMULATED_REQUIRE(number >= 0 && number < EMULATED_TILES, instruction);
    EMULATED_REQUIRE(emulated_tiles[number].rows > 0, instruction);
    EMULATED_REQUIRE(emulated_tiles[number].row_bytes % 4 == 0, instruction);
    return emulated_tiles + number;
}

__attribute__((unused)) static void emulated_release(void)
{
    memset(emulated_tiles, 0, sizeof emulated_tiles);
    emulated_is_configured = 0;
}

__attribute__((unused)) static void emulated_loadconfig(const void *memory)
{
    uint8_t given[64];
    memcpy(given, memory, sizeof given);
    emulated_release();
    if (given[0] == 0) return;
    EMULATED_REQUIRE(given[0] == 1, "ldtilecfg");
    for (int i = 2; i < 16; i++) EMULATED_REQUIRE(given[i] == 0, "ldtilecfg");
    for (int i = 0; i < 16; i++) {
        int row_bytes = given[16 + 2 * i] | given[17 + 2 * i] << 8, rows = given[48 + i];
        EMULATED_REQUIRE(row_bytes <= EMULATED_BYTES && rows <= EMULATED_ROWS, "ldtilecfg");
        EMULATED_REQUIRE((row_bytes == 0) == (rows == 0), "ldtilecfg");
        EMULATED_REQUIRE(i < EMULATED_TILES || rows == 0, "ldtilecfg");
        if (i >= EMULATED_TILES) continue;
        emulated_tiles[i].rows = rows;
        emulated_tiles[i].row_bytes = row_bytes;
    }
    emulated_is_configured = 1;
}

__attribute__((unused)) static void emulated_zero(int number)
{
    struct emulated_tile *tile = emulated_tile_of(number, "tilezero");
    memset(tile->bytes, 0, sizeof tile->bytes);
}

__attribute__((unused)) static void emulated_loadd(int number, const void *base, int64_t stride)
{
    struct emulated_tile *tile = emulated_tile_of(number, "tileloadd");
    memset(tile->bytes, 0, sizeof tile->bytes);
    for (int row = 0; row < tile->rows; row++)
        memcpy(tile->bytes[row], (const char *)base + row * stride, tile->row_bytes);
}

__attribute__((unused)) static void emulated_stored(int number, void *base, int64_t stride)
{
    struct emulated_tile *tile = emulated_tile_of(number, "tilestored");
    for (int row = 0; row < tile->rows; row++)
        memcpy((char *)base + row * stride, tile->bytes[row], tile->row_bytes);
}

/* Denormals are zeros, as inputs and as results. */
static inline float emulated_flushed(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

static inline float emulated_float(const uint8_t *bf16)
{
    uint32_t bits = (uint32_t)bf16[0] << 16 | (uint32_t)bf16[1] << 24;
    float x;
    memcpy(&x, &bits, sizeof x);
    return emulated_flushed(x);
}

/* The tiles of c[m][n] += a[m][k] b[k][n], checked. */
static inline void emulated_operands(int c, int a, int b, struct emulated_tile *tiles[3],
                                     const char *instruction)
{
    EMULATED_REQUIRE(c != a && c != b && a != b, instruction);
    tiles[0] = emulated_tile_of(c, instruction);
    tiles[1] = emulated_tile_of(a, instruction);
    tiles[2] = emulated_tile_of(b, instruction);
    EMULATED_REQUIRE(tiles[0]->row_bytes == tiles[2]->row_bytes, instruction);
    EMULATED_REQUIRE(tiles[0]->rows == tiles[1]->rows, instruction);
    EMULATED_REQUIRE(tiles[1]->row_bytes == 4 * tiles[2]->rows, instruction);
}

__attribute__((unused)) static void emulated_dpbf16ps(int c, int a, int b)
{
    struct emulated_tile *tiles[3];
    emulated_operands(c, a, b, tiles, "tdpbf16ps");
    const int columns = tiles[0]->row_bytes / 4, pairs = tiles[2]->rows;
    float factors[EMULATED_ROWS][2][EMULATED_ROWS]; /* of b: [k][even, odd][n] */
    for (int k = 0; k < pairs; k++)
        for (int n = 0; n < columns; n++)
            for (int odd = 0; odd < 2; odd++)
                factors[k][odd][n] = emulated_float(tiles[2]->bytes[k] + 4 * n + 2 * odd);
    for (int m = 0; m < tiles[0]->rows; m++) {
        float sums[2][EMULATED_ROWS] = {{0}}, total[EMULATED_ROWS];
        for (int k = 0; k < pairs; k++)
            for (int odd = 0; odd < 2; odd++) {
                const float x = emulated_float(tiles[1]->bytes[m] + 4 * k + 2 * odd);
                for (int n = 0; n < columns; n++)
                    sums[odd][n] = emulated_flushed(fmaf(x, factors[k][odd][n], sums[odd][n]));
            }
        memcpy(total, tiles[0]->bytes[m], sizeof total);
        for (int n = 0; n < columns; n++) {
            const float sum = emulated_flushed(sums[0][n] + sums[1][n]);
            total[n] = emulated_flushed(emulated_flushed(total[n]) + sum);
        }
        memcpy(tiles[0]->bytes[m], total, 4 * columns);
    }
}

__attribute__((unused)) static void emulated_dpbssd(int c, int a, int b)
{
    struct emulated_tile *tiles[3];
    emulated_operands(c, a, b, tiles, "tdpbssd");
    for (int m = 0; m < tiles[0]->rows; m++)
        for (int k = 0; k < tiles[2]->rows; k++)
            for (int n = 0; n < tiles[0]->row_bytes / 4; n++) {
                uint32_t sum; /* wraps around */
                memcpy(&sum, tiles[0]->bytes[m] + 4 * n, sizeof sum);
                for (int i = 0; i < 4; i++)
                    sum += (uint32_t)((int8_t)tiles[1]->bytes[m][4 * k + i] *
                                      (int8_t)tiles[2]->bytes[k][4 * n + i]);
                memcpy(tiles[0]->bytes[m] + 4 * n, &sum, sizeof sum);
            }
}

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_loadd emulated_loadd
#define _tile_stream_loadd emulated_loadd /* a hint to caches alone */
#define _tile_stored emulated_stored
#define _tile_zero emulated_zero
#define _tile_dpbf16ps emulated_dpbf16ps
#define _tile_dpbssd emulated_dpbssd

#endif
