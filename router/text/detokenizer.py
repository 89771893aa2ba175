"""Turns a growing sequence of token ids into text."""

import codecs

from router.text.token_bytes import TokenTable


class Detokenizer:
    """Decodes an output, one token at a time, without splitting characters.

    A token adds bytes (see `TokenTable`), which are decoded incrementally as UTF-8. So the cost of
    a token does not depend on the output's length, and at most three bytes are held back. All
    returned pieces together are the text that decoding everything at once would give. Bytes that
    are not UTF-8 become U+FFFD, one for each maximal ill-formed part, as the Unicode standard
    recommends.
    """

    __slots__ = ("_at_start", "_is_within_character", "_pieces", "_table", "_utf8")

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool) -> None:
        self._table = table
        self._pieces = table.text_pieces if skip_special_tokens else table.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._is_within_character = False

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes; "" if it completes none."""
        if token_id >= len(self._pieces):
            return ""  # models may pad their vocabulary beyond the tokenizer's
        piece = self._pieces[token_id]
        if self._at_start and piece:
            self._at_start = False
            piece = self._table.leading_space.strip(piece)
        if not self._is_within_character:
            try:
                return piece.decode()  # takes a third of the incremental decoder's time
            except UnicodeDecodeError:
                pass
        text = self._utf8.decode(piece)
        self._is_within_character = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """Return the rest of the text: U+FFFD if the output ends within a character, else ""."""
        return self._utf8.decode(b"", final=True)
