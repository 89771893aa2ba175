/* Suppresses tokens: the logits of tokens that a bit mask does not admit become -inf, in place.
 *
 * Symbols: S sequences, G of which have a mask, V vocabulary, W words of a mask. A share is some masks, and
 * each mask is for one row of logits. */
#include "simd.h"
#include "threads.h"

enum {
    LOGITS_WORTH_IT = 131072, /* more logits are worth waking a second thread */
    WORD_BITS = 32,
};

struct suppress {
    int64_t num_masks, num_tokens;
    float *logits;            /* [S, V] */
    const int64_t *places;    /* [G] */
    const uint32_t *admitted; /* [G, W]; bit t % 32 of word t / 32 is token t's */
    int64_t logits_stride, admitted_stride;
};

/* Suppresses those of LANES tokens that are not admitted; the tokens' bits are the lowest of `bits`. */
INLINE void suppress_lanes(float *logits, uint32_t bits)
{
#ifdef HAS_AVX512
    _mm512_mask_storeu_ps(logits, (__mmask16)~bits, _mm512_set1_ps(-INFINITY));
#else
    vi is_admitted = (((int32_t)bits - (vi){0}) & 1 << vi_lanes()) != 0;
    vf_store(logits, vf_select(is_admitted, vf_load(logits), vf_set(-INFINITY)));
#endif
}

int64_t quire_suppress_count(const void *args)
{
    const struct suppress *a = args;
    return shares_of(a->num_masks, 1);
}

void quire_suppress_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct suppress *a = args;
    int64_t full = a->num_tokens / WORD_BITS, end = share_start(a->num_masks, share + 1, num_shares);
    for (int64_t mask = share_start(a->num_masks, share, num_shares); mask < end; mask++) {
        float *logits = a->logits + a->places[mask] * a->logits_stride;
        const uint32_t *admitted = a->admitted + mask * a->admitted_stride;
        for (int64_t word = 0; word < full; word++)
            for (int bit = 0; bit < WORD_BITS; bit += LANES)
                suppress_lanes(logits + word * WORD_BITS + bit, admitted[word] >> bit);
        for (int64_t token = full * WORD_BITS; token < a->num_tokens; token++)
            if (!(admitted[full] >> token % WORD_BITS & 1)) logits[token] = -INFINITY;
    }
}

void quire_suppress(const struct suppress *a)
{
    run_call(a->num_masks * a->num_tokens > LOGITS_WORTH_IT, quire_suppress_share,
             quire_suppress_count, a);
}
