"""The sizes of a step that a worker chooses by its device."""

from types import SimpleNamespace

import pytest
import torch

from gpu_worker.loading import checked_model
from gpu_worker.settings import WorkerSettings

CONFIG = SimpleNamespace(max_model_len=4096, is_encoder=False, vocab_size=100)
GIB = 2**30


@pytest.mark.parametrize(
    ("device", "device_bytes", "flags", "num_seqs", "num_tokens"),
    [
        ("cpu", None, {}, 64, 2048),
        ("cuda", 24 * GIB, {}, 256, 2048),
        ("cuda", 85_899_345_920 - GIB, {}, 512, 8192),  # "80 GB"
        ("cuda", 140 * GIB, {}, 1024, 8192),
        ("cuda", 140 * GIB, {"max_num_batched_tokens": 700}, 700, 700),
        ("cuda", 140 * GIB, {"max_num_seqs": 9000}, 9000, 9000),
        ("cuda", 140 * GIB, {"max_num_seqs": 3}, 3, 8192),
    ],
)
def test_sizes_follow_the_device(
    monkeypatch, tmp_path, device, device_bytes, flags, num_seqs, num_tokens
):
    monkeypatch.setattr(checked_model, "_device_bytes", lambda _: device_bytes)
    settings = WorkerSettings(_env_file=None, model=str(tmp_path), **flags)
    limits = checked_model._limits(settings, CONFIG, torch.device(device))
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (num_seqs, num_tokens)
    busy, least = (512, 0) if device == "cpu" else (min(2048, num_tokens), 256)
    assert (limits.num_saturating_tokens, limits.min_prompt_tokens) == (busy, least)
