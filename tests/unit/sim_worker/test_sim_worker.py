"""The simulated worker as a process: its settings, its time, its tokens, many in one."""

import asyncio
import json
import tempfile
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from contract.codec.packing import pack_int32, unpack_int32
from gpu_worker.weights.json_fields import ModelError
from quire.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.settings import parse_settings
from sim_worker.app import find_vocabulary, run_sim_workers
from sim_worker.draw import Script, TokenSource, splitmix
from sim_worker.settings import SimWorkerSettings
from sim_worker.time_model import TimeModel


@pytest.fixture
def folder():
    # pytest's own temporary paths can be longer than a socket's may be.
    with tempfile.TemporaryDirectory(prefix="q-") as path:
        yield Path(path)


def settings(folder, **changes):
    values = {"uds": folder / "worker.sock", "http_port": 0, "worker_id": "sim"}
    return SimWorkerSettings(**(values | changes))


async def generate(target, count, seed=1, **sampling):
    """Attach and run one sequence; return the worker and the tokens."""
    async with open_channel(target) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        info = (await stub.Attach(worker_pb2.AttachRequest(epoch=1))).worker
        call = stub.Execute()
        new = worker_pb2.NewSequence(
            row=0,
            token_ids=pack_int32([2, 3]),
            num_prompt_tokens=2,
            block_ids=pack_int32(list(range(4))),
            sampling=common_pb2.SamplingParams(seed=seed, **sampling),
            max_total_tokens=2 + count,
        )
        chunk = {"chunk_rows": pack_int32([0]), "chunk_lens": pack_int32([2])}
        await call.write(worker_pb2.StepBatch(epoch=1, step_id=1, new_sequences=[new], **chunk))
        tokens = []
        for step_id in range(2, count + 2):
            result = await call.read()
            tokens += unpack_int32(result.sampled_token_ids, "sampled_token_ids").tolist()
            if step_id <= count:
                await call.write(worker_pb2.StepBatch(epoch=1, step_id=step_id, num_decodes=1))
        call.cancel()
        return info, tokens


async def run_and(drive, given):
    """Run the process, `drive` it, and stop it; return the result of `drive`."""
    stop, answers = asyncio.Event(), []

    async def on_started(addresses):
        answers.append(await drive(addresses))
        stop.set()

    await run_sim_workers(given, on_started=on_started, stop=stop)
    return answers[0]


async def test_many_workers_are_one_process(folder):
    async def drive(addresses):
        targets = [f"unix:{folder}/worker-{i}.sock" for i in range(5)]
        assert addresses.grpc == targets[0]
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"http://{addresses.http}/ready") as response,
        ):
            assert response.status == 200
        return await asyncio.gather(*(generate(target, 6) for target in targets))

    answers = await run_and(drive, settings(folder, count=5, speedup=100.0))
    assert [info.worker_id for info, _ in answers] == [f"sim-{i}" for i in range(5)]
    assert len({tuple(tokens) for _, tokens in answers}) == 1, "a worker of its own tokens"
    assert len(answers[0][1]) == 6


async def test_a_worker_alone_has_the_name_and_socket_it_is_given(folder):
    async def drive(addresses):
        return addresses.grpc, await generate(addresses.grpc, 1)

    target, (info, _) = await run_and(drive, settings(folder))
    assert target == f"unix:{folder}/worker.sock"
    assert info.worker_id == "sim"
    assert (info.num_blocks, info.block_size, info.block_bytes) == (26_000, 16, 16 * 131_072)
    assert info.model.id == "simulated"
    assert (info.model.vocab_size, info.model.max_model_len) == (32_000, 8192)


async def test_lower_tiers_are_reported(folder):
    given = settings(folder, host_kv_memory_gb=1.0, disk_kv_memory_gb=4.0, disk_gb_s=7.0)
    info, _ = await run_and(lambda addresses: generate(addresses.grpc, 1), given)
    assert (info.num_host_blocks, info.num_disk_blocks) == (512, 2048)  # of 2 MiB
    assert not info.takes_kv
    assert (info.swap_bytes_per_s, info.disk_bytes_per_s) == (50e9, 7e9)
    # 8.2e12 operations of 512 tokens at 5e14 per second
    assert info.prefill_tokens_per_s == pytest.approx(512 / 0.016384)


async def test_steps_take_the_modelled_time(folder):
    async def drive(addresses):
        loop = asyncio.get_running_loop()
        started = loop.time()
        await generate(addresses.grpc, 4)
        return loop.time() - started

    # 2 GB of weights at 100 GB/s: 20 ms a step
    given = settings(folder, params_b=1.0, bandwidth_gb_s=100.0)
    assert await run_and(drive, given) >= 0.08


async def test_sequences_end_by_an_end_token_if_configured(folder):
    given = settings(folder, eos_token_ids=(7,), mean_output_len=1.0, speedup=1e6)

    async def drive(addresses):
        free = await generate(addresses.grpc, 1)
        held = await generate(addresses.grpc, 1, min_tokens=1)
        ignoring = await generate(addresses.grpc, 1, ignore_eos=True)
        return [tokens for _, tokens in (free, held, ignoring)]

    free, held, ignoring = await run_and(drive, given)
    assert free == [7]
    assert held != [7]
    assert ignoring == held


def test_the_mean_output_length_is_kept():
    source = TokenSource(100, (7,), 20.0)
    positions = np.arange(20_000)
    tokens = source.draw(np.full(20_000, 3, np.uint64), positions, np.ones(20_000, np.bool_))
    assert 850 < (tokens == 7).sum() < 1150
    tokens = source.draw(np.full(20_000, 3, np.uint64), positions, np.zeros(20_000, np.bool_))
    assert 7 not in tokens
    assert len(set(tokens.tolist())) == 99


