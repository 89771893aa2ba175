"""Models with recurrent layers: outputs equal transformers, whatever happens to their states.

As `test_kv_groups.py`, with states in blocks of the same pool.
"""

import pytest
import torch

from contract.worker_limits import STATE_WINDOW
from gpu_worker.loading.rank_model import load_rank_model
from gpu_worker.models.transformers import scans
from gpu_worker.parallel.member import Member
from gpu_worker.settings import WorkerSettings
from scheduler_svc.core.interface.request import SourceId
from tests.unit.gpu_worker.models.paged_loop import random_prompt
from tests.unit.gpu_worker.test_kv_groups import Service

LINEAR, FULL = "linear_attention", "full_attention"
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", FULL, "conv"]}
FAMILIES = {
    "qwen3_next": EXPERTS | DELTA | {"head_dim": 16, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": DELTA | {"head_dim": 16},
    "qwen3_5_moe_text": EXPERTS | DELTA | {"head_dim": 16, "shared_expert_intermediate_size": 48},
    "olmo_hybrid": DELTA | {"pad_token_id": 0},
    "lfm2": CONV | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONV | EXPERTS | {"num_dense_layers": 1},
    "granitemoehybrid": MAMBA
    | {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "bamba": MAMBA | {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    # Without attention: all layers in one group, which is the only one.
    "mamba": {},
    "falcon_mamba": {},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "jamba": EXPERTS
    | {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "mamba_dt_rank": 4,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48,
    },
}


@pytest.fixture(params=FAMILIES)
def directory(model_dirs, request):
    return model_dirs.get(request.param, **FAMILIES[request.param])


def test_outputs_equal_transformers_whatever_happens(directory):
    """Alone; with prefix hits, forked, in chunks and in a batch; preempted; taken over."""
    service = Service(directory)
    assert service.core.groups.has_states
    first = random_prompt(150, seed=1)
    service.submit(0, first)
    service.run()
    service.check_all()
    service.submit(1, first[:90] + random_prompt(30, seed=2))
    service.submit(2, first + service.outputs[0][:12])  # the conversation goes on
    service.submit(3, random_prompt(50, seed=7), n=2)
    service.submit(5, random_prompt(1, seed=8))
    service.run(18)
    assert service.core.load().prefix_cache_hits > 100
    for seq in list(service.core.running):
        service.core.preemption.preempt(seq)
    service.run(3)
    service.core.cancel(SourceId(0), [5])
    del service.outputs[5]
    service.run(6)
    assert service.core.load().num_swapped_out_blocks
    service.change_scheduler()
    service.run()
    service.check_all()
    tokens = {token for output in service.outputs.values() for token in output}
    assert len(tokens) > 20, "a repetitive model would test little"


@pytest.mark.parametrize(("family", "takes_parts"), [("lfm2", False), ("llama", True)])
def test_a_step_that_has_advanced_some_states_is_not_computed_again(
    model_dirs, family, takes_parts
):
    directory = model_dirs.get(family, **FAMILIES.get(family, {}))
    settings = WorkerSettings(model=str(directory), device="cpu", num_threads=1, num_blocks=64)
    loaded = load_rank_model(Member(settings), lambda *_: None, lambda *_: None)
    assert loaded.executor._model_runner._takes_parts == takes_parts


def test_a_worker_without_attention_has_one_group_of_all_states(model_dirs, tmp_path):
    directory = model_dirs.get("mamba", **FAMILIES["mamba"])
    settings = WorkerSettings(
        model=str(directory),
        device="cpu",
        num_threads=1,
        num_blocks=64,
        host_kv_memory_gb=0.01,
        disk_kv_memory_gb=0.01,
        disk_kv_dir=tmp_path,
        disk_kv_codec="zstd",
    )
    loaded = load_rank_model(Member(settings), lambda *_: None, lambda *_: None)
    assert loaded.limits.kv_windows == (STATE_WINDOW,)
    assert loaded.limits.block_size == settings.block_size
    assert loaded.limits.num_disk_blocks
    inner, num_layers = 112, 2
    assert loaded.block_bytes == num_layers * inner * (16 + 4) * torch.float32.itemsize


def test_in_bfloat16_an_output_does_not_depend_on_what_happens(directory):
    prompts = [random_prompt(length, seed=length) for length in (150, 41, 2)]
    service = Service(directory, torch.bfloat16, num_tokens=24)
    for key, prompt in enumerate(prompts):
        service.submit(key, prompt)
        service.run()
    alone = dict(service.outputs)
    service = Service(directory, torch.bfloat16, num_tokens=24)
    for key, prompt in enumerate(prompts):
        service.submit(key, prompt)
    service.run(9)
    for seq in list(service.core.running):
        service.core.preemption.preempt(seq)
    service.run(9)
    service.change_scheduler()
    service.run()
    assert service.outputs == alone


def test_limits_of_time_steps_hold_for_decodes_as_for_prompts(model_dirs):
    directory = model_dirs.get("mamba2", **FAMILIES["mamba2"], time_step_limit=[0.0, 0.01])
    outputs = []
    for is_preempted in False, True:
        service = Service(directory)
        service.submit(0, random_prompt(41, seed=3))
        service.run(9)
        for seq in list(service.core.running):
            if is_preempted:  # its output is computed again, as a prompt
                service.core.preemption.preempt(seq)
        service.run()
        outputs.append(service.outputs[0])
    assert outputs[0] == outputs[1]


def test_no_bit_of_a_gate_depends_on_other_tokens():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gate = torch.randn(1, 2047, 2 * 1001).chunk(2, dim=2)[1]
        whole = scans._silu(gate)
        for cut in 1, 1023, 2046:
            parts = [scans._silu(gate[:, :cut]), scans._silu(gate[:, cut:])]
            assert torch.equal(torch.cat(parts, dim=1), whole)
    finally:
        torch.set_num_threads(num_threads)
    torch.testing.assert_close(whole, torch.nn.functional.silu(gate))
