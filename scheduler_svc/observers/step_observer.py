"""What is learned from the steps of one attachment: its rates, its pace, its log, its metrics."""

import time

from contract.step import Plan
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.reports.load import Queues
from scheduler_svc.observers.metrics import EngineMetrics
from scheduler_svc.observers.step_log import StepLog
from scheduler_svc.pacing.pacer import Pace, StepPacer
from scheduler_svc.pacing.rate_meter import RateMeter
from scheduler_svc.workers.stream import TimedResult


class StepObserver:
    """Follows the steps as they are sent and answered, each in the same order."""

    def __init__(self, metrics: EngineMetrics, config: SchedulerConfig, pace: Pace) -> None:
        self.meter = RateMeter(config.busy_step_tokens)
        self.pacer = StepPacer(pace, config)
        self.log = StepLog()
        self._metrics = metrics

    def sent(self, plan: Plan, queues: Queues, started_s: float) -> float:
        """Note that a step goes out.

        Args:
            plan: The step.
            queues: The core's, right after planning.
            started_s: When planning began, by `time.perf_counter`.

        Returns:
            How long it took to plan and send, in seconds.
        """
        # Before the pacer knows, its bound is caution: a fraction of what there may be time for.
        bound = self.pacer.max_prompt_tokens if self.pacer.knows_prompts else None
        self.meter.sent(plan, bound)
        self.log.sent(plan, queues)
        self.pacer.sent(plan, time.monotonic())
        took_s = time.perf_counter() - started_s
        self._metrics.schedule.observe(took_s)
        self._metrics.step_tokens.observe(plan.num_scheduled_tokens)
        return took_s

    def answered(self, timed: TimedResult, update_s: float) -> None:
        """Note the result of the oldest step in flight, which took `update_s` to apply."""
        execute_s = timed.result.execute_s
        self._metrics.update.observe(update_s)
        self.meter.answered(execute_s)
        self.log.answered(execute_s, timed.rpc_s, time.time())
        self.pacer.answered(execute_s, time.monotonic())
        self._metrics.step_rpc.observe(timed.rpc_s)
        self._metrics.step_execute.observe(execute_s)
