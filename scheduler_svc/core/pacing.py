"""Learns how long a worker's steps take, and limits the prompt tokens of the next step.

A step returns the tokens of all its sequences when the whole step ends. So a prompt in the step
delays every decoding sequence of the step. The operator sets the *allowed time*, by which prompts
may lengthen a step (`Pace`). The limit is the number of prompt tokens that fit in the allowed time.
The pacer learns three durations from the steps:

- the time of a step that only decodes, by the number of sequences
- the time per prompt token, from steps with many prompt tokens
- the fixed cost of having any prompt tokens in a step, from steps with few; the fixed cost includes
  reading the KV of all earlier tokens

The limit of a step with decodes is never below any of these numbers:

- the number of tokens that take as long as the fixed cost, so that at most half of the time that
  prompts add is fixed cost; fewer if these tokens and the fixed cost together would take more than
  `_MAX_PAYING` times the allowed time
- `least_tokens`, so that prompts do not queue up
- the tokens that the device computes almost for free (`SchedulerConfig.min_prompt_tokens`)

The pacer's estimates also determine when to send the next step, and when a step is so late that its
worker may hang.

The comment of each constant gives its reason; "chosen" means that there is no measurement. All
measurements were made on a CPU (docs/performance.md).
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from contract.step import Plan
from scheduler_svc.core.interface.config import SchedulerConfig

# --- how many prompt tokens a step may have -----------------------------------------------------

_MIN_TOKENS = 4
"""The least that `least_tokens` returns. Measured: beside eight decodes, four prompt tokens are
almost free, and sixteen cost nine tenths of a step ("Long prompts beside streams")."""
_FULL_SLOWDOWN = 1.4
"""The default of `--max-decode-slowdown`. With this value or a higher one, a step with decodes may
always have `SchedulerConfig.min_prompt_tokens` prompt tokens. With a lower value, the step may
always have proportionally fewer, so that an operator can get shorter steps. Chosen."""
_WORTH_TOKENS = 128
"""Lower bound of `max_prompt_tokens`, on any device. Derived: each step reads the weights, which
takes as long as computing some 16 tokens. In a step of 128 tokens, reading the weights adds only an
eighth to the time of the computation."""
_MAX_PAYING = 2.0
"""The prompts of a step may take up to this multiple of the allowed time, so that the fixed cost of
having prompts in a step is not spent on only a few tokens. Measured: a long prompt raises the p99
of the time between tokens to 1.41 times the p99 before the prompt. The factor was 2.28 when the
fixed cost did not count towards this limit ("Long prompts beside streams")."""
_LONG_STEPS = 256
"""A step may always compute 1 / 256 of all queued prompt tokens, even if it then takes longer than
the pace allows. Chosen, to keep queues of prompts from growing."""
_MANY_DECODES = 16
"""Beside at least this many decodes, short prompts are spread over several steps. Measured, in
comparison with all prompts in one step: at 8 streams, spreading gave 0.87 of the throughput. At 32
streams, three measurements gave 0.96, 0.89 and 0.96 of the throughput, and 0.63 to 0.73 of the time
to the first token."""
_SHORT_STEPS = 16
"""Number of steps over which short prompts are spread beside many decodes. Chosen: with
fewer steps, each step would take longer, so decodes would get their tokens at longer intervals."""
_WORTHWHILE_PART = 8
"""Beside many decodes, a step may compute 1 / 8 of `SchedulerConfig.busy_step_tokens` for short
prompts, even if it then takes longer than the pace allows. Measured at 32 streams, where 1 / 8 was
64 tokens, in comparison with two other limits. At 32 tokens, the streams' first tokens came later.
At 128 tokens, the throughput was 1.02 times as high, and the p99 of the time between tokens 1.53
times as long."""
_FIRST_SHARE = 3 / 8
"""Beside few decodes, a burst of short prompts is computed in two steps. After the first step, this
share of all sequences, decodes included, has its first token. Measured at 8 streams, in
comparison with one step: 0.84 of the time to the first token, 1.00 of the throughput, and 1.08 of
the p99 between tokens."""

# --- how observed steps count -------------------------------------------------------------------

_FEW_TOKENS = 64
"""From steps with more prompt tokens than this, the pacer learns the time per prompt token. From
the other steps with prompts, it learns the fixed cost of having any prompt tokens in a step.
Chosen."""
_WEIGHT = 1 / 8
"""Weight of a new observation in the moving average. Chosen."""
_MAX_JUMP = 2.0
"""An observation counts as at most this multiple of the average. Chosen, since other work on the
machine can make a single step slow."""
_MIN_SLOPE = 0.5
"""The slope is the time that one more prompt token adds. It counts as at least this share of the
average time per prompt token. Chosen, since noise can make the measured slope too small."""
_MIN_ADDED_PART = 0.05
"""Lower bound of the time that prompts add to a step, as a share of the step's time. Chosen,
because noise can make the measured time negative."""

# --- when steps are sent, and when they are late ------------------------------------------------

_LEAD_S = 0.02
"""The lead: the next step is sent this long before the step in flight is expected to end. The lead
leaves time to plan and send the step, and allows for a step that ends early. Measured together with
`_LEAD_PART`, in comparison with sending at once: at 8 streams, 0.98 of the time to the first token
and 1.01 of the throughput; at 32 streams, 0.90 of the time to the first token and 1.00 of the
throughput. The two values themselves were chosen."""
_LEAD_PART = 4
"""The lead is at least 1 / 4 of the time that the steps in flight are expected to take, because the
end of a long step is harder to predict."""
_LATE_FACTOR, _LEAST_LATE_S = 10, 1.5
"""Steps in flight are late after `_LATE_FACTOR` times their expected time, but at the earliest
after `_LEAST_LATE_S` seconds. Chosen, not measured, so that a step is not late only
because the machine is busy or a prompt is very long."""


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """The prompt tokens left to compute, and the number of sequences that decode."""

    num_decoding: int
    """Sequences expected to decode in the next step."""
    num_tokens: int
    """Uncomputed tokens of prompts that are running or could be admitted."""
    num_short_tokens: int
    """The part of `num_tokens` that belongs to short prompts."""
    num_short: int
    """Number of short prompts."""


def least_tokens(queue: PromptQueue, config: SchedulerConfig) -> int:
    """Return how many prompt tokens a step may have even if it takes longer than the pace allows.

    Beside many decodes, short prompts are spread over several steps: each step delays the decodes a
    little, and the first prompts get their first tokens before the last prompts are computed.
    Beside few decodes, short prompts are computed in one step. They are computed in two steps if
    they clearly outnumber the decodes, and if short prompts and decodes together are fewer than
    `_MANY_DECODES`.
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
    """The operator's limits on the time of a step that has prompts; infinity: no limit."""

    max_decode_slowdown: float = math.inf
    """Longest time of a step with decodes, as a multiple of its time without prompts."""
    max_prompt_step_s: float = math.inf
    """Longest time of any step, in seconds."""


