"""Computes how much KV a sequence holds while it decodes, without and with KV groups.

python bench/kv/groups.py
"""

from gpu_worker.kv.layer_groups import group_layers
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.space.kv_groups import KvGroups

NUM_TOKENS, BLOCK_SIZE, MIB = 8192, 16, 2**20

# Layers, the interval of layers without a window (0: none), window, kv heads, head dim.
MODELS = {
    "Mistral 7B v0.1": (32, 0, 4096, 8, 128),
    "Gemma 2 9B": (42, 2, 4096, 8, 256),
    "Gemma 3 1B": (26, 6, 512, 1, 256),
    "Gemma 3 27B": (62, 6, 1024, 16, 128),
    "gpt-oss 20B": (24, 2, 128, 8, 64),
    "Command R7B (Cohere 2)": (32, 4, 4096, 8, 128),
    "OLMo 3 7B": (32, 4, 4096, 32, 128),
}


def main() -> None:
    print("| model | layers, of them with a window | without groups | with groups |")
    print("|---|---|---|---|")
    for name, (num_layers, full_every, window, num_kv_heads, head_dim) in MODELS.items():
        windows = tuple(
            None if full_every and layer % full_every == full_every - 1 else window
            for layer in range(num_layers)
        )
        layers = group_layers(windows, max_model_len=2**20)
        config = SchedulerConfig(
            num_blocks=2**20,
            block_size=BLOCK_SIZE,
            max_num_seqs=1,
            max_num_batched_tokens=2048,
            max_model_len=2**20,
            kv_windows=layers.windows,
        )
        layer_bytes = BLOCK_SIZE * 2 * num_kv_heads * head_dim * 2  # of a block in bf16
        num_blocks = len(KvGroups(config).kept(NUM_TOKENS))
        before = num_layers * NUM_TOKENS // BLOCK_SIZE * layer_bytes / MIB
        after = num_blocks * layers.layers_per_block * layer_bytes / MIB
        num_windows = sum(each is not None for each in windows)
        print(
            f"| {name} | {num_layers}, {num_windows} of {window:,} | {before:,.0f} MiB |"
            f" {after:,.0f} MiB |"
        )


if __name__ == "__main__":
    main()
