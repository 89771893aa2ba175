"""Tokenize calls are bounded in size and number, and never delay generation."""

import asyncio
import threading

import pytest
from router_fake_scheduler import MAX_MODEL_LEN

from contract.errors import InvalidArgumentError, TooBusyError, UnimplementedError
from contract.request import GenerateRequest
from contract.sampling import SamplingParams
from router.request.model_text import MAX_QUESTIONS
from router.text.chat_settings import ChatSettings
from router.text.chat_template import ChatTemplate


class SlowTokenizer:
    """Blocks on the text "slow" until a test releases it."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.began, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, *, add_special_tokens=True):
        if text == "slow":
            self.began.set()
            assert self.go_on.wait(30)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def slow(router):
    tokenizers = router.inference.text._tokenizers
    slow = tokenizers.current = SlowTokenizer(tokenizers.current)
    yield slow
    slow.go_on.set()


def most_bytes(router):
    return MAX_MODEL_LEN * router.inference.text._tokenizer.table.max_piece_bytes


async def test_a_text_that_cannot_fit_the_context_is_refused_naming_size_and_limit(router):
    most = most_bytes(router)
    assert await router.inference.text.tokenize("", "x" * most)
    with pytest.raises(InvalidArgumentError) as caught:
        await router.inference.text.tokenize("", "x" * (most + 1))
    assert str(caught.value) == (
        f"text has {most + 1} bytes; at most {most} can fit the model's context of"
        f" {MAX_MODEL_LEN} tokens"
    )


@pytest.mark.parametrize(
    ("num_messages", "words"),
    [(2, "bytes; at most"), (MAX_MODEL_LEN + 1, f"entries; it must have at most {MAX_MODEL_LEN}")],
)
async def test_a_chat_that_cannot_fit_is_refused_before_the_template_sees_it(
    router, monkeypatch, num_messages, words
):
    template = router.inference.text._tokenizer.chat_template
    monkeypatch.setattr(template, "render", lambda *_, **__: pytest.fail("it was rendered"))
    messages = [{"role": "user", "content": "x" * most_bytes(router)}] * num_messages
    for call in (router.inference.text.render_chat, router.inference.text.tokenize_chat):
        with pytest.raises(InvalidArgumentError, match=words):
            await call("", messages)


async def test_too_many_ids_to_detokenize_are_refused(router):
    with pytest.raises(InvalidArgumentError, match=f"at most {MAX_MODEL_LEN}"):
        await router.inference.text.detokenize("", [1] * (MAX_MODEL_LEN + 1))


async def test_slow_tokenizations_are_bounded_and_generation_goes_on_beside_them(router, slow):
    asked = [
        asyncio.create_task(router.inference.text.tokenize("", "slow"))
        for _ in range(MAX_QUESTIONS)
    ]
    while router.inference.text._questions.num_pending < MAX_QUESTIONS:  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(TooBusyError, match=str(MAX_QUESTIONS)):
        await router.inference.text.tokenize("", "hello")
    async with asyncio.timeout(20):
        live = await router.inference.generate(GenerateRequest(prompt="hello"))
        await live.aclose()
        assert await router.inference.text.render_chat("", [{"role": "user", "content": "hi"}])
    slow.go_on.set()
    await asyncio.gather(*asked)
    assert await router.inference.text.tokenize("", "hello")


async def test_tokenizations_that_nobody_waits_for_leave_the_queue(router, slow):
    asked = [asyncio.create_task(router.inference.text.tokenize("", "slow")) for _ in range(3)]
    while router.inference.text._questions.num_pending < len(asked):  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert await asyncio.to_thread(slow.began.wait, 30)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert router.inference.text._questions.num_pending == 1  # the call that has started


@pytest.mark.parametrize(
    ("num_kept", "max_tokens", "num_left"),
    [(3, None, 3), (50, None, 11), (-1, 7, 11), (-1, MAX_MODEL_LEN - 2, 2), (-1, None, 11)],
)
async def test_a_prompt_is_cut_at_its_beginning(router, num_kept, max_tokens, num_left):
    whole = tuple(range(100, 111))
    request = GenerateRequest(
        whole, sampling=SamplingParams(max_tokens=max_tokens), truncate_prompt_tokens=num_kept
    )
    prepared = await router.inference.text.prepare(request)
    assert tuple(prepared.prompt_token_ids) == whole[-num_left:]


async def test_bad_words_are_a_form(router):
    prepared = await router.inference.text.prepare(GenerateRequest("hello", bad_words=("no",)))
    assert "BANNED" in prepared.structured.grammar
    with pytest.raises(InvalidArgumentError, match=r"bad_words\[0\] has 0 characters"):
        await router.inference.text.prepare(GenerateRequest("hello", bad_words=("",)))


async def test_a_template_of_a_request_needs_trust(router):
    with pytest.raises(InvalidArgumentError, match="trust-request-chat-template"):
        router.inference.text.chat_template("", "{{ messages }}")
    router.inference.text._chats = ChatSettings(trust_request_chat_template=True)
    template = router.inference.text.chat_template("", "{{ bos_token }}{{ messages[0].content }}!")
    messages = [{"role": "user", "content": "hi"}]
    assert await router.inference.text.render_chat("", messages, template) == "<s>hi!"
    with pytest.raises(InvalidArgumentError, match="chat_template is malformed"):
        router.inference.text.chat_template("", "{% for %}")


async def test_a_model_without_markers_fills_in_nothing(router):
    with pytest.raises(UnimplementedError, match="no tokens to fill in the middle"):
        router.inference.text.infill("a", "b")


async def test_a_continued_message_is_the_prompts_end(router):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    prompt = await router.inference.text.render_chat("", messages, continue_final_message=True)
    assert prompt.endswith("assistant: Well")
    silent = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidArgumentError, match="does not show the last message"):
        silent.render(messages, continue_final_message=True)
