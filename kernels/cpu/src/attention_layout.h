/* Lays out the keys and values of a tile as the product of many rows (tile.h) reads them. */
#ifndef QUIRE_ATTENTION_LAYOUT_H
#define QUIRE_ATTENTION_LAYOUT_H

#include "attention.h"

/* Transposes LANES x LANES words: out[i][j] = rows[j][i]. */
INLINE void transpose(const vi rows[LANES], vi out[LANES])
{
#ifdef HAS_AVX512
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        __m512i low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        __m512i high = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        out[i] = (vi)_mm512_shuffle_i32x4(low, low2, 0x88);
        out[i + 4] = (vi)_mm512_shuffle_i32x4(high, high2, 0x88);
        out[i + 8] = (vi)_mm512_shuffle_i32x4(low, low2, 0xdd);
        out[i + 12] = (vi)_mm512_shuffle_i32x4(high, high2, 0xdd);
    }
#else
    int32_t to[LANES][LANES];
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[i][j] = rows[j][i];
    memcpy(out, to, sizeof to);
#endif
}

/* Pairs up the numbers of two rows, which have 2 LANES numbers of 16 bits each: pairs[0] has the first
 * LANES pairs, pairs[1] the others. */
INLINE void interleave(vi first, vi second, vi pairs[2])
{
#ifdef HAS_AVX512
    static const uint16_t places[2][32] __attribute__((aligned(64))) = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    for (int i = 0; i < 2; i++)
        pairs[i] = (vi)_mm512_permutex2var_epi16(
            (__m512i)first, _mm512_load_si512(places[i]), (__m512i)second);
#else
    uint16_t from[2][2 * LANES], to[2][2 * LANES];
    memcpy(from[0], &first, sizeof first);
    memcpy(from[1], &second, sizeof second);
    for (int i = 0; i < 4 * LANES; i++) to[i / (2 * LANES)][i % (2 * LANES)] = from[i % 2][i / 2];
    memcpy(pairs, to, sizeof to);
#endif
}

/* Loads LANES steps of a row, from number d on. A step is 4 bytes, as in `step_kind` (tile.h). Steps past
 * the end of the row are zeros. */
INLINE vi load_steps(dtype type, const char *row, int64_t d, int64_t head_dim)
{
    const int64_t count = step_kind_of(type) == PAIRS ? 2 * LANES : LANES;
    const char *at = row + d * size_of(type);
    char rest[4 * LANES] = {0};
    if (d + count > head_dim) at = memcpy(rest, at, (head_dim - d) * size_of(type));
    vi steps;
    if (step_kind_of(type) == PAIRS) memcpy(&steps, at, sizeof steps);
    else steps = (vi)load(type, at, 0);
    return steps;
}

/* Loads values for one step of the product of weights and values, from number d on: LANES floats of one
 * position, or 2 LANES pairs, each with a number of one position and a number of the next. */
INLINE void load_values(dtype type, const char *const *values, int64_t d,
                        int64_t head_dim, vi out[2])
{
    vi first = load_steps(type, values[0], d, head_dim);
    if (step_kind_of(type) == PAIRS)
        interleave(first, load_steps(type, values[1], d, head_dim), out);
    else
        out[0] = first;
}

INLINE void lay_out_in(dtype type, const struct attention *a, const struct scratch *s,
                       const struct kv_tile *tile)
{
    const int64_t pair = step_kind_of(type) == PAIRS ? 2 : 1;
    for (int64_t c = 0; c < tile->columns; c += LANES)
        for (int64_t step = 0; step < s->steps; step += LANES) {
            vi rows[LANES], columns[LANES];
            for (int j = 0; j < LANES; j++)
                rows[j] = load_steps(type, tile->keys[c + j], pair * step, a->head_dim);
            transpose(rows, columns);
            for (int k = 0; k < LANES; k++)
                memcpy(s->keys + 4 * ((step + k) * COLUMNS + c), columns + k, sizeof columns[k]);
        }
    for (int64_t c = 0; c < tile->columns; c += pair)
        for (int64_t d = 0; d < a->value_dim; d += pair * LANES) {
            vi values[2];
            load_values(type, tile->values + c, d, a->value_dim, values);
            for (int v = 0; v < pair && d + v * LANES < s->width; v++)
                memcpy(s->values + 4 * (c / pair * s->width + d + v * LANES), values + v,
                       sizeof values[v]);
        }
}

/* Lays out a tile as `product` reads it. Keys are transposed, so that a column is a position; values are
 * copied as they are, or in pairs of two positions. */
static void lay_out(const struct attention *a, const struct scratch *s, const struct kv_tile *tile)
{
    BY_DTYPE(a->type, lay_out_in, a, s, tile);
}

#endif
