"""Refuses a model by its config.json before its weights are fetched and torch is imported."""

from typing import Final

from gpu_worker.models.bert.config import BERT_ARCHITECTURES, read_bert_config
from gpu_worker.models.deepseek.config import DEEPSEEK_ARCHITECTURES, read_deepseek_config
from gpu_worker.models.gpt_oss.config import GPT_OSS_ARCHITECTURE, read_gpt_oss_config
from gpu_worker.models.layer_norm.config import (
    LAYER_NORM_ARCHITECTURES,
    read_layer_norm_config,
)
from gpu_worker.models.llama.config import LLAMA_ARCHITECTURES, read_llama_config
from gpu_worker.models.rope import with_long_factors
from gpu_worker.models.text_part import text_part
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError, UnsupportedError, read_json
from gpu_worker.weights.model_config import read_architecture
from gpu_worker.weights.stored.format import check_dequantized, check_mxfp4, read_stored_format
from model_files.locate import Report, find_model

_READERS: Final = {
    **dict.fromkeys(LLAMA_ARCHITECTURES, read_llama_config),
    **dict.fromkeys(DEEPSEEK_ARCHITECTURES, read_deepseek_config),
    **dict.fromkeys(BERT_ARCHITECTURES, read_bert_config),
    GPT_OSS_ARCHITECTURE: read_gpt_oss_config,
    **dict.fromkeys(LAYER_NORM_ARCHITECTURES, read_layer_norm_config),
}


def check_config(settings: WorkerSettings, report: Report) -> None:
    """Raise ModelError for problems that are visible without weights and without torch.

    Loading checks everything else.
    """
    directory = find_model(
        settings.model, settings.cache_dir, report, with_weights=False, with_tokenizer=False
    )
    if not (directory / "config.json").exists():
        return  # loading refuses it
    fields = with_long_factors(
        text_part(read_json(directory / "config.json")), settings.max_model_len
    )
    if settings.model_class not in ("", "transformers"):
        return  # a user's class may read any fields
    read_config = _READERS.get(read_architecture(fields))
    if read_config is None or settings.model_class:
        check_dequantized(fields)
        return
    try:
        config = read_config(fields)
    except UnsupportedError:
        check_dequantized(fields)  # transformers may support the rest
        return
    check_mxfp4(fields)
    read_stored_format(fields)
    if settings.max_model_len is not None and settings.max_model_len > config.max_model_len:
        raise ModelError(
            f"max-model-len is {settings.max_model_len}; {settings.model_id} takes at most"
            f" {config.max_model_len}"
        )
