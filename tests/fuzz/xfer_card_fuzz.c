/* The cards by which transfer peers reach each other. The first byte says what to try: bytes as they come (of which the
 * checksum lets hardly any through), or a card that we packed from them, whole, cut or with one byte changed. */
#include <stdint.h>
#include <string.h>

#include "common/base/check.h"
#include "common/transfer/card_int.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void read_both(const uint8_t *p, size_t n)
{
    struct td_card_address a;
    struct td_card_key k;
    struct td_err err;
    if (td_card_read_address(p, n, &a, &err) == TD_OK) TD_CHECK(a.worker >= p && a.worker + a.n_worker <= p + n);
    if (td_card_read_key(p, n, &k, &err) == TD_OK) TD_CHECK(k.rkey >= p && k.rkey + k.n_rkey <= p + n);
}

static void damage_and_read(struct td_buf *card, const uint8_t *data)
{
    TD_CHECK(!card->failed);
    read_both(card->data, card->n);
    size_t cut = ((size_t)data[1] << 8 | data[2]) % card->n;
    read_both(card->data, cut);
    card->data[cut] ^= (uint8_t)(data[3] | 1);
    read_both(card->data, card->n);
    td_buf_free(card);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 32) return 0;
    if (data[0] % 3 == 0) {
        read_both(data + 1, n - 1);
        return 0;
    }
    struct td_buf card = {0};
    if (data[0] % 3 == 1) {
        struct td_card_address a = {.worker = data + 16, .n_worker = (uint32_t)(n - 16)};
        memcpy(&a.incarnation, data + 4, sizeof a.incarnation);
        td_card_pack_address(&a, &card);
    } else {
        struct td_card_key k = {.rkey = data + 24, .n_rkey = (uint32_t)(n - 24), .kind = TD_POOL_SYSV};
        memcpy(&k.base, data + 4, sizeof k.base);
        memcpy(&k.n_bytes, data + 12, sizeof k.n_bytes);
        td_card_pack_key(&k, &card);
    }
    damage_and_read(&card, data);
    return 0;
}
