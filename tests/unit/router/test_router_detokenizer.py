"""The incremental detokenizer equals decoding all at once, for each kind of tokenizer."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from router_tokenizers import byte_fallback_bpe, byte_level_bpe, metaspace_bpe
from tokenizers import decoders, models

from router.text.detokenizer import Detokenizer
from router.text.token_bytes import token_table

BYTE_LEVEL = byte_level_bpe()
BYTE_FALLBACK = byte_fallback_bpe()
METASPACE = metaspace_bpe()

TEXT = st.text(
    st.sampled_from("abc he llo.,é東🙂\n👩‍👧 ")
    | st.characters(codec="utf-8", exclude_characters="▁"),  # it stands for a space
    max_size=60,
)


def table_of(tokenizer):
    special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    return token_table(tokenizer, frozenset(special))


TABLES = {id(t): table_of(t) for t in (BYTE_LEVEL, BYTE_FALLBACK, METASPACE)}


def pieces(tokenizer, token_ids, *, skip_special_tokens=True):
    detokenizer = Detokenizer(TABLES[id(tokenizer)], skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


def random_ids(tokenizer):
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60)


@given(random_ids(BYTE_LEVEL), st.booleans())
def test_byte_level_pieces_are_the_full_decode_of_any_token_ids(token_ids, skip):
    expected = BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(BYTE_LEVEL, token_ids, skip_special_tokens=skip)) == expected


@given(random_ids(METASPACE), st.booleans())
def test_metaspace_pieces_are_the_full_decode_of_any_token_ids(token_ids, skip):
    expected = METASPACE.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(METASPACE, token_ids, skip_special_tokens=skip)) == expected


@given(random_ids(BYTE_FALLBACK), st.booleans())
def test_byte_fallback_pieces_are_the_full_decode_where_bytes_are_utf8(token_ids, skip):
    # If one byte token of a run is wrong, `tokenizers` turns the whole run into U+FFFD. A stream
    # cannot take back a character that it has shown, so the router replaces only the wrong part.
    decoded = BYTE_FALLBACK.decode(token_ids, skip_special_tokens=skip)
    got = "".join(pieces(BYTE_FALLBACK, token_ids, skip_special_tokens=skip))
    if "\ufffd" in decoded:
        assert "\ufffd" in got
    else:
        assert got == decoded


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@given(text=TEXT)
def test_text_survives_encoding_and_piecewise_decoding(tokenizer, text):
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, token_ids)) == text


@given(text=TEXT)
def test_no_piece_ends_within_a_character(text):
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        shown = ""
        for piece in pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids):
            shown += piece
            assert text.startswith(shown)


def test_an_emoji_is_shown_with_its_last_byte_and_not_before():
    token_ids = BYTE_FALLBACK.encode("🙂", add_special_tokens=False).ids
    assert pieces(BYTE_FALLBACK, token_ids) == ["", "", "", "", "🙂", ""]


def test_text_that_ends_within_a_character_is_flushed_as_a_replacement():
    token_ids = BYTE_FALLBACK.encode("a🙂", add_special_tokens=False).ids
    assert pieces(BYTE_FALLBACK, token_ids[:-1])[-2:] == ["", "\ufffd"]


def test_wrong_bytes_are_replaced_and_what_follows_is_kept():
    byte = {b: 3 + b for b in range(256)}
    token_ids = [byte[0xC3], byte[0xA9], byte[0x80], byte[0x41]]
    assert "".join(pieces(BYTE_FALLBACK, token_ids)) == "é\ufffdA"


def test_ids_that_the_tokenizer_does_not_know_add_nothing():
    assert pieces(BYTE_LEVEL, [10**6]) == ["", ""]


@pytest.mark.parametrize("decoder", [None, decoders.CTC()])
def test_a_decoder_that_is_not_understood_is_refused_by_name(decoder):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ValueError, match="decoder"):
        token_table(tokenizer, frozenset())
