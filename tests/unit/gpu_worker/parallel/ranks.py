"""Runs models in several processes, as ranks, and in one; returns each one's samples."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import PrefixStore, destroy_process_group

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layout import kv_dtypes
from gpu_worker.lora.adapted_maps import AdaptableConfig
from gpu_worker.lora.adapter_files import load_adapter
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.models.registry import open_model
from gpu_worker.ranks.collectives import Ranks, find_store, open_store
from gpu_worker.ranks.shards import Place
from gpu_worker.step.executor import Executor
from gpu_worker.step.graphs.cuda_graphs import GraphsOfAll
from gpu_worker.weights.quantized_linear import Quantization
from kernels.cpu import linear
from rpc.observe import logs
from tests.unit.gpu_worker.fake_graphs import FakePieces

ADDRESS = "127.0.0.1"
NUM_TOKENS = 64
BLOCK_SIZE = 8
BLOCKS_PER_ROW = 16
SAMPLING = (
    SamplingParams(seed=1, temperature=0.0, ignore_eos=True),
    SamplingParams(seed=2, temperature=0.0, ignore_eos=True, prompt_logprobs=1, logprobs=2),
    SamplingParams(seed=3, temperature=0.0, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(seed=4, temperature=0.8, ignore_eos=True, min_tokens=3, top_k=20),
)
PROMPT_LENS = (5, 40, 17, 1)
ADAPTERS = (1, 0, 2, 1)


@dataclass(frozen=True)
class Case:
    """A model, and the number of ranks that share it."""

    directory: str
    tensor_size: int = 1
    pipeline_size: int = 1
    dtype: str = "float32"
    quantization: str | None = None
    has_graphs: bool = False
    """Whether the ranks replay their steps, decodes whole and others in pieces, from fakes."""
    adapters: Sequence[str] = ()
    """Directories of LoRA adapters, numbered from 1; row i uses adapter `ADAPTERS[i]`."""

    @property
    def alone(self) -> "Case":
        return replace(self, tensor_size=1, pipeline_size=1, has_graphs=False)


def run_ranks(cases: Sequence[Case], num_ranks: int) -> list[list[Any]]:
    """Each rank's samples in each case; all cases have `num_ranks` ranks."""
    store, port = open_store(ADDRESS)
    text = json.dumps([asdict(case) for case in cases])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(rank), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(num_ranks)
    ]
    try:
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write(text)
            process.stdin.close()
        outputs = [json.load(process.stdout) for process in ranks if process.stdout is not None]
        assert [process.wait() for process in ranks] == [0] * num_ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        del store
    return outputs


def run(case: Case, place: Place, ranks: Ranks | None) -> dict[str, Any]:
    """This process's samples: tokens by row, and log-probabilities."""
    torch.set_num_threads(1)
    device, dtype = torch.device("cpu"), getattr(torch, case.dtype)
    quantization = None if case.quantization is None else Quantization(case.quantization)
    source = open_model(Path(case.directory), quantization=quantization, place=place)
    model, config = source.load(dtype, device, lambda _: None, ranks), source.local_config
    num_rows = len(SAMPLING)
    limits = Limits(
        max_num_seqs=num_rows,
        max_model_len=BLOCK_SIZE * BLOCKS_PER_ROW,
        max_num_batched_tokens=128,
        num_blocks=num_rows * BLOCKS_PER_ROW,
        block_size=BLOCK_SIZE,
        vocab_size=config.vocab_size,
    )
    dtypes = kv_dtypes("auto", frozenset(), dtype, config.num_layers)
    pool = KvPool(config, limits.num_blocks, BLOCK_SIZE, dtypes, device)
    patches, graphs, slots = pytest.MonkeyPatch(), None, None
    if case.adapters and case.has_graphs:  # as on a GPU: adapters in slots, and not packed for C
        patches.setattr(linear, "can_pack", lambda _: False)
        assert isinstance(source.config, AdaptableConfig)
        slots = AdapterSlots(source.config, device, place)
    adapters = {
        number: load_adapter(str(number), Path(directory), source.config, dtype, device, place)
        for number, directory in enumerate(case.adapters, 1)
    }
    executor = Executor(
        model, pool, limits, (), device, ranks=ranks, adapters=adapters, slots=slots
    )
    if case.has_graphs and ranks is not None:
        graphs = FakePieces(patches)
        for capture in (executor.capture_decodes, executor.capture_pieces):
            capture(GraphsOfAll(graphs, ranks), lambda _: None, has_adapters=bool(adapters))
    prompts = [np.random.default_rng(n).integers(5, 500, n).astype(np.int32) for n in PROMPT_LENS]
    first = Plan(
        step_id=1,
        num_decodes=0,
        new_sequences=tuple(
            NewSequence(
                seq_id=row,
                row=row,
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                num_computed_tokens=0,
                block_ids=np.arange(BLOCKS_PER_ROW, dtype=np.int32) + row * BLOCKS_PER_ROW,
                sampling=SAMPLING[row],
                max_total_tokens=len(prompt) + NUM_TOKENS,
                adapter=ADAPTERS[row] if adapters else 0,
            )
            for row, prompt in enumerate(prompts)
        ),
        chunk_rows=np.arange(num_rows, dtype=np.int32),
        chunk_lens=np.array(PROMPT_LENS, np.int32),
    )
    decodes = [Plan(step_id=i, num_decodes=num_rows) for i in range(2, NUM_TOKENS + 1)]
    outputs = [executor.step(step) for step in (first, *decodes)]
    patches.undo()
    tokens: list[list[int]] = [[] for _ in prompts]
    for output in outputs:
        for row, token in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            tokens[int(row)].append(int(token))
    return {
        "tokens": tokens,
        "logprobs": [logprob.logprob for output in outputs for logprob in output.logprobs],
        "prompt": [t.logprob for part in outputs[0].prompt_logprobs for t in part.logprobs],
        "block_bytes": pool.block_bytes,
        "num_replays": 0 if graphs is None else graphs.num_replays,
        "num_whole": 0 if graphs is None else graphs.num_parts.count(1),
    }


def main() -> None:
    logs.configure("warning", "console", "rank")  # standard output is for the results
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    store = find_store(ADDRESS, port)
    results = []
    for number, values in enumerate(json.load(sys.stdin)):
        case = Case(**values)
        place = Place(rank, case.tensor_size, case.pipeline_size)
        ranks = Ranks(place, PrefixStore(str(number), store), torch.device("cpu"))
        told = {
            "least": ranks.least(rank + 3, -rank),
            "total": ranks.total(rank, 0.5),
            "any_has": ranks.any_has(np.array([rank == 0, rank == 1, False])).tolist(),
        }
        results.append(run(case, place, ranks) | told)
        destroy_process_group()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
