"""Services whose model is a class of transformers, or of the user."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.generation import generate_request, read_aio
from tests.e2e.references import NUM_TOKENS, greedy_tokens
from tests.e2e.service import Service
from tests.models_fixture import ModelDirs

DOCS = Path(__file__).parents[2] / "docs/models.md"
GEMMA2 = {
    "head_dim": 16,
    "sliding_window": 20,
    "attn_logit_softcapping": 0.5,
    "tie_word_embeddings": True,
    "num_hidden_layers": 6,
    "initializer_range": 0.02,
}
PROMPTS = [[(7 * i + 31 * j) % 490 + 5 for i in range(length)] for j, length in enumerate((1, 45))]


async def _generate(service: Service) -> list[list[int]]:
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        streams = [
            stub.Generate(generate_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True))
            for prompt in PROMPTS
        ]
        results = await asyncio.gather(*map(read_aio, streams))
    return [result.outputs[0] for result in results]


def _example(directory: Path) -> Path:
    """The package that docs/models.md shows."""
    [source] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    package = directory / "my_models"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "gpt2.py").write_text(source)
    return directory


@pytest.mark.parametrize("kind", ["transformers", "mine"])
async def test_greedy_tokens_equal_transformers(
    kind: str, model_dirs: ModelDirs, run_dir: Callable[[], Path], tmp_path: Path
):
    if kind == "mine":
        model_dir = model_dirs.get("gpt2", tie_word_embeddings=True)
        flags = ["--model-class=my_models.gpt2:Gpt2"]
        env = {"PYTHONPATH": str(_example(tmp_path))}
    else:
        model_dir, flags, env = model_dirs.get("gemma2", **GEMMA2), [], {}
    expected = greedy_tokens(model_dir, PROMPTS)
    with Service(run_dir(), model_dir, worker=["--num-blocks=64", *flags], env=env) as service:
        await asyncio.to_thread(service.use_scheduler, "--max-prefill-chunk=16")
        assert await _generate(service) == expected
