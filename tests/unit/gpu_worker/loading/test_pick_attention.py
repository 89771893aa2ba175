"""The choice of attention code by the operator, or an error that says why it cannot run."""

import sys

import pytest
import torch
from pydantic import ValidationError

from gpu_worker.kv.layer_groups import LayerGroups, one_group
from gpu_worker.loading import checked_model
from gpu_worker.loading.device import pick_attention
from gpu_worker.models.registry import open_model
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError
from kernels import flash_attention, ops
from tests.kernels.test_flash_attention import FakeFlashAttention
from tests.unit.gpu_worker.models.paged_loop import PagedLoop, Sequence, load, random_prompt

HOPPER = torch.device("cuda", 0)


@pytest.fixture
def capability(monkeypatch):
    """A GPU that torch does not have; set `capability[0]`."""
    found = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    return found


def test_triton_is_the_default_on_every_device():
    assert pick_attention("triton", HOPPER) is ops
    assert pick_attention("triton", torch.device("cpu")) is ops


def test_an_older_gpu_and_a_cpu_are_refused(capability):
    capability[0] = (8, 0)
    with pytest.raises(ModelError, match="triton on NVIDIA A100: FlashAttention-3 needs"):
        pick_attention("flash-attention-3", HOPPER)
    with pytest.raises(ModelError, match="it must be triton on cpu"):
        pick_attention("flash-attention-3", torch.device("cpu"))


def test_it_must_be_installed(capability, monkeypatch):
    assert capability
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ModelError, match="flash_attn_interface cannot be imported"):
        pick_attention("flash-attention-3", HOPPER)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "flash-attention-3"}, "with shared_prefix_attention it must be tri"),
        ({"enforce_eager": True}, "enforce_eager is True; with shared_prefix_attention"),
        ({"speculative": "ngram"}, "speculative is ngram; with shared_prefix_attention"),
    ],
    ids=str,
)
def test_prefixes_are_shared_by_our_kernels_in_graphs_of_decodes(settings, message):
    with pytest.raises(ValidationError, match=message):
        WorkerSettings(model="m", shared_prefix_attention=True, **settings)
    assert not WorkerSettings(model="m", **settings).shared_prefix_attention


def test_prefixes_are_not_shared_where_that_would_do_nothing(model_dirs):
    config = load(model_dirs.get("mistral")).config
    with pytest.raises(ModelError, match="must be false on cpu, which has no CUDA graphs"):
        checked_model._check_can_share(config, one_group(2), torch.device("cpu"))
    with pytest.raises(ModelError, match=r"MistralForCausalLM, whose.*windows are \(None, 16\)"):
        checked_model._check_can_share(config, LayerGroups((None, 16), (0, 1)), HOPPER)
    checked_model._check_can_share(config, one_group(2), HOPPER)


def test_a_model_attends_by_the_backend_of_its_pool(model_dirs, monkeypatch):
    monkeypatch.setattr(flash_attention, "_DTYPES", (torch.float32,))
    model = load(model_dirs.get("gpt_neox"))
    fake, prompts = FakeFlashAttention(), [random_prompt(41, seed=1), random_prompt(9, seed=2)]
    by_ours, by_theirs = ([Sequence(each) for each in prompts] for _ in range(2))
    PagedLoop(model, block_size=8).generate(by_ours, 5)
    loop = PagedLoop(model, block_size=8)
    loop.pool.attention = flash_attention.FlashAttention(fake)
    loop.generate(by_theirs, 5)
    assert [each.output for each in by_theirs] == [each.output for each in by_ours]
    assert fake.num_calls > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "flash-attention-3"}, "with batch_invariant it must be triton"),
        ({"shared_prefix_attention": True}, "shared_prefix_attention is True; with batch_inv"),
        ({"model_class": "transformers"}, "model_class is transformers; with batch_invariant"),
        ({"lora": "a=/a"}, "with batch_invariant it must be unset"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2; with batch_invariant it must be"),
        ({"host_kv_codec": "int8"}, "host_kv_codec is int8; with batch_invariant it must not quan"),
        ({"disk_kv_codec": "fp8"}, "disk_kv_codec is fp8; with batch_invariant it must not quan"),
    ],
    ids=str,
)
def test_what_depends_on_the_batch_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        WorkerSettings(_env_file=None, model="m", batch_invariant=True, **settings)
    settings = WorkerSettings(_env_file=None, model="m", batch_invariant=True)
    assert settings.adapter_obstacle == "batch_invariant"


def test_models_that_depend_on_the_batch_are_refused(model_dirs):
    for family in ("llama", "gpt_neox"):
        checked_model._check_batch_invariant(open_model(model_dirs.get(family)).config, HOPPER)
    for family in ("mixtral", "qwen3_moe", "deepseek_v2"):
        config = open_model(model_dirs.get(family)).config
        with pytest.raises(ModelError, match=f"must be false for {config.architecture}"):
            checked_model._check_batch_invariant(config, HOPPER)
    config = open_model(model_dirs.get("llama")).config
    with pytest.raises(ModelError, match="must be false on cpu"):
        checked_model._check_batch_invariant(config, torch.device("cpu"))
