"""The fields with which a body asks for a beam search.

The names of the fields are vLLM's. Their values mean the same as in `transformers`.
"""

from collections.abc import Mapping
from typing import Literal

from contract.errors import InvalidArgumentError, UnimplementedError
from contract.sampling import BeamSearch, EarlyStopping
from router.http.strict_json import Schema


class BeamFields(Schema):
    """The beam search fields of completions and chats."""

    n: int = 1
    use_beam_search: bool = False
    best_of: int | None = None
    """The width of the search; by default `n`."""
    length_penalty: float = 1.0
    early_stopping: Literal[False, True, "never"] = False

    def beam(self) -> BeamSearch | None:
        """Return the search; None: the body asks for none.

        Raises:
            InvalidArgumentError: A field of a search is set without `use_beam_search`.
            UnimplementedError: `best_of` differs from `n`, and no search is asked for.
        """
        if self.use_beam_search:
            return BeamSearch(
                width=self.n if self.best_of is None else self.best_of,
                length_penalty=self.length_penalty,
                early_stopping=EarlyStopping.of(self.early_stopping),
            )
        if self.best_of not in {None, self.n}:
            raise UnimplementedError(
                f"best_of is {self.best_of}; without use_beam_search it must equal n, which is"
                f" {self.n}"
            )
        for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
            if (value := getattr(self, name)) != neutral:
                raise InvalidArgumentError(name, f"is {value}; it needs use_beam_search to be true")
        return None

    @property
    def beam_field_to_json(self) -> Mapping[str, str]:
        """Maps a search's fields to their names in the client's JSON."""
        return {
            "beam.width": "n" if self.best_of is None else "best_of",
            "beam.length_penalty": "length_penalty",
        }
