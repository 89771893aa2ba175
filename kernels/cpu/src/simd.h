/* Arithmetic on vectors of floats, and conversion from and to the number formats in memory.
 *
 * The code uses the compiler's vector types, so any CPU can run it. Vectors are as wide as the CPU's
 * registers, because gcc keeps wider ones in memory. Intrinsics are used where the compiler does not find
 * the right instruction. */
#ifndef QUIRE_SIMD_H
#define QUIRE_SIMD_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define HAS_AVX512
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint16_t bf16, fp16;

INLINE vf vf_set(float x) { return x - (vf){0}; }
INLINE vf vf_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf vf_select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

INLINE vf vf_max(vf a, vf b)
{
#ifdef HAS_AVX512
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return vf_select(a > b, a, b);
#endif
}

INLINE float vf_reduce_max(vf v)
{
#ifdef HAS_AVX512
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

/* The vector 0, 1, 2, ... */
INLINE vi vi_lanes(void)
{
    vi v = {0};
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

/* The sum of all lanes. */
INLINE float vf_reduce_add(vf v)
{
    float x[LANES];
    memcpy(x, &v, sizeof x);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

/* 2^(n + f) for f in [-0.5, 0.5], with a relative error of at most 2e-7. */
INLINE vf exp2_of(vi n, vf f)
{
    vf p = vf_set(1.54035304e-4f);
    p = p * f + vf_set(1.33335581e-3f);
    p = p * f + vf_set(9.61812911e-3f);
    p = p * f + vf_set(5.55041087e-2f);
    p = p * f + vf_set(2.40226507e-1f);
    p = p * f + vf_set(6.93147181e-1f);
    p = p * f + vf_set(1.0f);
    return (vf)((vi)p + (n << 23));
}

/* 2^x for x <= 128, with a relative error of at most 2e-7; 0 below 2^-126; NaN stays NaN. */
INLINE vf vf_exp2(vf x)
{
    const vf round = vf_set(12582912.0f); /* 1.5 * 2^23: adding it leaves the nearest integer */
    vi in_range = x >= vf_set(-126.0f), is_nan = x != x;
    x = vf_select(in_range, x, (vf){0});
    vf shifted = x + round;
    vf f = x - (shifted - round); /* [-0.5, 0.5] */
    vi n = (vi)shifted - (vi)round;
    return (vf)(((vi)exp2_of(n, f) & in_range) | is_nan);
}

/* The divisor 1 + exp(-x) in the sigmoid of x, which is 1 / (1 + exp(-x)). */
INLINE vf sigmoid_divisor(vf x)
{
    vf power = vf_max(x * vf_set(-1.44269504f), vf_set(-127.0f));
    power = -vf_max(-power, vf_set(-128.0f)); /* 2^128 is infinity, and x / infinity 0 */
    return 1.0f + vf_exp2(power);
}

/* SiLU: x / (1 + exp(-x)). */
INLINE vf silu(vf x) { return x / sigmoid_divisor(x); }

INLINE float bf16_to_float(bf16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Rounds to the nearest bf16, ties to even; NaN stays NaN. */
INLINE bf16 bf16_from_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (bf16)(bits >> 16 | 0x40);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE vf vf_from_bf16(const bf16 *p)
{
    vh half;
    memcpy(&half, p, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

INLINE void floats_from_bf16(float *to, const bf16 *from, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) vf_store(to + i, vf_from_bf16(from + i));
    for (; i < n; i++) to[i] = bf16_to_float(from[i]);
}

INLINE vh vf_to_bf16(vf v)
{
#ifdef __AVX512BF16__
    return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    vu is_nan = (vu)(v != v);
    rounded = (rounded & ~is_nan) | ((bits >> 16 | 0x40) & is_nan);
    return __builtin_convertvector(rounded, vh);
#endif
}

INLINE vf vf_from_fp16(const fp16 *p)
{
#ifdef HAS_AVX512
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vh half;
    memcpy(&half, p, sizeof half);
    vu bits = __builtin_convertvector(half, vu);
    vf size = (vf)((bits & 0x7fff) << 13) * 0x1p112f; /* the exponents' biases differ by 112 */
    return (vf)((vu)size | (bits & 0x8000) << 16);
#endif
}

/* Converts powers of two in the format e8m0: 2^(x - 127). */
INLINE vf vf_from_e8m0(const uint8_t *p)
{
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes powers;
    memcpy(&powers, p, sizeof powers);
    vu bits = __builtin_convertvector(powers, vu);
    return (vf)(bits << 23 | ((vu)(bits == 0) & 0x00400000)); /* 2^-127 has no leading one */
}

/* Converts 4-bit numbers in the format e2m1, which are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. */
INLINE vf vf_from_e2m1(vu x)
{
    vu size = x & 7, is_large = (vu)(size > 1);
    vu large = (size << 22) + 0x3f000000, small = size * 0x3f000000; /* small: 0 or 0.5 */
    return (vf)((large & is_large) | (small & ~is_large) | (x & 8) << 28);
}

/* The number formats of tensors; `load` and `store` convert from and to floats. */
typedef enum { F32 = 0, BF16 = 1 } dtype;

INLINE vf load(dtype type, const void *base, int64_t i)
{
    return type == BF16 ? vf_from_bf16((const bf16 *)base + i) : vf_load((const float *)base + i);
}

INLINE void store(dtype type, void *base, int64_t i, vf v)
{
    if (type == BF16) {
        vh half = vf_to_bf16(v);
        memcpy((bf16 *)base + i, &half, sizeof half);
    } else {
        vf_store((float *)base + i, v);
    }
}

/* Loads n < LANES elements; the other lanes are zero. */
INLINE vf load_part(dtype type, const void *base, int64_t i, int64_t n)
{
    float lanes[LANES] = {0};
    for (int64_t j = 0; j < n; j++)
        lanes[j] = type == BF16 ? bf16_to_float(((const bf16 *)base)[i + j])
                                : ((const float *)base)[i + j];
    return vf_load(lanes);
}

INLINE void store_part(dtype type, void *base, int64_t i, int64_t n, vf v)
{
    for (int64_t j = 0; j < n; j++) {
        if (type == BF16) ((bf16 *)base)[i + j] = bf16_from_float(v[j]);
        else ((float *)base)[i + j] = v[j];
    }
}

/* v, rounded to the format. */
INLINE vf rounded(dtype type, vf v)
{
    return type == BF16 ? (vf)(__builtin_convertvector(vf_to_bf16(v), vu) << 16) : v;
}

INLINE int64_t size_of(dtype type) { return type == BF16 ? 2 : 4; }
INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Calls `function` with the number format as a constant, so that each format gets its own code. */
#define BY_DTYPE(type, function, ...) \
    ((type) == BF16 ? function(BF16, __VA_ARGS__) : function(F32, __VA_ARGS__))

#endif
