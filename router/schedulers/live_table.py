"""The live sequences of one scheduler; delivers each sequence's events to its request."""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence

from router.live.live_request import LiveRequest
from router.metrics import ModelMetrics
from router.schedulers.delivery import Delivery
from router.schedulers.messages import StepEvents


class LiveTable:
    """Maps the keys of live sequences to their requests."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self._delivery = Delivery()
        self._seq_key_to_live: dict[int, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._seq_key_to_live)

    def __contains__(self, seq_key: int) -> bool:
        return seq_key in self._seq_key_to_live

    @property
    def lives(self) -> list[LiveRequest]:
        """The distinct requests, oldest first."""
        return list(dict.fromkeys(self._seq_key_to_live.values()))

    def add(self, live: LiveRequest) -> None:
        self._seq_key_to_live.update(dict.fromkeys(live.live_seq_keys, live))

    def discard(self, live: LiveRequest) -> None:
        self.take(live.live_seq_keys)

    def take(self, seq_keys: Iterable[int]) -> dict[int, LiveRequest]:
        """Remove sequences; return the removed sequences' keys with their requests."""
        table = self._seq_key_to_live
        return {key: table.pop(key) for key in seq_keys if key in table}

    def find(self, first_seq_key: int) -> LiveRequest | None:
        """Return the request whose output 0 has the key `first_seq_key`.

        Output 0 may have ended, as long as another output of the request is live.
        """
        if (live := self._seq_key_to_live.get(first_seq_key)) is not None:
            return live
        lives = self._seq_key_to_live.values()
        return next((live for live in lives if live.record.first_seq_key == first_seq_key), None)

    def deliver(self, events: StepEvents, *, is_new: bool = True) -> Sequence[int]:
        """Deliver the events of a step; return the sequences that ended with a stop string.

        The caller must cancel these sequences at the scheduler. `is_new` is False for the past
        events of a resumed request; they are not counted in the metrics again.
        """
        # If a sequence is missing, the router cancelled it before these events arrived.
        now = asyncio.get_running_loop().time()
        table = self._seq_key_to_live
        for pin in events.pins:  # first, because the tokens may end the request
            if (live := table.get(pin.seq_key)) is not None:
                live.pin(pin.num_pinned_tokens)
        for admission in events.admissions:
            if (live := table.get(admission.seq_key)) is not None:
                live.admit(admission.seq_key, admission.num_cached_tokens)
        changed: list[LiveRequest] = []
        for seq_key, vector in events.vectors.items():
            if (live := table.pop(seq_key, None)) is not None:
                live.set_vector(seq_key, vector)
                changed.append(live)
        stopped: list[int] = []
        gaps: list[float] | None = [] if is_new else None
        num_tokens = 0
        logprobs = events.logprobs
        # All events of one step for a sequence are sent together. So requests are flushed right
        # after their tokens only if no sequence has several tokens in this step.
        flush_until = -math.inf
        if len(set(events.seq_keys)) == len(events.seq_keys):
            num_streams = len(events.seq_keys) + len(events.endings) + len(events.vectors)
            flush_until = self._delivery.begin(num_streams)
        lives_ending = {table.get(each.seq_key) for each in events.endings}
        for part in events.prompt_scores:
            if (live := table.get(part.seq_key)) is not None:
                live.score_prompt(part.position, part.logprobs)
        for i, (seq_key, token_id) in enumerate(
            zip(events.seq_keys, events.token_ids, strict=True)
        ):
            live = table.get(seq_key)
            if live is None:
                continue
            num_tokens += 1
            logprob = logprobs.get(i) if logprobs else None
            if live.push_token(seq_key, token_id, logprob, now, gaps):
                del table[seq_key]
                stopped.append(seq_key)
            if live.outputs_with_events:
                if live in lives_ending or time.monotonic() >= flush_until:
                    changed.append(live)
                else:
                    live.flush()
        if gaps is not None:
            self._metrics.generation_tokens.inc(num_tokens)
            self._metrics.inter_token_latency.observe_all(gaps)
        for ending in events.endings:
            if (live := table.pop(ending.seq_key, None)) is not None:
                live.finish(
                    ending.seq_key,
                    ending.reason,
                    ending.stop_token_id,
                    ending.error,
                    ending.cumulative_logprob,
                )
                changed.append(live)
        self._delivery.add(changed)
        return stopped
