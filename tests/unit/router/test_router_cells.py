"""Several models behind one router: each has a fake scheduler and a tokenizer of its own."""

import asyncio
import contextlib
import json

import aiohttp
import grpc
import openai
import pytest
import tokenizers as hf_tokenizers
from keyed_router import CAROL, KEYS, bearer, read_all
from pydantic import ValidationError
from router_fake_scheduler import LENGTH, FakeScheduler

from contract.codec.packing import unpack_int32
from quire.kserve import open_inference_pb2, open_inference_pb2_grpc
from quire.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    loading_pb2,
    loading_pb2_grpc,
)
from router.app import run_router
from router.settings import RouterSettings
from rpc.peers.channel import open_channel

pytestmark = pytest.mark.timeout(60)

A, B = 100, 101
"""Tokens of the letters, in the second model."""


@pytest.fixture
def letters_dir(tmp_path):
    """A model whose tokenizer is another: each letter is a token."""
    letters = {letter: A + place for place, letter in enumerate("abcdefg")}
    model = hf_tokenizers.models.WordLevel({**letters, "[UNK]": 99}, unk_token="[UNK]")
    tokenizer = hf_tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = hf_tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = hf_tokenizers.decoders.Fuse()
    directory = tmp_path / "letters-model"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    )
    return directory


@pytest.fixture
def settings(model_dir, letters_dir, tmp_path):
    return RouterSettings(
        model=model_dir,
        served_model_name="tiny",
        scheduler=(f"unix:{tmp_path / 's1'}",),
        cell=(f"letters={letters_dir}@unix:{tmp_path / 's2'}",),
        uds=tmp_path / "r",
        http_port=0,
        drain_s=5,
        turn_store=str(tmp_path / "turns.sqlite"),
    )


class Cells:
    """A router, its fake schedulers, and clients of it."""

    def __init__(self, channel, url, http, schedulers):
        self.channel = channel
        self.http = http
        self.openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=None
        )
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self.tiny, self.letters = schedulers

    async def ready(self):
        async with self.http.get("/ready") as response:
            return response.status, await response.json()

    async def until(self, **models):
        """Wait until `/ready` reports these states of the models."""
        while True:
            _, body = await self.ready()
            if all(body["models"][name]["ready"] is now for name, now in models.items()):
                return body


@contextlib.asynccontextmanager
async def running(settings, tmp_path, *, has_letters=True):
    schedulers = [FakeScheduler(tmp_path / "s1"), FakeScheduler(tmp_path / "s2")]
    schedulers[1].adapters = ("vowels",)
    await schedulers[0].start()
    if has_letters:
        await schedulers[1].start()
    stop = asyncio.Event()
    addresses = asyncio.get_running_loop().create_future()

    async def on_started(bound):
        addresses.set_result(bound)

    task = asyncio.create_task(run_router(settings, stop, on_started=on_started))
    try:
        url = f"http://{(await addresses).http}"
        async with (
            open_channel(f"unix:{settings.uds}") as channel,
            aiohttp.ClientSession(url) as http,
        ):
            cells = Cells(channel, url, http, schedulers)
            await cells.until(tiny=True, letters=has_letters)
            yield cells
    finally:
        stop.set()
        await task
        for scheduler in schedulers:
            with contextlib.suppress(AttributeError):  # never started
                await scheduler.stop()


@pytest.fixture
async def cells(settings, tmp_path):
    async with running(settings, tmp_path) as cells:
        yield cells


async def answer(scheduler, token):
    """Let a scheduler answer its next request with one token; return the request."""
    submit = await scheduler.submits.get()
    key = submit.first_seq_key
    await scheduler.step({key: [token]}, finished={key: LENGTH}, admitted={key: 0})
    return submit


def prompt_of(submit):
    return unpack_int32(submit.prompt_token_ids, "prompt").tolist()


async def result_of(call, scheduler, token=A):
    """Make a call that a scheduler answers; return its result and the request."""
    calling = asyncio.ensure_future(call)
    submit = await answer(scheduler, token)
    return await calling, submit


