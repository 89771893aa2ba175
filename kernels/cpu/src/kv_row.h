/* A row of keys or values in a cache: in the model's format, or quantized to 8 bits with a scale.
 *
 * `kernels/kv_formats.py` defines the formats. A number of a quantized row, times the row's scale and
 * rounded to the model's format, is the number that the model uses. */
#ifndef QUIRE_KV_ROW_H
#define QUIRE_KV_ROW_H

#include "simd.h"

typedef uint8_t vb __attribute__((vector_size(LANES)));
typedef enum { AS_IS = 0, INT8 = 1, FP8 = 2 } kv_format; /* fp8: e4m3, without infinities */

struct kv_row {
    const char *numbers;
    const bf16 *scale; /* unless AS_IS */
};

INLINE int64_t kept_bytes(dtype type, kv_format format) { return format == AS_IS ? size_of(type) : 1; }

/* A vector of numbers of a quantized row, multiplied by the row's scale. */
INLINE vf dequantized(kv_format format, const char *numbers, float scale)
{
#ifdef HAS_AVX512
    __m128i bytes = _mm_loadu_si128((const __m128i *)numbers);
    if (format == INT8) return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)) * scale;
    /* fp8 has an exponent of four bits with a bias of 7, and fp16 one of five bits with a bias of 15. So
     * the bits, shifted and read as fp16, mean a number 2^8 times smaller. The sign is extended into the
     * exponent's highest bit, which the mask clears. */
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

/* Writes a quantized row to `room` in the model's format. Returns where the written row begins, and moves
 * `room` past it. */
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

/* Rounds x, numbers divided by their row's scale, to the nearest numbers of the format, ties to even; as
 * int8, NaN becomes 0. Scales are rounded up, so no number of x is above the format's largest number. */
INLINE vb quantized(kv_format format, vf x)
{
    if (format == INT8) {
        const vf round = vf_set(12582912.0f); /* 1.5 * 2^23: adding it leaves the nearest integer */
        return __builtin_convertvector((vu)(x + round) & (vu)(x == x), vb);
    }
    vu bits = (vu)x, size = bits & 0x7fffffff;
    /* 3 of 23 bits of the mantissa stay, rounded; the exponent's bias becomes 7, not 127. */
    vu normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    /* fp8 numbers below 2^-6 are multiples of 2^-9. Adding 2^14 rounds to such a multiple, because floats
     * near 2^14 are 2^-9 apart. */
    vu tiny = (vu)((vf)size + 0x1p14f) - 0x46800000;
    vu is_tiny = (vu)(size < 0x3c800000), is_nan = (vu)(size > 0x7f800000);
    vu magnitude = (tiny & is_tiny) | (normal & ~is_tiny & ~is_nan) | (0x7f & is_nan);
    return __builtin_convertvector(magnitude | (bits >> 24 & 0x80), vb);
}

/* Quantizes a row of the model's format. Stores only final results, each once, because another thread may
 * be reading them already. */
INLINE void quantize_row(dtype type, kv_format format, const char *row, int64_t head_dim,
                         char *numbers, bf16 *scale)
{
    vu sizes = {0}; /* absolute values as bits; NaN is above infinity */
    for (int64_t d = 0, n; d < head_dim; d += n) {
        n = min64(LANES, head_dim - d);
        vu size = (vu)(n == LANES ? load(type, row, d) : load_part(type, row, d, n)) & 0x7fffffff;
        vu is_larger = (vu)(size > sizes);
        sizes = (size & is_larger) | (sizes & ~is_larger);
    }
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits = sizes[i] > bits ? sizes[i] : bits;
    float factor = INFINITY;
    if (bits < 0x7f800000) memcpy(&factor, &bits, sizeof bits);
    factor /= format == INT8 ? 127.0f : 448.0f;
    memcpy(&bits, &factor, sizeof bits);
    const bf16 kept = (bf16)((bits + 0xffff) >> 16); /* rounded up, so that no quotient is too large */
    *scale = kept;
    factor = kept ? bf16_to_float(kept) : 1.0f; /* a row of zeros */
    for (int64_t d = 0, n; d < head_dim; d += n) {
        n = min64(LANES, head_dim - d);
        vf x = (n == LANES ? load(type, row, d) : load_part(type, row, d, n)) / factor;
        vb bytes = format == INT8 ? quantized(INT8, x) : quantized(FP8, x);
        memcpy(numbers + d, &bytes, n);
    }
}

#endif
