"""How the pacer and the rate meter learn from the same steps."""

from scheduler_svc.core.pacing import Pace
from scheduler_svc.core.reports.load import Queues
from scheduler_svc.observers.steps import AnsweredStep, PacingObserver, SentStep
from tests.unit.scheduler_svc.core.test_pacing import GPU, plan_of


def observer_after(*steps):
    """Steps are (prompt tokens, decodes, seconds)."""
    observer = PacingObserver(GPU, Pace(max_prompt_step_s=2.0))
    for num_prompt_tokens, num_decodes, execute_s in steps:
        plan = plan_of(num_prompt_tokens, num_decodes)
        observer.on_sent(SentStep(plan, 0, Queues(1, 0, 0), 0.0))
        observer.on_answered(AnsweredStep(0, execute_s, execute_s, 0.0, 0.0))
    return observer


def test_a_step_that_is_small_out_of_caution_is_no_step_at_full_speed():
    """Else the scheduler refuses deadlines that it can meet: this device does 20,000 tokens/s."""
    observer = observer_after((1, 0, 0.02))
    assert observer.pacer.max_prompt_tokens == 128, "out of caution"
    assert observer_after((1, 0, 0.02), (128, 0, 0.02)).meter.rates.prefill_tokens_per_s is None


def test_a_step_that_has_all_that_there_is_time_for_tells_of_full_speed():
    observer = observer_after((128, 0, 4.0), (128, 0, 4.0))
    assert observer.meter.rates.prefill_tokens_per_s == 32.0
