"""Picks a model's device, dtype and attention backend, and the operations that use AMX."""

import importlib
from collections.abc import Sequence
from dataclasses import asdict

import structlog
import torch

from gpu_worker.models.llama.config import LlamaConfig
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.model_config import ModelConfig, resolve_dtype
from kernels import ops
from kernels.cpu.amx_choice import choose_amx
from kernels.cpu.library import native
from kernels.flash_attention import FlashAttention
from kernels.ops import AttentionBackend

_FLASH_ATTENTION = (9, 0)
_ROUNDING_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
"""Torch's names of the CPU features that multiply bfloat16 numbers, on x86 and Arm."""

_log = structlog.get_logger()


def pick_device(name: str, number: int = 0) -> torch.device:
    """Return the device called `name`; "auto" is a GPU, or the CPU if there is no GPU.

    Args:
        name: The setting `device`.
        number: The GPU's number, if `name` has none.

    Raises:
        ModelError: There is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        index = number if device.index is None else device.index
        count = torch.cuda.device_count()
        if index >= count:
            raise ModelError(
                f"device is cuda:{index}; this machine has {count} GPUs that torch can use"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """Return a readable name, such as "cpu" or "NVIDIA H200"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def pick_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in.

    "auto" is the checkpoint's dtype, except on a CPU, where float16 becomes float32. Bfloat16
    stays if the CPU can multiply bfloat16 numbers, or if Quire's kernels in C compute all layers.

    If the CPU cannot multiply bfloat16 numbers, the kernels in C compute in float32, but read
    bfloat16 weights, which are half as many bytes as float32 weights. With kernels compiled for
    AVX2, a linear map of 1 to 256 rows took 0.5 to 0.8 times as long with bfloat16 weights as with
    float32 weights (Zen 5, busy with other work). If torch computes some layers of the model, such
    as experts, bfloat16 becomes float32 on such a CPU, because the speed of torch with bfloat16 was
    not measured.
    """
    dtype: torch.dtype = getattr(torch, resolve_dtype(name, config))
    if name != "auto" or device.type != "cpu" or dtype is torch.float32:
        return dtype
    if dtype is not torch.bfloat16:
        return torch.float32
    features = torch.cpu.get_capabilities()
    is_fast = any(features.get(name) for name in _ROUNDING_FEATURES) or _is_all_in_c(config)
    return torch.bfloat16 if is_fast else torch.float32


def _is_all_in_c(config: ModelConfig) -> bool:
    """Return whether kernels in C compute all of a model's layers."""
    return isinstance(config, LlamaConfig) and config.has_c_layers and native() is not None


def pick_attention(name: str, device: torch.device) -> AttentionBackend:
    """Return the attention backend that the setting `attention_backend` names.

    Raises:
        ModelError: The backend is not installed, or does not run on this device.
    """
    if name == "triton":
        return ops
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FLASH_ATTENTION:
        raise ModelError(
            f"attention_backend is {name}; it must be triton on {device_name(device)}:"
            " FlashAttention-3 needs a GPU with compute capability 9.0"
        )
    try:
        module = importlib.import_module("flash_attn_interface")
    except ImportError as error:
        raise ModelError(
            f"attention_backend is {name}; its module flash_attn_interface cannot be imported:"
            f" {error}"
        ) from None
    return FlashAttention(module.flash_attn_with_kvcache)


def log_kernels(device: torch.device) -> None:
    """Log which library of C kernels is used, if `device` is a CPU.

    Without a library this logs nothing, because the function `native` has already warned.
    """
    library = native() if device.type == "cpu" else None
    if library is None:
        return
    build = library.build
    if build.why_shipped is None:
        _log.info("kernels in C, compiled for this CPU", library=str(build.path))
    else:
        _log.info(
            f"kernels in C, shipped for {build.target.name}",
            library=str(build.path),
            not_compiled=build.why_shipped,
        )


def set_amx(wanted: str, device: torch.device) -> tuple[str, ...]:
    """Decide, as the setting `amx` asks, which operations use Intel's AMX on a CPU, and log why.

    Returns the names of these operations, out of `kernels.cpu.amx_choice.USES`. Call this after
    `set_num_threads` and `pin_threads`, because it measures times, which depend on the threads.
    """
    choice = choose_amx(wanted) if device.type == "cpu" else None
    if choice is None:
        if wanted == "on":
            _log.warning("the setting amx is on, but there is no AMX", device=device.type)
        return ()
    found = choice.findings
    if found is None:
        _log.info("AMX is not used: the setting amx is off")
    elif found.failure is not None:
        _log.warning("AMX is not used: its check failed", failure=found.failure)
    else:
        _log.info(
            f"AMX is {'used' if choice.uses else 'not used'}",
            uses=choice.uses,
            amx=wanted,
            measured=found.date,
            milliseconds={name: asdict(times) for name, times in found.times.items()},
        )
    return choice.uses


def name_arithmetic(device: torch.device, amx_uses: Sequence[str]) -> str:
    """Return, as text, what decides the last bits of results on this device.

    Versions of libraries also decide these bits. They are not in the text, because the caller adds
    them (`gpu_worker.loading.kv_tiers.kv_identity`).

    On a GPU, the text names the GPU's model: libraries choose kernels by it, and Quire chooses
    tiles and the way to multiply fp8.

    On a CPU, it names the instruction sets, the operations that use AMX, and a digest of the
    machine code of Quire's kernels. Torch, oneDNN and Quire's kernels choose the order of sums by
    the instruction sets.
    """
    if device.type != "cpu":
        return repr((device.type, device_name(device)))
    features = torch.cpu.get_capabilities()
    names = [name for name in _ROUNDING_FEATURES if features.get(name)]
    library = native()
    kernels = "torch" if library is None else library.digest
    isa = torch.backends.cpu.get_cpu_capability()
    return repr((device.type, isa, *names, kernels, *amx_uses))