def test_the_generator_is_splitmix():
    # the reference implementation's first outputs for seed 1234567
    outputs = splitmix(np.full(3, 1234567, np.uint64), np.arange(3))
    assert outputs.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_a_step_is_bound_by_memory_or_by_arithmetic():
    model = TimeModel(1e9, 1000, 1e12, 1e14)
    assert model.step_s(0, 0) == 0
    assert model.step_s(1, 0) == pytest.approx(0.002)  # 2 GB at 1 TB/s
    assert model.step_s(1, 10**6) == pytest.approx(0.003)  # and 1 GB of KV
    assert model.step_s(0, 0, 10**9, 10**9) == 0  # swaps take no time unless a rate is given
    swapping = TimeModel(1e9, 1000, 1e12, 1e14, swap_bytes_per_s=1e12)
    assert swapping.step_s(1, 0, 10**9) == pytest.approx(0.003)  # out before it computes
    # swap-ins overlap with computation
    assert swapping.step_s(1, 0, 0, 10**9) == pytest.approx(0.002)
    assert swapping.step_s(1, 0, 0, 10**10) == pytest.approx(0.01)
    assert model.step_s(1000, 1000) == pytest.approx(0.02)  # 2e12 operations at 1e14 per second


def write_model(folder, config, generation=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_models_vocabulary_is_read_and_flags_go_before_it(tmp_path):
    config = {"vocab_size": 99, "eos_token_id": 5, "max_position_embeddings": 77}
    model = write_model(tmp_path, config, {"eos_token_id": [5, 6]})
    found = find_vocabulary(SimWorkerSettings(model=model))
    assert (found.vocab_size, found.eos_token_ids, found.max_model_len) == (99, (5, 6), 77)
    given = SimWorkerSettings(model=model, vocab_size=50, eos_token_ids=(8,), max_model_len=1000)
    found = find_vocabulary(given)
    assert (found.vocab_size, found.eos_token_ids, found.max_model_len) == (50, (8,), 1000)


def test_a_model_s_old_tokenizer_is_not_converted_for_its_vocabulary(tmp_path):
    model = write_model(tmp_path, {"vocab_size": 99, "max_position_embeddings": 77})
    (model / "tokenizer.model").write_text("no tokenizer")
    cache = tmp_path / "cache"
    found = find_vocabulary(SimWorkerSettings(model=model, cache_dir=cache))
    assert found.vocab_size == 99
    assert not cache.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_ids": (9,), "vocab_size": 9}, r"eos-token-ids has 9; ids must be in \[0, 8\]"),
        ({"mean_output_len": 5.0}, "mean-output-len is set; that needs --model or --eos-token-ids"),
        (
            {"vocab_size": 1, "eos_token_ids": (0,)},
            "vocab-size is 1; it must exceed the number of end",
        ),
        ({"model": Path("/nothing")}, "model is '/nothing': there is no such directory"),
    ],
)
def test_a_recording_that_cannot_be_simulated_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        find_vocabulary(SimWorkerSettings(**changes))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "must be at least max_num_seqs"),
        (["--grpc-port", "0", "--count", "2"], "grpc_port is 0; 2 workers need that many ports"),
        (["--speedup", "0"], "--speedup: 0"),
        (["--disk-kv-memory-gb", "1"], "disk_kv_memory_gb is 1.0; it must be 0 without host_kv"),
        (["--eos-token-ids", "x"], "--eos-token-ids: x"),
    ],
)
def test_a_bad_flag_exits_with_two(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_settings(SimWorkerSettings, "quire-sim-worker", argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_flags_are_parsed():
    argv = ["--eos-token-ids", "1,2", "--count", "3", "--grpc-port", "7000", "--speedup", "2.5"]
    given = parse_settings(SimWorkerSettings, "quire-sim-worker", argv)
    assert given.eos_token_ids == (1, 2)
    assert [given.of_worker(i).grpc_port for i in range(3)] == [7000, 7001, 7002]


def test_a_script_plays_the_output_of_the_prompts_number_of_end_tokens():
    script = Script([[5, 6], [7]], (1, 2))

    def played(*prompt, num=4):
        return [script.token(np.array(prompt, np.int32), i) for i in range(num)]

    assert played(9, 9) == [5, 6, 1, 1]
    assert played(9, 1, 9) == [7, 1, 1, 1]
    assert played(1, 9, 2) == [5, 6, 1, 1]  # from the beginning again


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("[", {"eos_token_ids": (1,)}, "cannot be read"),
        ("[1]", {"eos_token_ids": (1,)}, "cannot be read"),
        ("[[1], [9]]", {"eos_token_ids": (1,), "vocab_size": 9}, "token ids below 9"),
        ("[[1]]", {}, "needs --model or --eos-token-ids"),
    ],
)
async def test_a_script_that_cannot_be_played_is_refused(folder, text, flags, message):
    path = folder / "script.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=message):
        await run_sim_workers(settings(folder, script=path, **flags))


async def test_a_worker_plays_its_script(folder):
    path = folder / "script.json"
    path.write_text("[[5, 6]]")
    stop, started = asyncio.Event(), asyncio.Event()

    async def on_started(_):
        started.set()

    options = settings(folder, script=path, eos_token_ids=(1,), speedup=1000)
    running = asyncio.create_task(run_sim_workers(options, on_started=on_started, stop=stop))
    await started.wait()
    _, tokens = await generate(f"unix:{folder}/worker.sock", 4, ignore_eos=True)
    assert tokens == [5, 6, 1, 1]
    stop.set()
    await running
