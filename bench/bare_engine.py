"""Runs the engine without a service: scheduler core and worker in one process, no router, no gRPC.

    echo '{"num_prompts": 32, "concurrency": 8}' | python bench/bare_engine.py --model DIR

Each line of standard input is a round: a closed loop over the scheduler's core and the worker's
step loop, as `workers.session` and `gpu_worker.service.api` drive them, two steps in flight. Plans
and results are encoded and decoded as they are between processes, but they travel nowhere. No text
is made, and there is no client: what `one_service.py` has besides is what serving costs. For each
round, a line says how many tokens per second it produced. The flags are the worker's.
"""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import count, islice

import numpy as np
import uvloop
from grpc_load import draw_prompts, sampling_of
from load import Workload

from gpu_worker.loading.worker_model import load
from gpu_worker.loop import StepLoop
from gpu_worker.service.step_wire import step_input_from_proto, step_output_to_proto
from gpu_worker.service.worker_info import WorkerInfo
from gpu_worker.settings import WorkerSettings
from gpu_worker.step.messages import StepOutput
from quire.v1 import worker_pb2
from rpc.observe import logs
from rpc.settings import parse_settings
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.reports.load import read_prompts
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.pacing.pacer import Pace, StepPacer
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.wire.worker import plan_to_proto, result_from_proto

_EPOCH = 1
_ATTACHMENT = 0
_SOURCE = SourceId(0)
_SWITCH_INTERVAL_S = 1e-4
"""As in `rpc.server.run`."""


class BareEngine:
    """The engine: requests in, counts of tokens out."""

    def __init__(self, info: WorkerInfo, steps: StepLoop) -> None:
        """`steps` has been attached."""
        self._limits = info.limits
        self._steps = steps
        self._core = Scheduler(
            SchedulerConfig(
                num_blocks=info.limits.num_blocks,
                block_size=info.limits.block_size,
                max_num_seqs=info.limits.max_num_seqs,
                max_num_batched_tokens=info.limits.max_num_batched_tokens,
                max_model_len=info.limits.max_model_len,
                num_saturating_tokens=info.limits.num_saturating_tokens,
            )
        )
        self._pacer = StepPacer(
            Pace(SchedulerSettings().max_decode_slowdown, SchedulerSettings().max_prompt_step_s),
            self._core.config,
        )
        self._seq_keys = count()

    async def output_tok_s(self, workload: Workload, concurrency: int) -> float:
        """Complete all prompts of a workload, at most `concurrency` at once."""
        prompts = draw_prompts(workload)
        sampling = sampling_of(workload).SerializeToString()
        requests = (self._request(prompt, sampling, workload.output_len) for prompt in prompts)
        started = time.perf_counter()
        num_tokens = await self._complete(requests, concurrency)
        return num_tokens / (time.perf_counter() - started)

    def _request(self, prompt: Sequence[int], sampling: bytes, max_tokens: int) -> Request:
        return Request(
            source=_SOURCE,
            first_seq_key=SeqKey(next(self._seq_keys)),
            request_id="",
            prompt_token_ids=np.array(prompt, np.int32),
            n=1,
            max_tokens=max_tokens,
            sampling=sampling,
        )

    async def _complete(self, requests: Iterator[Request], concurrency: int) -> int:
        """Give the number of tokens produced."""
        num_tokens = 0
        in_flight: deque[asyncio.Future[StepOutput]] = deque()
        self._submit(islice(requests, concurrency))
        while True:
            # At once, unlike a session: nothing comes but by the results.
            while (plan := self._schedule()) is not None:
                self._pacer.sent(plan, time.monotonic())
                in_flight.append(self._launch(plan))
            if not in_flight:
                return num_tokens
            message = step_output_to_proto(await in_flight.popleft(), _EPOCH).SerializeToString()
            result = result_from_proto(
                worker_pb2.StepResult.FromString(message), 0, self._limits.max_num_seqs
            )
            self._pacer.answered(result.execute_s, time.monotonic())
            news = self._core.update(result.outcome)
            num_tokens += len(news.token_ids)
            self._submit(islice(requests, len(news.finished)))

    def _schedule(self) -> StepPlan | None:
        bound = self._pacer.max_paced_tokens(read_prompts(self._core))
        return self._core.schedule(time.monotonic(), bound, self._pacer.max_prompt_tokens)

    def _submit(self, requests: Iterator[Request]) -> None:
        for request in requests:
            self._core.submit(request, time.monotonic())

    def _launch(self, plan: StepPlan) -> "asyncio.Future[StepOutput]":
        message = plan_to_proto(plan, _EPOCH, step_id_base=0).SerializeToString()
        batch = worker_pb2.StepBatch.FromString(message)
        return self._steps.submit(_ATTACHMENT, step_input_from_proto(batch, self._limits))


async def _main(settings: WorkerSettings) -> None:
    loop = asyncio.get_running_loop()
    loaded = await asyncio.to_thread(load, settings, lambda *_: None, loop)
    info, steps = loaded.info, loaded.steps
    await steps.attach(_ATTACHMENT)
    engine = BareEngine(info, steps)
    workload_fields = {field.name for field in fields(Workload)}
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            values = {"model": info.model_id, "input_len": 128, "output_len": 64} | json.loads(line)
            workload = Workload(**{k: v for k, v in values.items() if k in workload_fields})
            tok_s = await engine.output_tok_s(workload, values["concurrency"])
            print(json.dumps({"output_tok_s": tok_s}), flush=True)
    finally:
        await steps.stop()


if __name__ == "__main__":
    parsed = parse_settings(WorkerSettings, "bench/bare_engine.py")
    logs.configure("warning", parsed.log_format, "bare-engine")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    uvloop.run(_main(parsed))
