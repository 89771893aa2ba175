/* A row of keys or values as a cache holds it: in the model's own format, or with fewer bits.
 *
 * `kernels/kv_formats.py` defines these: a quantized row's numbers are to be multiplied by its
 * scale, and then rounded to the model's format. */
#ifndef QUIRE_KV_ROW_H
#define QUIRE_KV_ROW_H

#include "simd.h"

typedef enum { AS_IS = 0, INT8 = 1, FP8 = 2 } kv_format; /* fp8: e4m3, without infinities */

struct kv_row {
    const char *numbers;
    const bf16 *scale; /* unless AS_IS */
};

INLINE int64_t kept_bytes(dtype type, kv_format format) { return format == AS_IS ? size_of(type) : 1; }

/* Sixteen numbers of a quantized row, times its scale. */
INLINE vf dequantized(kv_format format, const char *numbers, float scale)
{
#ifdef __AVX512F__
    __m128i bytes = _mm_loadu_si128((const __m128i *)numbers);
    if (format == INT8) return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)) * scale;
    /* As fp16, with exponents of five bits whose bias is 15, not 7, the bits are 2^8 times less;
     * the shift leaves a copy of the sign in the exponent. */
    __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    halves = _mm256_and_si256(halves, _mm256_set1_epi16((short)0xbfff));
    return (vf)_mm512_cvtph_ps(halves) * (256.0f * scale);
#else
    float x[LANES];
    for (int i = 0; i < LANES; i++) {
        int8_t number = (int8_t)numbers[i];
        uint32_t bits = (uint32_t)(number & 0x80) << 24 | (uint32_t)(number & 0x7f) << 20;
        if (format == INT8) x[i] = number;
        else memcpy(x + i, &bits, sizeof bits), x[i] *= 0x1p120f; /* the biases' difference */
    }
    return vf_load(x) * scale;
#endif
}

/* A quantized row in the model's format: into `room`, which is moved on; where it begins. */
INLINE const char *dequantize_row(dtype type, kv_format format, struct kv_row row, int64_t head_dim,
                                  char **room)
{
    const float scale = bf16_to_float(*row.scale);
    char *out = *room;
    for (int64_t d = 0; d < head_dim; d += LANES) {
        const char *numbers = row.numbers + d;
        char rest[LANES] = {0};
        if (d + LANES > head_dim) numbers = memcpy(rest, numbers, head_dim - d);
        store(type, out, d, format == INT8 ? dequantized(INT8, numbers, scale)
                                           : dequantized(FP8, numbers, scale));
    }
    *room += ceil_div(head_dim, LANES) * LANES * size_of(type);
    return out;
}

#endif
