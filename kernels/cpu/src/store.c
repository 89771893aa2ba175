/* Stores the keys and values of new tokens in the paged cache, in the slot of each token.
 *
 * Symbols: T tokens, HKV kv heads, D head dim, B blocks, P block size. A share is some tokens; no two
 * tokens of a call have the same slot. */
#include "kv_row.h"
#include "threads.h"

enum {
    SHARE_ELEMS = 2048,     /* of a share: half a microsecond */
    ELEMS_WORTH_IT = 16384, /* more elements are worth waking a second thread */
};

/* The arguments for the keys, or for the values; strides are in elements. */
struct side {
    int64_t format;  /* of the cache: a `kv_format` */
    const char *new; /* [T, HKV, D], or NULL: values that are a part of the keys */
    char *cache;     /* [B, P, HKV, D] */
    bf16 *scales;    /* [B, P, HKV], or NULL: AS_IS */
    int64_t stride_t, stride_h;
    int64_t cache_stride_b, cache_stride_p, cache_stride_h;
    int64_t scale_stride_b, scale_stride_p, scale_stride_h;
};

/* cache[slot / P, slot % P, h] = new[t, h] where slot = slot_mapping[t] >= 0. */
struct store_kv {
    int64_t elem_bytes; /* of `new`; for a quantized cache 4 means F32 and 2 BF16 */
    int64_t num_tokens, num_kv_heads, head_dim, block_size;
    const int64_t *slot_mapping; /* [T] */
    struct side key, value;
};

INLINE void store_heads(dtype type, const struct store_kv *a, const struct side *s, int64_t t)
{
    const kv_format format = (kv_format)s->format;
    int64_t block = a->slot_mapping[t] / a->block_size, offset = a->slot_mapping[t] % a->block_size;
    int64_t to = block * s->cache_stride_b + offset * s->cache_stride_p;
    int64_t to_scale = block * s->scale_stride_b + offset * s->scale_stride_p;
    for (int64_t h = 0; h < a->num_kv_heads; h++, to += s->cache_stride_h) {
        const char *row = s->new + (t * s->stride_t + h * s->stride_h) * a->elem_bytes;
        if (format == AS_IS)
            memcpy(s->cache + to * a->elem_bytes, row, a->head_dim * a->elem_bytes);
        else
            quantize_row(type, format, row, a->head_dim, s->cache + to,
                         s->scales + to_scale + h * s->scale_stride_h);
    }
}

INLINE void store_tokens(dtype type, const struct store_kv *a, int64_t start, int64_t end)
{
    for (int64_t t = start; t < end; t++) {
        if (a->slot_mapping[t] < 0) continue; /* PAD_SLOT */
        store_heads(type, a, &a->key, t);
        if (a->value.new) store_heads(type, a, &a->value, t);
    }
}

void quire_store_kv_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct store_kv *a = args;
    BY_DTYPE(a->elem_bytes == 2 ? BF16 : F32, store_tokens, a,
             share_start(a->num_tokens, share, num_shares),
             share_start(a->num_tokens, share + 1, num_shares));
}

static int64_t store_kv_elems(const struct store_kv *a)
{
    return a->num_tokens * a->num_kv_heads * a->head_dim;
}

int64_t quire_store_kv_count(const void *args)
{
    return shares_of(store_kv_elems(args), SHARE_ELEMS);
}

void quire_store_kv(const struct store_kv *a)
{
    run_call(store_kv_elems(a) > ELEMS_WORTH_IT, quire_store_kv_share, quire_store_kv_count, a);
}
