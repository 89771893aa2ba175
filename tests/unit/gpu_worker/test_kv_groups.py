"""The scheduler and a worker's executor: outputs equal transformers, in every case.

A core plans, the codec carries the plans, and the executor computes them with a small model of each
family whose layers differ in what they see, or store something else than their keys and values, or
whose attention in transformers is replaced.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from contract.codec.sampling import sampling_to_proto
from contract.codec.step import plan_to_proto
from contract.sampling import SamplingParams
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.kv.layout import group_attention, place_states
from gpu_worker.models.registry import open_model
from gpu_worker.service.step_wire import plan_of
from gpu_worker.step.executor import Executor
from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.invariants import check
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.space.kv_groups import KvGroups
from tests.unit.gpu_worker.models.against_transformers import assert_greedy
from tests.unit.gpu_worker.models.paged_loop import CPU, random_prompt

BLOCK_SIZE = 4
NUM_HOST_BLOCKS = 400
SMALL = {"sliding_window": 20, "pad_token_id": 0}
GEMMA = SMALL | {"head_dim": 16, "tie_word_embeddings": True, "initializer_range": 0.02}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LOCAL, FULL = "sliding_attention", "full_attention"
GEMMA_N = GEMMA | {
    "num_hidden_layers": 7,
    "num_kv_shared_layers": 3,
    "layer_types": [LOCAL, LOCAL, FULL, LOCAL, LOCAL, FULL, LOCAL],
    "vocab_size_per_layer_input": 500,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0, 0.0],
}
GEMMA_4 = GEMMA | {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": [LOCAL, LOCAL, LOCAL, FULL, LOCAL, FULL],
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "vocab_size_per_layer_input": 500,
    "hidden_size_per_layer_input": 16,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
MIMO = {
    "num_hidden_layers": 4,
    "layer_types": [FULL, LOCAL, LOCAL, FULL],
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
LLAMA_4 = {
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 0, 1],
    "layer_types": ["chunked_attention", "chunked_attention", FULL, "chunked_attention"],
    "attention_chunk_size": 20,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "head_dim": 16,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 4,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
AFMOE = EXPERTS | {
    "num_experts": 4,
    "num_dense_layers": 1,
    "head_dim": 16,
    "sliding_window": 20,
    "layer_types": [LOCAL, FULL],
    "initializer_range": 0.4,
}
# Each of its layers attends twice; some experts return what they are given.
LONGCAT = {
    "num_layers": 2,
    "num_key_value_heads": 4,
    "ffn_hidden_size": 112,
    "expert_ffn_hidden_size": 48,
    "moe_topk": 3,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}
QWEN2_MOE = (
    EXPERTS  # does not pass its window to its attention
    | {
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    }
)
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512}
OWN_ATTENTION = {
    "bloom": {"n_head": 4, "n_layer": 2, "hidden_size": 96},
    "codegen": GPT | {"rotary_dim": 8, "initializer_range": 0.35},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 20,
    },
    "gptj": GPT | {"rotary_dim": 8},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "openai-gpt": GPT,
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 112},
}
"""Families whose attention does not use the interface of transformers."""
FAMILIES = {
    "mistral": {},
    "phi3": SMALL,
    "gemma2": GEMMA | {"num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    # Twelve groups of a layer each.
    "gemma3_text": GEMMA
    | {"num_hidden_layers": 12, "layer_types": [LOCAL] * 5 + [FULL] + [LOCAL] * 6},
    "gpt_oss": {},
    "cohere2": SMALL | {"num_hidden_layers": 4, "layer_types": [LOCAL] * 3 + [FULL]},
    "olmo3": SMALL | {"num_hidden_layers": 4, "layer_types": [LOCAL] * 3 + [FULL]},
    "ministral": SMALL
    | {"head_dim": 16}
    | {"num_hidden_layers": 3, "layer_types": [LOCAL, FULL, LOCAL], "rope_parameters": ROPE},
    # Layers that read another's KV, and global layers with other heads.
    "gemma3n_text": GEMMA_N,
    "gemma4_text": GEMMA_4,
    "mimo_v2_flash": SMALL | MIMO,
    "llama4_text": LLAMA_4,
    "qwen2": SMALL | {"use_sliding_window": True, "layer_types": [FULL, LOCAL, LOCAL]},
    "afmoe": AFMOE,
    "qwen2_moe": QWEN2_MOE,
    "qwen2_moe, our own": {},
    "qwen3_moe": {},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "glm4_moe": {},
    "olmo2": {},
    "olmoe": {},
    "starcoder2": {},
    "longcat_flash": LONGCAT,
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": ROPE
        | {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        },
    },
    # Latents.
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v3, as Kimi K2": {"n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {},
    "minicpm3": {},
    "youtu": {},
    # Positions that begin behind the padding token. Its outputs are repetitive: others have padding
    # tokens, to which transformers gives no positions.
    "roberta": {"is_decoder": True, "pad_token_id": 1},
    **OWN_ATTENTION,
}


@dataclass
class Service:
    """A core and an executor, without processes."""

    directory: object
    dtype: torch.dtype = torch.float32
    num_tokens: int = 128  # of each output
    outputs: dict[int, list[int]] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)

    def __post_init__(self):
        source = open_model(self.directory)
        config = source.config
        groups = group_attention(config, self.dtype, config.max_model_len)
        block_size = BLOCK_SIZE
        if config.num_states:
            groups, block_size = place_states(config, block_size, self.dtype, groups)
        config_of_core = SchedulerConfig(
            num_blocks=1,
            block_size=block_size,
            kv_windows=groups.windows,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=config.max_model_len,
            max_prefill_chunk=13,
            num_host_blocks=NUM_HOST_BLOCKS,
            watermark=0.0,
            preemption_mode=PreemptionMode.SWAP,
        )
        num_needed = KvGroups(config_of_core).num_needed(200)
        num_blocks = 1 + 6 * num_needed
        self.config = replace(config_of_core, num_blocks=num_blocks)
        self.limits = Limits(
            max_num_seqs=8,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=64,
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=config.vocab_size,
            kv_windows=groups.windows,
            num_host_blocks=NUM_HOST_BLOCKS,
        )
        model = source.load(self.dtype, CPU, lambda _: None)
        pool = KvPool(config, num_blocks, block_size, self.dtype, CPU, groups=groups)
        pool.blocks_as_bytes[0].fill_(255)  # NaN, so that reading the null block shows
        host = HostPool(pool.blocks_as_bytes, NUM_HOST_BLOCKS)
        self.executor = Executor(model, pool, self.limits, (), CPU, host_pool=host)
        self.attach()

    def attach(self):
        """Begin with a new scheduler."""
        self.num_steps = 0
        self.core = Scheduler(self.config)

    def submit(self, key, prompt, n=1):
        sampling = sampling_to_proto(SamplingParams(seed=0, temperature=0.0, ignore_eos=True))
        request = Request(
            SourceId(0),
            SeqKey(key),
            f"r{key}",
            np.array(prompt, np.int32),
            n,
            self.num_tokens,
            sampling.SerializeToString(),
        )
        for each in range(key, key + n):
            self.outputs[each], self.requests[each] = [], request
        self.core.submit(request, 0.0)

    def step(self):
        plan = self.core.schedule(float(self.num_steps))
        check(self.core)
        if plan is None:
            return False
        self.num_steps += 1
        plan = plan_of(plan_to_proto(plan, 1, 0), self.limits)
        self.take(self.core.update(self.executor.step(plan)))
        return True

    def take(self, events):
        for key, token in zip(events.seq_keys.tolist(), events.token_ids.tolist(), strict=True):
            self.outputs[key].append(token)

    def change_scheduler(self):
        """Let a new scheduler take over, to which all live requests are submitted again."""
        live = [
            self.requests[key] for key, out in self.outputs.items() if len(out) < self.num_tokens
        ]
        holdings = self.executor.reset()
        self.attach()
        self.core.inherit(holdings, 0.0)
        for request in {id(request): request for request in live}.values():
            first = request.first_seq_key
            self.outputs.update({key: [] for key in range(first, first + request.n)})
            self.core.submit(request, 0.0)
            if (events := self.core.takeover.take_adopted()) is not None:
                self.take(events)
        check(self.core)

    def run(self, num_steps=10_000):
        for _ in range(num_steps):
            if not self.step():
                break

    def check_all(self):
        for key, output in self.outputs.items():
            request = self.requests[key]
            assert len(output) == request.max_tokens, f"output {key}"
            assert_greedy(self.directory, request.prompt_token_ids.tolist(), output)


@pytest.fixture(params=FAMILIES)
def directory(model_dirs, request):
    return model_dirs.get(request.param.split(",")[0], **FAMILIES[request.param])


def test_outputs_equal_transformers_whatever_happens(directory):
    """Alone; with prefix hits, forked, in chunks and in a batch; preempted; taken over."""
    service = Service(directory)
    first = random_prompt(150, seed=1)
    service.submit(0, first)
    service.run()
    service.check_all()
    service.submit(1, first[:90] + random_prompt(30, seed=2))
    service.submit(2, first + service.outputs[0][:12])  # the conversation goes on
    service.submit(3, random_prompt(50, seed=7), n=2)
    service.run(18)
    assert service.core.load().prefix_cache_hits > 200
    for index, seq in enumerate(list(service.core.running)):
        service.core.preemption.preempt(seq, can_swap=bool(index % 2))
    service.run(9)
    assert service.core.load().num_swapped_in_blocks
    service.change_scheduler()
    service.run()
    assert service.core.load().num_adopted_tokens
    service.check_all()
    tokens = {token for output in service.outputs.values() for token in output}
    assert len(tokens) > 20 or "roberta" in directory.name, "a repetitive model would test little"
