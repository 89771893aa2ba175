"""How long a CPU computes nothing after a step, so that its first tokens get through.

A token passes worker, scheduler and router on the cores that the next step takes. With two cores
and a model whose prompt takes 65 ms, a first token was with its client 5.2 ms after it was drawn,
and with a head start 3.1 to 3.6 (medians of 21 prompts, by a script). Each token after it passes
while the next one is computed, which takes longer: only the first one is waited for.
"""

from typing import Final

from gpu_worker.rows import ScheduledRows

HEAD_START_S: Final = 0.002
"""About the processor time of all those processes for one token."""
_LEAST_LEN: Final = 30
"""Times a head start that a step must have taken, which costs 3 % at most."""


def head_start_s(scheduled: ScheduledRows, execute_s: float) -> float:
    """Say how long nothing should be computed after a step; 0 where others decode, and would wait.

    Args:
        scheduled: What the step computed.
        execute_s: How long it took, in seconds.
    """
    has_decodes = bool(scheduled.num_decodes or scheduled.num_drafting)
    is_worth_it = execute_s >= _LEAST_LEN * HEAD_START_S
    return HEAD_START_S if is_worth_it and len(scheduled.sampling) and not has_decodes else 0.0
