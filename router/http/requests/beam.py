"""The fields of a body that ask for a beam search: vLLM's names, the words of `transformers`."""

from collections.abc import Mapping
from typing import Literal

from contract.errors import InvalidArgumentError, UnimplementedError
from contract.sampling import BeamSearch, EarlyStopping
from router.http.json_object import Schema


class BeamFields(Schema):
    """What both kinds of call say of a beam search."""

    n: int = 1
    use_beam_search: bool = False
    best_of: int | None = None
    """How wide the search is; if it is not given, `n`."""
    length_penalty: float = 1.0
    early_stopping: Literal[False, True, "never"] = False

    def beam(self) -> BeamSearch | None:
        """The search that is asked for, if one is.

        Raises:
            InvalidArgumentError: A search's field is set and no search is asked for.
            UnimplementedError: Without one, `best_of` is not `n`.
        """
        if self.use_beam_search:
            return BeamSearch(
                width=self.n if self.best_of is None else self.best_of,
                length_penalty=self.length_penalty,
                early_stopping=EarlyStopping.of(self.early_stopping),
            )
        if self.best_of not in {None, self.n}:
            raise UnimplementedError(
                f"best_of is {self.best_of}; only one equal to n, which is {self.n}, is supported"
                " without use_beam_search"
            )
        for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
            if (value := getattr(self, name)) != neutral:
                raise InvalidArgumentError(name, f"is {value}; it needs use_beam_search to be true")
        return None

    @property
    def beam_field_to_json(self) -> Mapping[str, str]:
        """What the client's JSON calls the fields of a search."""
        return {
            "beam.width": "n" if self.best_of is None else "best_of",
            "beam.length_penalty": "length_penalty",
        }
