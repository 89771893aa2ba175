/* Attention of few rows over one tile: keys and values go from the cache to registers, and are not
 * laid out in memory first.
 *
 * This code is only for bf16 and head dims of whole vectors, and not for AMX, which adds in another
 * order. It adds up in the same order as `product` does after `lay_out`, so the results are the same to
 * the bit. */
#ifndef QUIRE_ATTENTION_FEW_H
#define QUIRE_ATTENTION_FEW_H

#include "attention_layout.h"

enum { FEW_ROWS = HAS_BF16_DOT ? 8 : 0, PAIR_LANES = 2 * LANES };

INLINE bool is_for_few(dtype type, const struct attention *a, int64_t num_rows)
{
    return step_kind_of(type) == PAIRS && num_rows <= FEW_ROWS && a->head_dim % PAIR_LANES == 0 &&
           a->value_dim % PAIR_LANES == 0 && !attends_with_amx(a);
}

/* scores[r][c] = query[r] . keys[c] */
INLINE void score_rows(int rows, const struct scratch *s, const struct kv_tile *tile)
{
    for (int64_t c = 0; c < tile->columns; c += LANES) {
        vf sum[TILE_ROWS];
        for (int r = 0; r < rows; r++) sum[r] = (vf){0};
        for (int64_t step = 0; step < s->steps; step += LANES) {
            vi keys[LANES], columns[LANES];
            for (int j = 0; j < LANES; j++)
                memcpy(keys + j, tile->keys[c + j] + 4 * step, sizeof keys[j]);
            transpose(keys, columns);
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++)
                for (int r = 0; r < rows; r++)
                    sum[r] = multiply_add(PAIRS, s->query + 4 * (r * s->steps + step + k),
                                          (vf)columns[k], sum[r]);
        }
        for (int r = 0; r < rows; r++) vf_store(s->scores + r * COLUMNS + c, sum[r]);
    }
}

/* acc[r][d] += sum over c of weights[r][c] * values[c][d], for `vectors` vectors of numbers from `d` on. */
INLINE void add_vectors(int rows, int vectors, const struct scratch *s, const struct kv_tile *tile,
                        int64_t d)
{
    vf sum[TILE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = vf_load(s->acc + r * s->width + d + v * LANES);
    for (int64_t c = 0; c < tile->columns; c += 2) {
        vi values[4];
        for (int v = 0; v < vectors; v += 2) {
            vi first, second;
            memcpy(&first, tile->values[c] + 2 * (d + v * LANES), sizeof first);
            memcpy(&second, tile->values[c + 1] + 2 * (d + v * LANES), sizeof second);
            interleave(first, second, values + v);
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sum[r][v] = multiply_add(PAIRS, s->weights + 2 * (r * COLUMNS + c), (vf)values[v],
                                         sum[r][v]);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            vf_store(s->acc + r * s->width + d + v * LANES, sum[r][v]);
}

INLINE void add_rows(int rows, const struct scratch *s, const struct kv_tile *tile)
{
    int64_t d = 0;
    if (rows <= FEW_ROWS / 2)
        for (; d + 4 * LANES <= s->width; d += 4 * LANES) add_vectors(rows, 4, s, tile, d);
    for (; d < s->width; d += 2 * LANES) add_vectors(rows, 2, s, tile, d);
}

/* Calls `function` with the number of rows as a constant, so that the compiler keeps the sums in
 * registers. */
#define BY_FEW_ROWS(rows, function, ...)              \
    switch (rows) {                                   \
    case 1: function(1, __VA_ARGS__); break;          \
    case 2: function(2, __VA_ARGS__); break;          \
    case 3: function(3, __VA_ARGS__); break;          \
    case 4: function(4, __VA_ARGS__); break;          \
    case 5: function(5, __VA_ARGS__); break;          \
    case 6: function(6, __VA_ARGS__); break;          \
    case 7: function(7, __VA_ARGS__); break;          \
    case 8: function(8, __VA_ARGS__); break;          \
    }

/* Computes the scores of all rows of an item. */
static void score_few(int64_t rows, const struct scratch *s, const struct kv_tile *tile)
{
    if (HAS_BF16_DOT) BY_FEW_ROWS(rows, score_rows, s, tile)
}

/* Adds the weighted values of a tile to the accumulators of all rows of an item. */
static void add_few(int64_t rows, const struct scratch *s, const struct kv_tile *tile)
{
    if (HAS_BF16_DOT) BY_FEW_ROWS(rows, add_rows, s, tile)
}

#endif
