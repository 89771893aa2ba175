"""One live beam search, with one sequence per beam."""

from contract.step import SearchState
from scheduler_svc.core.beams.search import BeamCandidates, BeamSearcher, Hypothesis, num_common
from scheduler_svc.core.interface.events import Finished
from scheduler_svc.core.interface.request import FinishReason, Request, SeqId
from scheduler_svc.core.sequence import SeqStatus, Sequence


class BeamGroup:
    """One beam search and its sequences. Only `BeamGroups` and `Takeover` change a group."""

    def __init__(self, request: Request, seqs: tuple[Sequence, ...]) -> None:
        """Make the group of a search that has not begun.

        Args:
            request: The request, which asks for beam search.
            seqs: One waiting sequence per beam. The first `request.n` have the keys under which the
                search reports its outputs.
        """
        assert request.beam is not None
        self.search = BeamSearcher(
            request.beam,
            request.prompt_token_ids,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
        )
        self.seqs = seqs
        self.outputs = seqs[: request.n]
        self.places: list[Sequence] = []
        """The sequence of each beam; empty unless the search runs. When a search starts or resumes,
        only its best beam has a sequence. While `parents` is set, `places` has the sequences of the
        previous beams."""
        self.parents: tuple[int, ...] | None = None
        """For each new beam, the index in `places` of the beam that it continues. Set when the
        search chooses new beams, and None again when the step of the new beams begins."""
        self.reports: dict[SeqId, BeamCandidates] = {}
        """The likeliest next tokens of the beams that have computed their newest token."""

    @property
    def leader(self) -> Sequence:
        """The sequence that stands for the search in the queue; the other beams start after it."""
        return self.seqs[0]

    def queue_leader(self) -> None:
        """Give the leader the best beam's tokens; the caller then queues the leader."""
        leader, best = self.leader, self.search.beams[0]
        leader.token_ids, leader.block_hashes = best.token_ids, []
        leader.max_total_tokens = self.search.num_tokens + 1

    def state_with(self, seq: Sequence) -> SearchState | None:
        """Return the state of the search, which is sent to the worker with `seq`.

        None if `seq` is not the best beam, or the beams have no output tokens yet.
        """
        has_begun = self.search.num_tokens > len(self.leader.request.prompt_token_ids)
        return self.search.state if has_begun and seq is self.places[0] else None

    @property
    def spares(self) -> list[Sequence]:
        """The sequences that no beam uses now."""
        return [seq for seq in self.seqs if seq.status is SeqStatus.SPARE]

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        return not self.search.beams

    def results(self) -> list[Finished]:
        """Return the `Finished` event of each output, best output first.

        Call this method after the search has ended. If the vocabulary is hardly larger than the
        number of beams, the search may find fewer hypotheses than outputs; each output without a
        hypothesis ends with an error.
        """
        found = self.search.hypotheses
        return [
            _finished(seq, found[index] if index < len(found) else None)
            for index, seq in enumerate(self.outputs)
        ]

    @property
    def can_spread(self) -> bool:
        """Whether a resumed search can start all beams but the best, which has started already.

        The other beams can start as soon as the best beam has all its KV.
        """
        is_alone = len(self.places) < len(self.search.beams) and self.parents is None
        leader = self.leader
        return is_alone and leader.status is SeqStatus.DECODE and not leader.loading_block_ids

    def num_blocks_due(self, block_size: int) -> int:
        """Return an upper bound on the new blocks that the beams' next step needs per KV group."""
        if self.parents is None:
            return self._num_blocks_of_others(block_size) if self.can_spread else 0
        if (self.search.num_tokens - 1) % block_size == 0:  # the parents' blocks are full
            return len(self.parents)
        # Each fork needs a block for its copy. First each beam without a child frees a block.
        return max(0, len(self.parents) - len(self.places))

    def demand(self, block_size: int) -> tuple[int, int]:
        """Return how many rows, and how many blocks per KV group, a queued search needs to run.

        The rows include the leader's row. The blocks do not include those with which the leader
        starts.
        """
        width, num_tokens, request = len(self.seqs), self.search.num_tokens, self.leader.request
        if len(self.search.beams) > 1:
            return width, self._num_blocks_of_others(block_size)
        if num_tokens == len(request.prompt_token_ids) + request.max_tokens - 1:
            return width, 0  # all beams end with the next token
        return width, width - (num_tokens % block_size > 0)

    def num_shared_blocks(self, beam: int, block_size: int) -> int:
        """Return how many full blocks, from the first on, a beam can share with the best beam."""
        tokens, best = (self.search.beams[i].token_ids[:-1] for i in (beam, 0))
        return num_common(tokens, best) // block_size

    def _num_blocks_of_others(self, block_size: int) -> int:
        """Return how many blocks per KV group the beams need besides those of the best beam."""
        num_blocks = -(-self.search.num_tokens // block_size)
        others = range(1, len(self.search.beams))
        return sum(num_blocks - self.num_shared_blocks(beam, block_size) for beam in others)


def _finished(seq: Sequence, hypothesis: Hypothesis | None) -> Finished:
    source = seq.request.source
    if hypothesis is None:
        error = f"the search found no output {seq.output_index}: there are too few continuations"
        return Finished(source, seq.seq_key, FinishReason.ERROR, error=error)
    is_stop = hypothesis.end_token_id is not None
    return Finished(
        source,
        seq.seq_key,
        FinishReason.STOP if is_stop else FinishReason.LENGTH,
        stop_token_id=hypothesis.end_token_id,
        token_ids=tuple(hypothesis.token_ids.tolist()),
        cumulative_logprob=float(hypothesis.logprob),
    )
