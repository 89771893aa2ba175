"""Says how much of prompts a step may compute so that the others' tokens stay in time.

And how much it may compute for nobody to wait too long, whoever is beside them. And, by the same
numbers, when the next step should go out, and when one takes so long that its worker must hang.

All are learned from the steps that a worker does: how long one takes that only decodes, by how
many sequences there are; how much longer each prompt token makes it, where there are many; and what
a step with a few pays for having any, such as for reading all that is before them. The bound is
what there is time for, but not so little that a prompt mostly pays for that, nor that prompts queue
up.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from contract.heartbeat import SILENT_AFTER_S
from contract.step import Plan
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.reports.load import PromptQueue

_WEIGHT = 1 / 8
"""Of a new observation against all before it."""
_MAX_JUMP = 2.0
"""Times the average that an observation counts at most: machines do other things, too."""
_MIN_TOKENS = 4
"""So many at least; on CPUs they come almost for free beside a few decodes."""
_FEW_TOKENS = 64
"""More are many."""
_WORTH_TOKENS = 128
"""So many pay for the step: reading the weights takes as long as computing some 16 of them."""
_MIN_SLOPE = 0.5
"""What one more token adds, as a share of what each of many does, at least; noise may say less."""
_MAX_PAYING = 2.0
"""Times what is spare, how long prompts may make a step so that having any pays."""
_LONG_STEPS = 256
"""Steps within which all prompts would be done if a step computed its share of them."""
_SHORT_STEPS = 16
"""Within which short prompts would be done, beside many decodes; fewer make longer gaps."""
_MANY_DECODES = 16
_WORTHWHILE_PART = 8
"""Of what keeps a device busy, beside many decodes: so many tokens are no waste of a step."""
_FIRST_SHARE = 3 / 8
"""Of the streams that a burst of short prompts makes, beside a few decodes: those that have a token
before the last prompts are computed, and wait for them."""
_LATE_FACTOR = 10
_LEAD_S = 0.02
"""Before the step in flight ends, when the next one goes out: for planning and the wire, and for a
step that ends sooner than expected."""
_LEAD_PART = 4
"""Of a step that is long: so many times the lead, since it is harder to foresee."""


def least_tokens(queue: PromptQueue, config: SchedulerConfig) -> int:
    """Return how many tokens of prompts a step may compute however long its decodes take.

    Beside many decodes short prompts are spread over some steps: each stream feels them a little,
    and those that come first begin to stream before the last are done. Beside a few they are
    computed at once, a burst of them in two steps: spread, eight streams in a closed loop had 0.87
    of the throughput.
    """
    share = -(-queue.num_tokens // _LONG_STEPS)
    num_short = queue.num_short_tokens
    num_streams = queue.num_decoding + queue.num_short
    num_first = int(_FIRST_SHARE * num_streams) - queue.num_decoding
    if queue.num_decoding >= _MANY_DECODES:
        worthwhile = config.busy_step_tokens // _WORTHWHILE_PART
        num_short = min(num_short, max(-(-num_short // _SHORT_STEPS), worthwhile))
    elif num_first > 0 and num_streams < _MANY_DECODES:
        num_short = -(-num_short * num_first // queue.num_short)
    return max(_MIN_TOKENS, num_short, share)


@dataclass(frozen=True, slots=True)
class Pace:
    """How much longer prompts may make steps; infinity: as much as they like."""

    max_decode_slowdown: float = math.inf
    """Of a step that decodes: so many times what it takes without prompts."""
    max_prompt_step_s: float = math.inf
    """Of any step, in seconds."""


class StepPacer:
    """Bounds the prompts of the steps of one worker."""

    def __init__(self, pace: Pace, config: SchedulerConfig) -> None:
        self._pace = pace
        self._config = config
        self._first_tokens = config.busy_step_tokens
        """What a step may have of prompts before anybody knows how long that takes."""
        self._decode_s: dict[int, _Average] = {}
        """By the number of bits of how many sequences decode."""
        self._token_s = _Average()
        """What a prompt's token adds."""
        self._prompt_token_s = _Fastest()
        """What each token takes of a step that has many of prompts."""
        self._many = _Added()
        """What steps add that have many."""
        self._few = _Added()
        """What steps add that have a few and decode, too."""
        self._in_flight: deque[Plan] = deque()
        self._began_s = 0.0
        """When the oldest step in flight began, as far as is known."""
        self._share_alone = _Average()
        """Of the seconds that a step takes: since the one before was answered. A GPU's also count
        its wait behind that one."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """The most tokens of prompts that the next step may compute, decodes beside them or not.

        None: as many as a step may have.
        """
        # What a few tokens tell is too much, and too little of what a step can do, but cautious.
        token_s = self._prompt_token_s.value or self._token_s.value
        if token_s is None:
            num_in_time = float(self._first_tokens)
        else:
            num_in_time = max(self._pace.max_prompt_step_s / token_s, _WORTH_TOKENS)
        is_bound = (
            num_in_time < self._config.max_num_batched_tokens
            and self._pace.max_prompt_step_s < math.inf
        )
        return int(num_in_time) if is_bound else None

    @property
    def knows_prompts(self) -> bool:
        """Whether a step has told what each of many tokens of prompts takes."""
        return self._prompt_token_s.value is not None

    def max_paced_tokens(self, queue: PromptQueue) -> int | None:
        """Return the most tokens of prompts that the next step may compute beside decodes.

        None: there is no bound, or nothing is known yet.
        """
        decode_s, token_s = self._decode_step_s(queue.num_decoding), self._token_s.value
        if decode_s is None or token_s is None or self._pace.max_decode_slowdown == math.inf:
            return None
        fixed_s = 0.0
        if (few := self._few.means()) is not None:
            token_s = few.seconds / few.num_tokens
            if (many := self._many.means()) is not None:
                slope = (many.seconds - few.seconds) / (many.num_tokens - few.num_tokens)
                token_s = max(slope, _MIN_SLOPE * many.seconds / many.num_tokens)
            fixed_s = few.seconds - few.num_tokens * token_s  # less than 0, if the first are cheap
        spare_s = (self._pace.max_decode_slowdown - 1) * decode_s
        paying_s = min(_MAX_PAYING * spare_s - fixed_s, fixed_s)
        num_in_time = max(spare_s - fixed_s, paying_s) / token_s
        return max(int(num_in_time), least_tokens(queue, self._config))

    @property
    def is_late_after_s(self) -> float | None:
        """Say when the steps in flight take too long, in seconds; None: nobody can say.

        That is ten times what they take by what was learned, which neither a machine that is busy
        nor a prompt that is long beyond all before it makes steps take.
        """
        # Those that compute nothing may wait for the disk, if alone.
        if not any(plan.num_scheduled_tokens for plan in self._in_flight):
            return None
        expected_s = self._expected_s()
        return None if expected_s is None else max(SILENT_AFTER_S, _LATE_FACTOR * expected_s)

    @property
    def next_due_s(self) -> float:
        """When the next step should go out, by the clock of `sent` and `answered`; -inf: at once.

        Not long before it can begin, so that what comes meanwhile is in it, not behind it.
        """
        expected_s = self._expected_s()
        if not self._in_flight or expected_s is None:
            return -math.inf
        expected_s *= self._share_alone.value or 1.0
        return self._began_s + expected_s - max(_LEAD_S, expected_s / _LEAD_PART)

    def _expected_s(self) -> float | None:
        """Say how long the steps in flight take together; None: nobody can say."""
        expected_s = 0.0
        for plan in self._in_flight:
            num_prompt_tokens = plan.num_scheduled_tokens - plan.num_decodes
            decode_s, token_s = self._decode_step_s(plan.num_decodes), self._token_s.value
            if (
                (plan.num_decodes and decode_s is None)
                or (num_prompt_tokens and token_s is None)
                or len(plan.swap_in_src_block_ids)  # takes what the bus takes
            ):
                return None
            if num_prompt_tokens > _FEW_TOKENS and self._prompt_token_s.value is not None:
                token_s = min(token_s or 0.0, self._prompt_token_s.value)  # a few pay for the step
            expected_s += decode_s or 0.0 if plan.num_decodes else 0.0
            expected_s += num_prompt_tokens * (token_s or 0.0)
        return expected_s

    def sent(self, plan: Plan, now_s: float) -> None:
        """Note that a step goes out."""
        if not self._in_flight:
            self._began_s = now_s
        self._in_flight.append(plan)

    def answered(self, execute_s: float, now_s: float) -> None:
        """Note how long the worker took for the oldest step that is in flight."""
        plan = self._in_flight.popleft()
        alone_s, self._began_s = now_s - self._began_s, now_s
        if execute_s <= 0:
            return
        self._share_alone.add(min(1.0, alone_s / execute_s))
        num_prompt_tokens = plan.num_scheduled_tokens - plan.num_decodes
        if not num_prompt_tokens:
            if plan.num_decodes:
                size = plan.num_decodes.bit_length()
                self._decode_s.setdefault(size, _Average()).add(execute_s)
            return
        beside_s = (self._decode_step_s(plan.num_decodes) or 0.0) if plan.num_decodes else 0.0
        # A token takes some time, even where the step's noise says otherwise.
        added_s = max(execute_s - beside_s, 0.05 * execute_s)
        self._token_s.add(added_s / num_prompt_tokens)
        if num_prompt_tokens > _FEW_TOKENS:
            self._many.add(num_prompt_tokens, added_s)
            # A decode's token is as much arithmetic as a prompt's. What decodes take by themselves
            # is not subtracted: where it is wrong, a step could become far too long.
            self._prompt_token_s.add(execute_s / plan.num_scheduled_tokens)
        elif plan.num_decodes:
            self._few.add(num_prompt_tokens, added_s)

    def _decode_step_s(self, num_decodes: int) -> float | None:
        """Seconds of a step with so many decodes, or with what is nearest to it; None: unknown."""
        if not self._decode_s:
            return None
        size = num_decodes.bit_length()
        return self._decode_s[min(self._decode_s, key=lambda known: abs(known - size))].value


class _Average:
    """Of what was seen lately."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._num_seen = 0

    def add(self, seen: float) -> None:
        self._num_seen += 1
        if self.value is None:
            self.value = seen
            return
        weight = max(_WEIGHT, 1 / self._num_seen)
        self.value += weight * (min(seen, _MAX_JUMP * self.value) - self.value)


class _Fastest:
    """Of what was seen lately: much makes a step slower, and nothing faster than it can be."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, seen: float) -> None:
        if self.value is None or seen < self.value:
            self.value = seen
        else:
            self.value += _WEIGHT * (min(seen, _MAX_JUMP * self.value) - self.value)


class _Means(NamedTuple):
    num_tokens: float
    seconds: float


class _Added:
    """What prompts add to steps of a kind."""

    def __init__(self) -> None:
        self._num_tokens = _Average()
        self._seconds = _Average()

    def means(self) -> _Means | None:
        if self._num_tokens.value is None or self._seconds.value is None:
            return None
        return _Means(self._num_tokens.value, self._seconds.value)

    def add(self, num_tokens: int, added_s: float) -> None:
        self._num_tokens.add(num_tokens)
        self._seconds.add(added_s)
