"""Learns how long a worker's steps take, and bounds the prompts of the next step by it.

A step is answered as a whole, so a prompt in it delays every stream that decodes beside it. The
bound is therefore the number of prompt tokens that fit in the time allowed. Three durations are
learned from the steps themselves: how long a step takes that only decodes, by the number of
sequences; how much each prompt token adds, when there are many; and the fixed cost of having any
prompt tokens at all, seen in steps with a few, such as for reading the KV of all tokens before
them. But the bound is never so low that a prompt spends most of its time on the fixed cost, nor so
low that prompts queue up (`least_tokens`).

The same numbers say when the next step should go out, and when a step is so late that its worker
may hang.

Each constant names what it rests on; "chosen" means that no measurement of it is known. All that
were measured were measured on a CPU (docs/performance.md).
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from contract.heartbeat import SILENT_AFTER_S
from contract.step import Plan
from scheduler_svc.core.config import SchedulerConfig

# --- how many tokens of prompts a step may have -------------------------------------------------

_MIN_TOKENS = 4
"""Fewest tokens of prompts in a step. Measured: beside eight decodes four are almost free, and
sixteen cost nine tenths of a step ("Long prompts beside streams")."""
_WORTH_TOKENS = 128
"""Fewest tokens in a step without decodes, however slow. Derived: reading the weights takes as long
as computing some 16 tokens, so that an eighth is lost."""
_MAX_PAYING = 2.0
"""The most time that prompts may add to a step to make their fixed cost worthwhile, as a multiple
of the spare time. Measured, p99 of the time between tokens beside a long prompt: 1.41 times that
without it; 2.28 times before the fixed cost counted towards this bound ("Long prompts beside
streams")."""
_LONG_STEPS = 256
"""All prompts would be done in this many steps if each step computed an equal share of them. A step
may always compute that share, even if it then takes longer than the pace allows. Chosen: it keeps
queues of prompts from growing."""
_MANY_DECODES = 16
"""From so many streams on, short prompts are spread over steps. Measured: spread, eight streams had
0.87 of the throughput, and 32 had 0.96, 0.89 and 0.96 of it but 0.63 to 0.73 of the time to the
first token."""
_SHORT_STEPS = 16
"""Steps over which short prompts are spread, beside many decodes. Chosen: fewer make longer gaps
between tokens."""
_WORTHWHILE_PART = 8
"""Beside many decodes a step has at least this part of what keeps the device busy. Measured at 32
streams, where that is 64 tokens: 32 tokens made first tokens later; 128 had 1.02 times the
throughput, and 1.53 times the p99 between tokens."""
_FIRST_SHARE = 3 / 8
"""Beside a few decodes, a burst of prompts is computed in two steps. This share of the streams gets
its first token in the first step, and then waits while the other prompts are computed. Measured at
8 streams, relative to one step: time to the first token 0.84, throughput 1.00, p99 between tokens
1.08."""

# --- what the steps tell ------------------------------------------------------------------------

_FEW_TOKENS = 64
"""Steps with more prompt tokens than this show what each token costs when there are many; steps
with fewer show what it costs to have any. Chosen."""
_WEIGHT = 1 / 8
"""Weight of a new observation against all before it. Chosen."""
_MAX_JUMP = 2.0
"""An observation counts as at most this many times the average. Chosen; other work on the machine
can make a single step slow."""
_MIN_SLOPE = 0.5
"""The least time that one more token is assumed to add, as a share of what each of many adds.
Chosen; noise can make the measured value smaller."""
_MIN_ADDED_PART = 0.05
"""The least time that prompts are assumed to add, as a part of their step. Chosen; noise can even
make the measured value negative."""

# --- when steps go out, and when they are late --------------------------------------------------

_LEAD_S = 0.02
"""How long before the step in flight ends the next one goes out: time to plan and send it, and for
a step that ends sooner than expected. Measured with `_LEAD_PART`, against sending at once: time to
the first token 0.98 at 8 streams and 0.90 at 32, throughput 1.01 and 1.00. The two values
themselves were chosen."""
_LEAD_PART = 4
"""The lead is at least this part of what the steps in flight take: a long step is harder to
foresee."""
_LATE_FACTOR = 10
"""A step is late after so many times what it should take. Chosen: neither a busy machine nor a
prompt longer than all before it makes a step take as long."""


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """What is left to compute of prompts, and beside how many decodes."""

    num_decoding: int
    """Sequences that decode in the next step, as far as is known."""
    num_tokens: int
    """Tokens of prompts that are being computed, or could be admitted."""
    num_short_tokens: int
    """Those of them that are of short prompts."""
    num_short: int
    """The number of short prompts."""


def least_tokens(queue: PromptQueue, config: SchedulerConfig) -> int:
    """Return how many tokens of prompts a step may have, however long its decodes take.

    Beside many decodes short prompts are spread over some steps: each stream feels them a little,
    and those that come first begin to stream before the last are done. Beside a few decodes they
    are computed at once, or a burst of them in two steps.
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
    """How much longer prompts may make steps; infinity: there is no bound."""

    max_decode_slowdown: float = math.inf
    """Most that a step with decodes may take, in times what it takes without prompts."""
    max_prompt_step_s: float = math.inf
    """Most that any step may take, in seconds."""


class StepPacer:
    """Bounds the prompts of the steps of one worker."""

    def __init__(self, pace: Pace, config: SchedulerConfig) -> None:
        self._pace = pace
        self._config = config
        self._first_tokens = config.busy_step_tokens
        """Tokens of prompts that a step may have before it is known how long they take."""
        self._decode_s: dict[int, _Average] = {}
        """Seconds of a step; the key is the bit length of the number of decoding sequences."""
        self._token_s = _Average()
        """Seconds that a prompt's token adds."""
        self._prompt_token_s = _Fastest()
        """Seconds that each token takes of a step that has many of prompts."""
        self._many = _Added()
        """What many tokens of prompts add to a step."""
        self._few = _Added()
        """What a few tokens of prompts add to a step that decodes, too."""
        self._in_flight: deque[Plan] = deque()
        self._began_s = 0.0
        """When the oldest step in flight began, as far as is known."""
        self._share_alone = _Average()
        """The share of a step's seconds in which it runs alone, after the step before it was
        answered. On a GPU a step's seconds also include its wait for that step."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """The most tokens of prompts that the next step may compute, decodes beside them or not.

        None: as many as a step may have.
        """
        # A few tokens say less of what a step can do than many, but err on the cautious side.
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
        """Whether a step with many tokens of prompts has been seen."""
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
        """Seconds after which the steps in flight are late; None: that cannot be told."""
        # A step that computes nothing may wait for the disk.
        if not any(plan.num_scheduled_tokens for plan in self._in_flight):
            return None
        expected_s = self._expected_s()
        return None if expected_s is None else max(SILENT_AFTER_S, _LATE_FACTOR * expected_s)

    @property
    def next_due_s(self) -> float:
        """When the next step should go out, by the clock of `sent` and `answered`; -inf: at once.

        This is shortly before the step can begin, so that what arrives until then still becomes
        part of it, and need not wait for the step after it.
        """
        expected_s = self._expected_s()
        if not self._in_flight or expected_s is None:
            return -math.inf
        expected_s *= self._share_alone.value or 1.0
        return self._began_s + expected_s - max(_LEAD_S, expected_s / _LEAD_PART)

    def _expected_s(self) -> float | None:
        """Return the seconds that the steps in flight take together; None: that cannot be told."""
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
        """Take a step that goes out."""
        if not self._in_flight:
            self._began_s = now_s
        self._in_flight.append(plan)

    def answered(self, execute_s: float, now_s: float) -> None:
        """Learn from how long the worker took for the oldest step in flight."""
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
        added_s = max(execute_s - beside_s, _MIN_ADDED_PART * execute_s)
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
    """A moving average of what was seen."""

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
    """The least that was seen lately: much makes a step slower than it can be, nothing faster."""

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
    """What prompts add to steps of a kind, on average."""

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