async def test_a_request_goes_to_the_schedulers_of_its_model_with_that_models_tokenizer(cells):
    made = cells.openai.completions.create(model="letters", prompt="bad", max_tokens=1)
    completion, submit = await result_of(made, cells.letters, B)
    assert (completion.model, completion.choices[0].text) == ("letters", "b")
    assert prompt_of(submit) == [101, 100, 103]
    messages = [{"role": "user", "content": "cab"}]
    made = cells.openai.chat.completions.create(model="letters", messages=messages, max_tokens=1)
    chat, submit = await result_of(made, cells.letters)
    assert (chat.choices[0].message.content, prompt_of(submit)) == ("a", [102, 100, 101])
    made = cells.openai.responses.create(model="letters", input="ab", max_output_tokens=1)
    response, _ = await result_of(made, cells.letters)
    assert (response.model, response.output_text) == ("letters", "a")
    made = cells.openai.completions.create(model="tiny", prompt="bad", max_tokens=1)
    _, submit = await result_of(made, cells.tiny)
    assert prompt_of(submit) != [101, 100, 103]
    assert cells.letters.submits.empty()


async def test_an_adapter_belongs_to_the_model_that_has_it(cells):
    made = cells.openai.completions.create(model="vowels", prompt="a", max_tokens=1)
    completion, submit = await result_of(made, cells.letters)
    assert (completion.model, submit.sampling.adapter.name) == ("vowels", "vowels")


async def test_a_call_without_a_model_is_for_the_first(cells):
    request = inference_pb2.GenerateOnceRequest(
        request=inference_pb2.GenerateRequest(text="x", sampling={"max_tokens": 1})
    )
    await result_of(cells.stub.GenerateOnce(request), cells.tiny)
    assert cells.letters.submits.empty()


async def test_grpc_calls_choose_by_name(cells):
    request = inference_pb2.GenerateOnceRequest(
        request=inference_pb2.GenerateRequest(
            text="ab", model="letters", sampling={"max_tokens": 1}
        )
    )
    once, _ = await result_of(cells.stub.GenerateOnce(request), cells.letters, B)
    assert once.outputs[0].text == "b"
    tokens = await cells.stub.Tokenize(
        inference_pb2.TokenizeRequest(model="letters", text="ab", add_special_tokens=False)
    )
    assert list(tokens.token_ids) == [A, B]
    text = await cells.stub.Detokenize(
        inference_pb2.DetokenizeRequest(model="letters", token_ids=[B, A])
    )
    assert text.text == "ba"
    cells.tiny.load.num_requests_running, cells.letters.load.num_requests_running = 3, 4
    for model, num_running in (("", 7), ("tiny", 3), ("letters", 4)):
        load = await cells.stub.GetLoad(inference_pb2.GetLoadRequest(model=model))
        assert load.load.num_requests_running == num_running
    kserve = open_inference_pb2_grpc.GRPCInferenceServiceStub(cells.channel)
    ready = await kserve.ModelReady(open_inference_pb2.ModelReadyRequest(name="letters"))
    assert ready.ready


async def test_models_are_listed_with_their_adapters(cells):
    models = {each.id: each async for each in await cells.openai.models.list()}
    assert [*models] == ["tiny", "letters", "vowels"]
    assert models["vowels"].parent == "letters"
    assert (await cells.openai.models.retrieve("vowels")).id == "vowels"
    listed = await cells.stub.ListModels(inference_pb2.ListModelsRequest())
    assert [each.id for each in listed.models] == [*models]


