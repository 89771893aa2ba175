"""Fixtures of the router's tests: small tokenizers made on the spot."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
from router_fake_scheduler import FakeScheduler
from router_tokenizers import byte_level_bpe

from router.live.usage import UsageCounts
from router.request.cells import Cells
from router.request.inference import Inference
from router.request.shared_admission import SharedAdmission
from router.schedulers.link import LinkConfig
from router.schedulers.pool import Schedulers
from router.text.tokenizer import Tokenizers, load_tokenizer
from rpc.health import Health
from rpc.peers.discovery import Discovery

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def bpe() -> tokenizers.Tokenizer:
    return byte_level_bpe()


@pytest.fixture(scope="session")
def model_dir(bpe: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    bpe.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@dataclass
class Router:
    """The router's inference service, connected to a fake scheduler."""

    inference: Inference
    cells: Cells
    scheduler: FakeScheduler
    health: Health
    ready: asyncio.Event
    usage: UsageCounts

    def tokens(self, text: str) -> list[int]:
        return self.inference.text._tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
async def router(model_dir: Path, tmp_path: Path) -> AsyncIterator[Router]:
    scheduler = FakeScheduler(tmp_path / "s")
    await scheduler.start()
    health = Health()
    ready = asyncio.Event()
    health.on_change(lambda: ready.set() if health.ready else ready.clear())
    tokenizers = Tokenizers(load_tokenizer(model_dir))
    client = Schedulers(
        Discovery([scheduler.target]),
        LinkConfig(router_id="test", max_message_mb=4),
        tokenizers=tokenizers,
        health=health,
    )
    task = asyncio.create_task(client.run())
    usage = UsageCounts()
    shared = SharedAdmission(3, usage=usage)
    inference = Inference("tiny", tokenizers, client, shared, tokenizer_threads=1)
    await ready.wait()
    yield Router(inference, Cells([inference], shared), scheduler, health, ready, usage)
    inference.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled(), "the scheduler client broke"
    await scheduler.stop()