class StepPacer:
    """Limits the prompt tokens of one worker's steps."""

    def __init__(self, pace: Pace, config: SchedulerConfig) -> None:
        self._pace = pace
        self._config = config
        self._first_tokens = config.busy_step_tokens
        """The limit on the prompt tokens of a step until there is a measurement."""
        share = min(1.0, (pace.max_decode_slowdown - 1) / (_FULL_SLOWDOWN - 1))
        self._min_tokens = int(share * config.min_prompt_tokens)
        """Number of prompt tokens that a step with decodes may always have."""
        self._decode_s: dict[int, _Average] = {}
        """Seconds of a step that only decodes, by the bit length of the number of decodes."""
        self._token_s = _Average()
        """Seconds that a prompt token adds to a step."""
        self._prompt_token_s = _Fastest()
        """Seconds per token, decodes included, in steps with many prompt tokens."""
        self._many = _Added()
        """Time that many prompt tokens add to a step."""
        self._few = _Added()
        """Time that a few prompt tokens add to a step with decodes."""
        self._in_flight: deque[Plan] = deque()
        self._began_s = 0.0
        """When the oldest step in flight began, as an estimate."""
        self._share_alone = _Average()
        """The time between the previous step's result and a step's own result, as a share of the
        time that the worker reports for the step. On a GPU, this share is below 1, because the
        reported time includes the wait for the previous step."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """The limit on the prompt tokens of the next step, with or without decodes.

        None: only the step's token budget limits them.
        """
        # The rate of steps with few prompt tokens is less exact; it errs on the slow side.
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
        """Whether a step with many prompt tokens has been observed."""
        return self._prompt_token_s.value is not None

    def max_paced_tokens(self, queue: PromptQueue) -> int | None:
        """Return the limit on the prompt tokens of the next step if it has decodes.

        None: no limit, or no measurements yet.
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
            fixed_s = few.seconds - few.num_tokens * token_s  # negative if first tokens are cheap
        spare_s = (self._pace.max_decode_slowdown - 1) * decode_s
        paying_s = min(_MAX_PAYING * spare_s - fixed_s, fixed_s)
        num_in_time = max(spare_s - fixed_s, paying_s) / token_s
        return max(int(num_in_time), least_tokens(queue, self._config), self._min_tokens)

    @property
    def is_late_after_s(self) -> float | None:
        """Seconds after which the steps in flight are late; None: unknown."""
        # A step without tokens may wait for the disk.
        if not any(plan.num_scheduled_tokens for plan in self._in_flight):
            return None
        expected_s = self._expected_s()
        return None if expected_s is None else max(_LEAST_LATE_S, _LATE_FACTOR * expected_s)

    @property
    def next_due_s(self) -> float:
        """When to send the next step, on the clock of `now_s` arguments; -inf: at once.

        The next step is held back until shortly before the steps in flight are expected to end. So
        requests that arrive until then can still become part of the next step.
        """
        expected_s = self._expected_s()
        if not self._in_flight or expected_s is None:
            return -math.inf
        expected_s *= self._share_alone.value or 1.0
        return self._began_s + expected_s - max(_LEAD_S, expected_s / _LEAD_PART)

    def _expected_s(self) -> float | None:
        """Return the seconds that the steps in flight take together; None: unknown."""
        expected_s = 0.0
        for plan in self._in_flight:
            num_prompt_tokens = plan.num_scheduled_tokens - plan.num_decodes
            decode_s, token_s = self._decode_step_s(plan.num_decodes), self._token_s.value
            if (
                (plan.num_decodes and decode_s is None)
                or (num_prompt_tokens and token_s is None)
                or len(plan.swap_in_src_block_ids)  # depends on the unmeasured speed of the bus
            ):
                return None
            if num_prompt_tokens > _FEW_TOKENS and self._prompt_token_s.value is not None:
                # In large steps a token costs less, because its share of the fixed cost is small.
                token_s = min(token_s or 0.0, self._prompt_token_s.value)
            expected_s += decode_s or 0.0 if plan.num_decodes else 0.0
            expected_s += num_prompt_tokens * (token_s or 0.0)
        return expected_s

    def on_sent(self, plan: Plan, now_s: float) -> None:
        """Record that a plan was sent."""
        if not self._in_flight:
            self._began_s = now_s
        self._in_flight.append(plan)

    def on_result(self, execute_s: float, now_s: float) -> None:
        """Learn from the time that the worker took for the oldest step in flight."""
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
            # A decode's token costs as much arithmetic as a prompt's. The time of the decodes is
            # not subtracted, because an error in it could make steps far too long.
            self._prompt_token_s.add(execute_s / plan.num_scheduled_tokens)
        elif plan.num_decodes:
            self._few.add(num_prompt_tokens, added_s)

    def _decode_step_s(self, num_decodes: int) -> float | None:
        """Return the seconds of a step with about `num_decodes` decodes; None: unknown."""
        if not self._decode_s:
            return None
        size = num_decodes.bit_length()
        return self._decode_s[min(self._decode_s, key=lambda known: abs(known - size))].value


class _Average:
    """A moving average of observations."""

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
    """A moving minimum of recent observations, because noise makes steps slower, never faster."""

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
    """Averages over steps of one kind: number of prompt tokens, and seconds that they add."""

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
