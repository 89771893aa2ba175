"""A worker with an encoder, under the scheduler's core: whole prompts, and no KV."""

import numpy as np
import pytest
import torch
from transformers import AutoModel

from contract.codec.info import worker_info_from_proto, worker_info_to_proto
from contract.codec.sampling import sampling_to_proto
from contract.codec.step import plan_to_proto
from contract.pooling import Pooling, PoolingKind, Task
from contract.sampling import SamplingParams
from gpu_worker.loading.rank_model import load_rank_model
from gpu_worker.loading.worker_model import _describe
from gpu_worker.parallel.member import Member
from gpu_worker.service.step_wire import plan_of
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError
from scheduler_svc.app import _configure_core
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.settings import SchedulerSettings
from tests.encoders_fixture import LONGEST, make_encoder


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("encoder"), "BertModel")


def load(directory, **settings):
    flags = {"model": str(directory), "device": "cpu", "dtype": "float32", "num_threads": 1}
    chosen = WorkerSettings(**flags, **settings)
    return chosen, load_rank_model(Member(chosen), lambda *_: None, lambda *_: None)


def test_inputs_are_computed_whole_and_keep_nothing(directory):
    settings, loaded = load(directory, max_num_batched_tokens=LONGEST + 10, max_num_seqs=4)
    info = worker_info_from_proto(worker_info_to_proto(_describe(settings, loaded)))
    assert info.model.abilities.tasks == (Task.EMBED,)
    assert info.model.max_model_len == LONGEST + 1, "with a place for what stands for the vector"
    assert (info.block_bytes, info.takes_whole_prompts) == (0, True)
    assert not loaded.executor._model_runner._takes_parts
    core = Scheduler(_configure_core(SchedulerSettings(workers="unix:/w"), info))
    sampling = SamplingParams(seed=0, max_tokens=1, pooling=Pooling(PoolingKind.MEAN))
    draw = np.random.default_rng(2)
    inputs = [draw.integers(4, 200, n).astype(np.int32) for n in (30, LONGEST, 20, LONGEST, 1)]
    for key, ids in enumerate(inputs):
        core.submit(
            Request(
                source=SourceId(1),
                first_seq_key=SeqKey(key),
                request_id=f"{key}",
                prompt_token_ids=ids,
                n=1,
                max_tokens=1,
                sampling=sampling_to_proto(sampling).SerializeToString(),
                pools=True,
                reads_prefix_cache=False,
            ),
            now=0.0,
        )
    vectors, num_ended, lens = {}, 0, []
    while num_ended < len(inputs):
        plan = core.schedule(0.0)
        lens.append(plan.chunk_lens.tolist())
        owners = {row: core.owner(row) for row in plan.chunk_rows.tolist()}
        result = loaded.executor.step(plan_of(plan_to_proto(plan, 1, 0), info.limits))
        for pooled in result.pooled:
            vectors[owners[pooled.row][1]] = np.frombuffer(pooled.vector, "<f4")
        num_ended += len(core.update(result).finished)
    assert lens == [[30], [LONGEST], [20], [LONGEST, 1]]
    assert core.load().num_free_blocks == core.load().num_blocks
    reference = AutoModel.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        for key, ids in enumerate(inputs):
            hidden = reference(torch.tensor(ids[None].astype(np.int64))).last_hidden_state[0]
            np.testing.assert_allclose(vectors[key], hidden.mean(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"host_kv_memory_gb": 1.0}, "host-kv-memory-gb is 1.0; it must be unset for Bert"),
        ({"speculative": "ngram"}, "speculative is ngram; it must be unset for BertModel"),
        ({"max_num_batched_tokens": 61}, "max-num-batched-tokens is 61; BertModel computes"),
    ],
)
def test_what_an_encoder_cannot_use_is_refused(directory, settings, problem):
    with pytest.raises(ModelError, match=problem):
        load(directory, **settings)
