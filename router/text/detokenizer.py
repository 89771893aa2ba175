"""Turns a growing sequence of token ids into text, piece by piece."""

import codecs

from router.text.token_bytes import TokenTable


class Detokenizer:
    """The text of one output, token by token; it never ends within a character.

    A token adds bytes (see `TokenTable`), so text is an incremental UTF-8 decode of them: each
    token costs the same however long the output is, at most three bytes are held back, and the
    pieces concatenate to exactly what decoding everything at once gives. Bytes that are not
    UTF-8 become U+FFFD, one for each maximal ill-formed part, as the Unicode standard recommends.
    """

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool) -> None:
        self._table = table
        self._pieces = table.text_pieces if skip_special_tokens else table.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True

    def push(self, token_id: int) -> str:
        """Return the text that is certain with this token; "" within a character."""
        if token_id >= len(self._pieces):
            return ""  # models pad their vocabulary with ids that the tokenizer does not know
        piece = self._pieces[token_id]
        if self._at_start and piece:
            self._at_start = False
            piece = self._table.leading_space.strip(piece)
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Return the end of the text: U+FFFD if it ends within a character, else ""."""
        return self._utf8.decode(b"", final=True)
