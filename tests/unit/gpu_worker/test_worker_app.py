import asyncio
import json
from dataclasses import replace

import aiohttp
import grpc
import grpc.aio
import numpy as np
import pytest
import torch
from fake_model import VOCAB_SIZE, FakeModel, FakePool

from contract.codec.packing import pack_int32, unpack_int32
from contract.worker_limits import Limits
from gpu_worker.app import StepsFailedError, run_worker
from gpu_worker.kv.layout import block_bytes
from gpu_worker.loading import device, kv_memory
from gpu_worker.memory import available as memory
from gpu_worker.models.registry import open_model
from gpu_worker.settings import WorkerSettings
from gpu_worker.step.executor import Executor
from gpu_worker.weights.json_fields import ModelError
from quire.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.settings import parse_settings
from tests.models_fixture import make_model

GIB = 1024**3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


def settings(model, tmp_path, **changes):
    values = {
        "model": model,
        "uds": tmp_path / "worker.sock",
        "http_port": 0,
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": 20,
        "num_threads": 1,
    }
    return WorkerSettings(_env_file=None, **(values | changes))


async def generate(target, prompt, count):
    async with open_channel(target) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        info = (await stub.Attach(worker_pb2.AttachRequest(epoch=1))).worker
        call = stub.Execute()
        sequence = worker_pb2.NewSequence(
            row=0,
            token_ids=pack_int32(prompt),
            num_prompt_tokens=len(prompt),
            block_ids=pack_int32(list(range(4))),
            sampling=common_pb2.SamplingParams(seed=1, temperature=0, ignore_eos=True),
            max_total_tokens=len(prompt) + count,
        )
        step = worker_pb2.StepBatch(
            epoch=1,
            step_id=1,
            new_sequences=[sequence],
            chunk_rows=pack_int32([0]),
            chunk_lens=pack_int32([len(prompt)]),
        )
        tokens = []
        for step_id in range(2, count + 2):
            await call.write(step)
            result = await call.read()
            tokens += unpack_int32(result.sampled_token_ids, "sampled_token_ids").tolist()
            step = worker_pb2.StepBatch(epoch=1, step_id=step_id, num_decodes=1)
        return info, tokens


async def test_a_worker_serves_a_model_and_ends_at_a_signal(model, tmp_path):
    stop = asyncio.Event()
    seen = {}

    async def drive(addresses):
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"http://{addresses.http}/ready") as response,
        ):
            seen["ready"] = response.status
        seen["info"], seen["tokens"] = await generate(addresses.grpc, [5, 6, 7, 8], 12)
        stop.set()

    await run_worker(settings(model, tmp_path), on_started=drive, stop=stop)
    assert seen["ready"] == 200
    assert seen["tokens"] == expected_tokens(model, [5, 6, 7, 8], 12)
    info = seen["info"]
    assert (info.model.id, info.model.vocab_size, info.model.max_model_len) == ("tiny", 500, 512)
    assert (info.num_blocks, info.block_size, info.max_num_seqs) == (20, 16, 64)
    assert (info.max_num_batched_tokens, info.num_saturating_tokens) == (2048, 512)
    assert info.block_bytes == block_bytes(open_model(model).config, 16, torch.float32)
    assert (info.device, info.dtype) == ("cpu", "float32")


async def test_a_worker_reports_its_lower_tiers_and_their_rates(model, tmp_path):
    stop = asyncio.Event()
    seen = []

    async def drive(addresses):
        info, _ = await generate(addresses.grpc, [5, 6, 7, 8], 2)
        seen.append(info)
        stop.set()

    tiers = {"host_kv_memory_gb": 0.01, "disk_kv_memory_gb": 0.02, "disk_kv_dir": tmp_path}
    await run_worker(settings(model, tmp_path, **tiers), on_started=drive, stop=stop)
    (info,) = seen
    assert info.num_host_blocks == int(0.01 * GIB) // info.block_bytes
    assert info.num_disk_blocks == int(0.02 * GIB) // (-(-info.block_bytes // 4096) * 4096)
    assert min(info.swap_bytes_per_s, info.prefill_tokens_per_s, info.disk_bytes_per_s) > 0


