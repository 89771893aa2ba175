"""Which requests a worker had when it was lost, and whether they gained anything there.

A core is asked for plans and says no more of itself than that; so this is read from the plans.
"""

from enum import Enum

from contract.step import NewSequence, Plan
from scheduler_svc.core.request import Request


class Progress(Enum):
    """How far a request came at a worker."""

    WAITED = "waited"
    """None of its sequences had a row."""
    NONE = "none"
    """It ran, and gained no token."""
    SOME = "some"
    """It ran, and gained tokens."""


class SequencesAtWorker:
    """The sequences that have a row, as the worker was told of them."""

    def __init__(self) -> None:
        self._row_to_sequence: dict[int, NewSequence] = {}

    def sent(self, plan: Plan) -> None:
        """Follow a plan that was sent."""
        for row in plan.released_rows.tolist():
            self._row_to_sequence.pop(row, None)
        for new in plan.new_sequences:
            self._row_to_sequence[new.row] = new

    def find(self, request: Request) -> Progress:
        """Look up a live request, with the `outputs` it has by now.

        Requests with the same prompt, sampling and seed cannot be told apart, nor need they be:
        they compute the same.
        """
        sequences = [new for new in self._row_to_sequence.values() if _is_of(new, request)]
        if not sequences:
            return Progress.WAITED
        num_prompt_tokens = len(request.prompt_token_ids)
        for new in sequences:
            if request.beam is not None:  # it began with its prompt: a longer one has had steps
                if len(new.token_ids) > num_prompt_tokens:
                    return Progress.SOME
                continue
            output = request.outputs[new.output_index]
            if num_prompt_tokens + len(output.token_ids) > len(new.token_ids):
                return Progress.SOME
        return Progress.NONE


def _is_of(new: NewSequence, request: Request) -> bool:
    return (
        new.num_prompt_tokens == len(request.prompt_token_ids)
        and new.sampling == request.sampling
        and new.token_ids[: new.num_prompt_tokens].tobytes() == request.prompt_token_ids.tobytes()
    )