async def test_an_unknown_model_is_refused_with_the_names(cells):
    with pytest.raises(openai.NotFoundError) as refused:
        await cells.openai.completions.create(model="nothing", prompt="a")
    assert refused.value.code == "model_not_found"
    assert "'nothing' is not served; 'tiny', 'letters', 'vowels' are" in str(refused.value)
    with pytest.raises(openai.NotFoundError, match="'tiny', 'letters', 'vowels'"):
        await cells.openai.embeddings.create(model="nothing", input="a")
    with pytest.raises(grpc.aio.AioRpcError, match="'nothing' is not served") as unknown:
        await cells.stub.GetLoad(inference_pb2.GetLoadRequest(model="nothing"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_dead_cell_concerns_only_requests_of_its_model(settings, tmp_path):
    async with running(settings, tmp_path, has_letters=False) as cells:
        status, body = await cells.ready()
        assert (status, body["models"]["tiny"]["ready"]) == (200, True)
        assert body["status"].startswith("ready, but letters: waiting for the scheduler")
        with pytest.raises(openai.InternalServerError, match="not connected") as refused:
            await cells.openai.completions.create(model="letters", prompt="a")
        assert refused.value.status_code == 503
        made = cells.openai.completions.create(model="tiny", prompt="a", max_tokens=1)
        await result_of(made, cells.tiny)
        assert (await cells.stub.GetLoad(inference_pb2.GetLoadRequest())).load.num_workers == 1
        kserve = open_inference_pb2_grpc.GRPCInferenceServiceStub(cells.channel)
        ready = await kserve.ModelReady(open_inference_pb2.ModelReadyRequest(name="letters"))
        assert not ready.ready
        async with cells.http.get("/metrics") as response:
            assert 'quire_cell_num_requests_running{model_name="tiny"}' in await response.text()
        # The scheduler may have the request, so the client must not send it again.
        for model, code in (
            ("", grpc.StatusCode.UNAVAILABLE),
            ("tiny", grpc.StatusCode.NOT_FOUND),
        ):
            asking = cells.stub.Resume(inference_pb2.ResumeRequest(request_id="r", model=model))
            resume = await cells.tiny.resumes.get()
            nothing = grpc.StatusCode.NOT_FOUND
            await cells.tiny.refuse(resume.first_seq_key, nothing, "nothing is known")
            assert await asking.code() is code
        await cells.letters.start()
        await cells.until(letters=True)
        made = cells.openai.completions.create(model="letters", prompt="a", max_tokens=1)
        await result_of(made, cells.letters)


async def test_a_lost_schedulers_request_does_not_move_to_another_model(cells):
    made = asyncio.create_task(
        cells.openai.completions.create(model="letters", prompt="a", max_tokens=1)
    )
    await cells.letters.submits.get()
    await cells.letters.stop()
    await cells.until(letters=False)
    await cells.letters.start()
    submit = await answer(cells.letters, B)
    assert prompt_of(submit) == [A]
    assert (await made).choices[0].text == "b"
    assert cells.tiny.submits.empty()


async def test_a_resumable_request_is_found_at_its_model(cells):
    request = inference_pb2.GenerateRequest(
        text="ab", model="letters", request_id="r", resumable=True, sampling={"max_tokens": 3}
    )
    stream = cells.stub.Generate(request)
    submit = await cells.letters.submits.get()
    key = submit.first_seq_key
    await cells.letters.step({key: [A]}, admitted={key: 0})
    await stream.read()
    resumed = cells.stub.Resume(inference_pb2.ResumeRequest(request_id="r"))
    found = await cells.letters.resumes.get()
    assert found.request_id == "r"
    await cells.letters.resumed(submit, found.first_seq_key)
    key = found.first_seq_key
    await cells.letters.step({key: [A, B]}, finished={key: LENGTH}, admitted={key: 0})
    text = "".join([each.delta.text async for each in resumed])
    assert text == "ab"
    assert cells.tiny.resumes.empty()


async def test_a_resumption_costs_one_request_however_many_models_are_asked(settings, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)  # Carol may make two requests per minute
    carol = {"metadata": bearer(CAROL)}
    async with running(settings.model_copy(update={"api_keys_file": keys}), tmp_path) as cells:
        request = inference_pb2.GenerateRequest(
            text="ab", model="letters", request_id="r", resumable=True, sampling={"max_tokens": 3}
        )
        stream = cells.stub.Generate(request, **carol)
        submit = await cells.letters.submits.get()
        stream.cancel()
        await cells.letters.leaves.get()
        resumed = cells.stub.Resume(inference_pb2.ResumeRequest(request_id="r"), **carol)
        reading = asyncio.create_task(read_all(resumed))
        resume = await cells.tiny.resumes.get()
        nothing = grpc.StatusCode.NOT_FOUND
        await cells.tiny.refuse(resume.first_seq_key, nothing, "nothing is known")
        finding = asyncio.create_task(cells.letters.resumes.get())
        await asyncio.wait([reading, finding], return_when=asyncio.FIRST_COMPLETED)
        assert finding.done(), reading.exception()
        key = finding.result().first_seq_key
        await cells.letters.resumed(submit, key)
        await cells.letters.step({key: [A, B]}, finished={key: LENGTH}, admitted={key: 0})
        await reading


async def test_operators_name_the_model_where_there_are_several(cells):
    adapters = adapters_pb2_grpc.AdapterServiceStub(cells.channel)
    loading = loading_pb2_grpc.LoadingServiceStub(cells.channel)

    async def refused(call):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        return error.value.details()

    wanted = "model is not set; it must be one of 'tiny', 'letters'"
    load = adapters_pb2.LoadAdapterRequest(name="fr", directory="/fr")
    assert await refused(adapters.LoadAdapter(load)) == wanted
    assert await refused(loading.Unload(loading_pb2.UnloadRequest())) == wanted
    watching = kv_pb2_grpc.KvEventServiceStub(cells.channel).WatchKv(kv_pb2.WatchKvRequest())
    assert await refused(watching.read()) == wanted
    load.model = "tiny"
    load.name = "vowels"
    assert "adapter of 'letters'" in await refused(adapters.LoadAdapter(load))
    load.name = "fr"
    await adapters.LoadAdapter(load)
    assert (cells.tiny.adapters, cells.letters.adapters) == (("fr",), ("vowels",))
    listed = await adapters.ListAdapters(adapters_pb2.ListAdaptersRequest())
    assert [each.adapter.name for each in listed.adapters] == ["fr", "vowels"]
    await adapters.UnloadAdapter(adapters_pb2.UnloadAdapterRequest(name="fr"))
    assert cells.tiny.adapters == ()
    await loading.Unload(loading_pb2.UnloadRequest(model="letters"))
    assert (cells.tiny.loading.is_unloaded, cells.letters.loading.is_unloaded) == (False, True)


async def test_kept_turns_and_batches_go_on_at_their_model(settings, tmp_path):
    line = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "letters", "prompt": "ab", "max_tokens": 2},
    }
    async with running(settings, tmp_path) as cells:
        response = await cells.openai.responses.create(
            model="letters", input="ab", max_output_tokens=2, background=True
        )
        await cells.letters.submits.get()
        content = json.dumps(line).encode()
        file = await cells.openai.files.create(file=("f", content), purpose="batch")
        batch = await cells.openai.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
    # The next router finds the other model's scheduler first.
    async with running(settings, tmp_path, has_letters=False) as cells:
        await cells.letters.start()
        for _ in range(2):
            submit = await cells.letters.submits.get()
            key = submit.first_seq_key
            await cells.letters.step({key: [A, B]}, finished={key: LENGTH}, admitted={key: 0})
        while (kept := await cells.openai.responses.retrieve(response.id)).status != "incomplete":
            pass
        assert kept.output_text == "ab"
        while (done := await cells.openai.batches.retrieve(batch.id)).status != "completed":
            pass
        out = json.loads((await cells.openai.files.content(done.output_file_id)).text)
        assert out["response"]["body"]["choices"][0]["text"] == "ab"
        assert out["response"]["body"]["model"] == "letters"
        assert cells.tiny.submits.empty()


