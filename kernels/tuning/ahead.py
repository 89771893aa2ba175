"""Compiles kernels in several processes, for all configurations that will be measured.

Compiling a configuration takes seconds of one CPU core, and measuring it takes milliseconds of the
GPU. The processes share Triton's cache on the disk with the process that measures, so nothing is
compiled during measurements.
"""

import functools
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

from kernels.triton.configs import DecodeConfig, PrefillConfig, forced
from kernels.tuning.workload import ModelSizes

_DECODE_SEQ_LENS = ((4096, 512), (16,) * 256)
"""Decode workloads, each given by the lengths of its sequences. They are small, but need the same
variants of the kernels as large workloads."""
_PREFILL_CHUNKS = (((64, 64),), ((64, 4096),))


def compile_ahead(
    model: ModelSizes,
    configs: Sequence[DecodeConfig | PrefillConfig],
    device: torch.device,
    num_processes: int,
) -> int:
    """Launch each configuration once; return how many failed. Measuring will report the errors."""
    num_failed = 0
    launch = functools.partial(_launch, model, str(device))
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as processes:
        for done in as_completed([processes.submit(launch, config) for config in configs]):
            num_failed += done.exception() is not None
    return num_failed


def _launch(model: ModelSizes, device: str, config: DecodeConfig | PrefillConfig) -> None:
    from kernels.tuning.candidates import decode_launch, prefill_launch  # noqa: PLC0415  needs Triton

    where = torch.device(device)
    with torch.inference_mode(), forced(config):
        if isinstance(config, DecodeConfig):
            for seq_lens in _DECODE_SEQ_LENS:
                decode_launch(model, seq_lens, where)()
        else:
            for chunks in _PREFILL_CHUNKS:
                prefill_launch(model, chunks, where)()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
