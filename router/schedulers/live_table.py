"""The live sequences that one scheduler works on, by key, and what its news are to them."""

import asyncio
from collections.abc import Iterable, Sequence

from router import metrics
from router.request.live import LiveRequest
from router.schedulers.messages import StepNews


class LiveTable:
    """Live requests by the keys of their sequences that have not ended."""

    def __init__(self) -> None:
        self._seq_key_to_live: dict[int, LiveRequest] = {}

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self._seq_key_to_live)

    def __contains__(self, seq_key: int) -> bool:
        return seq_key in self._seq_key_to_live

    @property
    def lives(self) -> list[LiveRequest]:
        """The requests, each once, in the order in which they came."""
        return list(dict.fromkeys(self._seq_key_to_live.values()))

    def add(self, live: LiveRequest) -> None:
        """Adds a request's sequences."""
        self._seq_key_to_live.update(dict.fromkeys(live.live_seq_keys, live))

    def discard(self, live: LiveRequest) -> None:
        """Forgets a request's sequences."""
        self.take(live.live_seq_keys)

    def take(self, seq_keys: Iterable[int]) -> dict[int, LiveRequest]:
        """Forgets sequences; gives those that there were."""
        table = self._seq_key_to_live
        return {key: table.pop(key) for key in seq_keys if key in table}

    def find(self, first_seq_key: int) -> LiveRequest | None:
        """The request whose output 0 has this key, even if that output has ended."""
        if (live := self._seq_key_to_live.get(first_seq_key)) is not None:
            return live
        lives = self._seq_key_to_live.values()
        return next((live for live in lives if live.record.first_seq_key == first_seq_key), None)

    def hear(self, news: StepNews, *, is_new: bool = True) -> Sequence[int]:
        """Hands out the news of a step.

        `is_new` is False for what the router of before has counted. Gives the sequences that a stop
        string has ended, of which the scheduler does not know.
        """
        # A sequence that is not in the table was cancelled while its news was on the way.
        now = asyncio.get_running_loop().time()
        table = self._seq_key_to_live
        for pin in news.pins:  # before the tokens, which may end its last output
            if (live := table.get(pin.seq_key)) is not None:
                live.pin(pin.num_pinned_tokens)
        stopped: list[int] = []
        num_tokens = 0
        for part in news.prompt_scores:
            if (live := table.get(part.seq_key)) is not None:
                live.score_prompt(part.position, part.logprobs)
        for i, (seq_key, token_id) in enumerate(zip(news.seq_keys, news.token_ids, strict=True)):
            live = table.get(seq_key)
            if live is None:
                continue
            num_tokens += is_new
            if live.push_token(seq_key, token_id, news.logprobs.get(i), now, is_new=is_new):
                del table[seq_key]
                stopped.append(seq_key)
        metrics.GENERATION_TOKENS.inc(num_tokens)
        for admission in news.admissions:
            if (live := table.get(admission.seq_key)) is not None:
                live.admit(admission.seq_key, admission.num_cached_tokens)
        for ending in news.endings:
            if (live := table.pop(ending.seq_key, None)) is not None:
                live.finish(
                    ending.seq_key,
                    ending.reason,
                    ending.stop_token_id,
                    ending.error,
                    ending.cumulative_logprob,
                )
        return stopped
