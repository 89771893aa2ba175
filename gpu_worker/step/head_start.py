"""How long a CPU computes nothing after a step, so that its first tokens get through.

A token passes worker, scheduler and router on the cores that the next step takes. With two cores
and a model whose prompt takes 65 ms, a first token was with its client 5.2 ms after it was drawn,
and with a head start 3.1 to 3.6 (medians of 21 prompts, by a script). Each token after it passes
while the next one is computed, which takes longer: only the first one is waited for.
"""

from typing import Final

from contract.arrays import Int64Array
from gpu_worker.step.rows import ScheduledRows

HEAD_START_S: Final = 0.002
"""About the processor time of all those processes for one token."""
_LEAST_LEN: Final = 30
"""Times a head start that a step must have taken, which costs a thirtieth at most."""


def head_start_s(scheduled: ScheduledRows, num_prompt: Int64Array, execute_s: float) -> float:
    """Say how long nothing should be computed after a step.

    Args:
        scheduled: What the step computed. Where others decode, they would wait: 0.
        num_prompt: int64[R]: the length of each row's prompt. Behind it is the first token.
        execute_s: How long the step took, in seconds.
    """
    has_decodes = bool(scheduled.num_decodes or scheduled.num_drafting)
    if has_decodes or execute_s < _LEAST_LEN * HEAD_START_S:
        return 0.0
    sampled = scheduled.rows[scheduled.sampling]
    return HEAD_START_S if (scheduled.positions == num_prompt[sampled]).any() else 0.0