async def test_turns_of_a_dead_cell_take_no_room_from_others(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("router.stored_turns.turns._MAX_GROUPED", 1)

    def line(model):
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        return {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": body}

    async with running(settings, tmp_path) as cells:
        await cells.letters.stop()
        await cells.until(letters=False)
        for model in ("letters", "tiny"):
            content = json.dumps(line(model)).encode()
            file = await cells.openai.files.create(file=("f", content), purpose="batch")
            await cells.openai.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
        await answer(cells.tiny, 70)
        await cells.letters.start()
        await answer(cells.letters, A)


def cells_of(model_dir, **flags):
    return RouterSettings(model=model_dir, served_model_name="tiny", **flags).cells


def test_cells_are_parsed(model_dir):
    one, two, three = cells_of(
        model_dir,
        scheduler="h:1,h:2",
        cell=["b=org/b@h:3", f"org/c={model_dir}@unix:/a", "dns:h:4,h:5"],
    )
    assert (one.name, one.schedulers) == ("tiny", ("h:1", "h:2"))
    assert (two.name, two.model, two.schedulers) == ("b", "org/b", ("h:3",))
    assert (three.name, three.model) == ("org/c", str(model_dir))
    assert three.schedulers == ("unix:/a", "dns:h:4", "h:5")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"cell": "b"}, "'b' must be NAME=MODEL@SCHEDULER"),
        ({"cell": "b=org/b"}, "'b=org/b' must be NAME=MODEL@SCHEDULER"),
        ({"cell": "b=org/b@dns:h"}, "dns:h"),
        ({"cell": "tiny=org/b@h:1"}, "tiny: two models have this name"),
        ({"cell": "b=org/b@h:1", "vllm_engine": True}, "--vllm-engine"),
        ({"cell": "b=org/b@h:1", "openengine": True}, "--openengine"),
    ],
)
def test_wrong_cells_are_refused(model_dir, flags, problem):
    with pytest.raises(ValidationError, match=problem):
        cells_of(model_dir, **flags)
