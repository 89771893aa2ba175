"""Counts the tokens that a model spends on thinking, by the markers in an output's text."""

from contract.request import ThinkingMarkers


class ThinkingCounter:
    """Follows one output's text. A token counts as thinking if thinking has begun before it."""

    def __init__(self, markers: ThinkingMarkers) -> None:
        self.num_tokens = 0
        self._markers = markers
        self._is_open = markers.has_begun
        self._text = ""
        """The end of the text, which may be part of a marker."""
        self._longest = max(map(len, (markers.begin, *markers.ends)))

    def push(self, text: str) -> bool:
        """Add the text of the next token; return False if no later token can count as thinking."""
        self.num_tokens += self._is_open
        self._text += text
        while True:
            if self._is_open:
                places = [self._text.find(end) for end in self._markers.ends]
                first = min((place for place in places if place >= 0), default=-1)
                if first < 0:
                    break
                if not self._markers.recurs:
                    return False
                self._is_open, self._text = False, self._text[first:]
            elif (place := self._text.find(self._markers.begin)) >= 0:
                if not self._markers.recurs and self._text[:place].strip():
                    return False
                self._is_open, self._text = True, self._text[place + len(self._markers.begin) :]
            elif self._markers.recurs or self._markers.begin.startswith(self._text.lstrip()):
                break
            else:
                return False
        self._text = self._text[-self._longest :]
        return True