async def test_a_worker_with_quantized_kv_serves_with_more_blocks(model, tmp_path):
    stop = asyncio.Event()
    seen = []

    async def drive(addresses):
        seen.append(await generate(addresses.grpc, [5, 6, 7, 8], 12))
        stop.set()

    changes = {"kv_cache_dtype": "int8", "num_blocks": None, "kv_cache_memory_gb": 0.01}
    changes["host_kv_memory_gb"] = 0.01
    await run_worker(settings(model, tmp_path, **changes), on_started=drive, stop=stop)
    ((info, tokens),) = seen
    config = open_model(model).config
    assert info.block_bytes == block_bytes(config, 16, torch.int8)
    assert info.num_blocks == info.num_host_blocks == int(0.01 * GIB) // info.block_bytes
    assert info.num_blocks > 3 * (0.01 * GIB // block_bytes(config, 16, torch.float32))
    assert len(tokens) == 12


async def test_a_layer_that_is_not_there_is_refused(model, tmp_path):
    changes = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": "0,2"}
    problem = "kv-cache-dtype-skip-layers is 0,2; the layers of tiny are 0 to 1"
    with pytest.raises(ModelError, match=problem):
        await run_worker(settings(model, tmp_path, **changes))


async def test_a_worker_with_a_failed_device_notifies_its_scheduler_and_ends(
    model, tmp_path, monkeypatch
):
    def fail(*_):
        raise torch.AcceleratorError("device-side assert")

    async def drive(addresses):
        monkeypatch.setattr(Executor, "collect", fail)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(addresses.grpc, [5, 6, 7, 8], 1)
        assert caught.value.code() is grpc.StatusCode.INTERNAL

    with pytest.raises(StepsFailedError, match="the device failed: device-side assert"):
        await run_worker(settings(model, tmp_path), on_started=drive)


def expected_tokens(model, prompt, count):
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


async def test_a_worker_that_is_stopped_while_it_loads_stops(model, tmp_path):
    stop = asyncio.Event()
    stop.set()

    async def never(addresses):
        raise AssertionError(f"ready at {addresses}")

    await run_worker(settings(model, tmp_path), on_started=never, stop=stop)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 513}, "max-model-len is 513; tiny takes at most 512"),
        ({"num_blocks": None, "kv_cache_memory_gb": 1e-9}, "KV memory is 0.000 GiB; one block"),
    ],
)
async def test_unsupported_settings_end_the_start(model, tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        await run_worker(settings(model, tmp_path, **changes))


async def test_a_directory_without_a_model_ends_the_start(tmp_path):
    with pytest.raises(ModelError, match=r"there is no such directory"):
        await run_worker(settings(tmp_path / "nothing", tmp_path))


def test_a_step_must_have_room_for_all_rows(capsys, tmp_path):
    argv = ["--model", str(tmp_path), "--max-num-seqs", "8", "--max-num-batched-tokens", "4"]
    with pytest.raises(SystemExit):
        parse_settings(WorkerSettings, "quire-worker", argv)
    assert "max_num_batched_tokens is 4; it must be at least max_num_seqs, 8" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:1"])
def test_an_unknown_device_is_refused(capsys, tmp_path, name):
    with pytest.raises(SystemExit):
        parse_settings(WorkerSettings, "quire-worker", ["--model", str(tmp_path), "--device", name])
    assert f"--device: {name}" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ModelError, match=r"device is cuda:99; this machine has \d+ GPUs"):
        device.pick_device("cuda:99")


def test_auto_dtype_is_the_checkpoints_unless_the_cpu_is_slow_in_it(tmp_path, monkeypatch, model):
    fields = json.loads((model / "config.json").read_text())
    fields.pop("torch_dtype", None)
    configs = {}
    for name in ("float32", "float16", "bfloat16"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields | {"dtype": name}))
        configs[name] = open_model(tmp_path / name).config
    cpu = torch.device("cpu")
    for library, features, fast in [
        (None, {}, torch.float32),
        (None, {"avx512_bf16": True}, torch.bfloat16),
        ("kernels in C", {}, torch.bfloat16),
    ]:
        monkeypatch.setattr(device, "native", lambda library=library: library)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda features=features: features)
        assert device.pick_dtype("auto", configs["float32"], cpu) is torch.float32
        assert device.pick_dtype("auto", configs["float16"], cpu) is torch.float32
        assert device.pick_dtype("auto", configs["bfloat16"], cpu) is fast
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with_experts = replace(configs["bfloat16"], experts="which torch computes")
    assert device.pick_dtype("auto", with_experts, cpu) is torch.float32
    of_another_kind = open_model(tmp_path / "bfloat16", "transformers").config
    assert device.pick_dtype("auto", of_another_kind, cpu) is torch.float32
    assert device.pick_dtype("auto", configs["float16"], torch.device("cuda")) is torch.float16
    assert device.pick_dtype("bfloat16", configs["float32"], cpu) is torch.bfloat16


def test_cpu_kv_memory_is_a_gibibyte_or_half_of_what_is_free(monkeypatch):
    monkeypatch.setattr(kv_memory, "available_bytes", lambda: 10 * GIB)
    assert kv_memory.free_cpu_kv_bytes() == GIB
    monkeypatch.setattr(kv_memory, "available_bytes", lambda: GIB)
    assert kv_memory.free_cpu_kv_bytes() == GIB // 2


def test_available_memory_is_the_least_of_machine_and_cgroup(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   4096 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_bytes() == 4096 * 1024
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() == 4096 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory.available_bytes() == 4000


def test_blocks_in_rounds_down_and_refuses_none():
    assert kv_memory.blocks_in(999, 100) == 9
    with pytest.raises(ModelError):
        kv_memory.blocks_in(99, 100)
    with pytest.raises(ModelError):
        kv_memory.blocks_in(-5, 100)


@pytest.mark.parametrize(("max_num_seqs", "max_model_len"), [(6, 40), (6, 3), (1, 40), (30, 2)])
def test_the_largest_step_is_one_that_the_worker_takes(max_num_seqs, max_model_len):
    limits = Limits(max_num_seqs, max_model_len, 32, 0, 4, VOCAB_SIZE)
    step = kv_memory.largest_step(limits)
    blocks = np.concatenate([new.block_ids for new in step.new_sequences])
    assert sorted(blocks.tolist()) == list(range(len(blocks)))
    pool = FakePool(len(blocks), limits.block_size)
    limits = replace(limits, num_blocks=len(blocks))
    output = Executor(FakeModel(), pool, limits, (), torch.device("cpu")).step(step)
    assert len(output.sampled_rows) == max_num_seqs
    assert output.num_computed_tokens == max_num_seqs * min(32 // max_num_seqs, max_model_len - 1)
