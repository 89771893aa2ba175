"""The lower tiers that settings ask for: their blocks and codecs, and refused values."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpu_worker import metrics
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layer_groups import LayerGroups
from gpu_worker.loading import checked_model, device, measure_rates, worker_model
from gpu_worker.loading.kv_tiers import kv_identity, open_lower_tiers
from gpu_worker.loading.rank_model import load_rank_model
from gpu_worker.models.registry import open_model
from gpu_worker.parallel.member import Member
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError
from kernels.cpu.build import Build
from kernels.cpu.targets import THIS_CPU
from rpc.settings import parse_settings
from tests.models_fixture import make_model

GIB = 1024**3
PAGE = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture
def open_tiers(model, tmp_path):
    """Opens tiers with room for 100 device blocks on the host, and 200 on the disk."""
    opened = []

    def open_tiers(num_blocks=10, dtypes=torch.bfloat16, **changes):
        config = open_model(model).config
        pool = KvPool(config, num_blocks, 16, dtypes, torch.device("cpu"))
        room = {
            "host_kv_memory_gb": 100 * pool.block_bytes / GIB,
            "disk_kv_memory_gb": 200 * -(-pool.block_bytes // PAGE) * PAGE / GIB,
            "disk_kv_dir": tmp_path,
        }
        settings = WorkerSettings(_env_file=None, model=model, **(room | changes))
        tiers = open_lower_tiers(settings, pool, config)
        opened.append(tiers)
        return pool, config, tiers

    yield open_tiers
    for tiers in opened:
        if tiers.disk_pool is not None:
            tiers.disk_pool.close()


def fill(pool):
    """Random KV."""
    numbers = torch.randn(pool.num_blocks * pool.block_bytes // 2, dtype=torch.bfloat16)
    pool.blocks_as_bytes[:] = numbers.view(torch.uint8).view(pool.num_blocks, -1)
    return pool.blocks_as_bytes.clone()


def there_and_back(tiers):
    """Move blocks 0 to 4 through both tiers, to blocks 9 to 5."""
    host, disk = tiers.host_pool, tiers.disk_pool
    blocks = np.arange(5, dtype=np.int32)
    host.swap_out(blocks, blocks)
    disk.store(blocks, blocks + 50, 1)
    disk.synchronize()
    disk.load(blocks + 50, blocks + 20, 2)
    disk.synchronize()
    ends = disk.take_ended(2)
    assert sorted(ends.loaded.tolist()) == list(range(20, 25))
    host.accept(ends.loaded)
    host.begin_step()
    assert not len(host.swap_in(blocks + 20, 9 - blocks))
    host.begin_step()


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd", "zstd:3", "gzip"])
def test_lossless_tiers_give_back_each_bit(open_tiers, codec):
    pool, _, tiers = open_tiers(disk_kv_codec=codec, kv_checksum=True)
    assert (tiers.num_host_blocks, tiers.num_disk_blocks) == (100, 200)
    before = fill(pool)
    there_and_back(tiers)
    assert torch.equal(pool.blocks_as_bytes[5:].flip(0), before[:5])


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    "dtypes", [torch.int8, (torch.float8_e4m3fn, torch.bfloat16)], ids=["int8", "a layer in fp8"]
)
def test_quantized_kv_comes_back_bit_for_bit(open_tiers, codec, dtypes):
    pool, _, tiers = open_tiers(dtypes=dtypes, disk_kv_codec=codec, kv_checksum=True)
    assert (tiers.num_host_blocks, tiers.num_disk_blocks) == (100, 200)
    assert measure_rates.disk_bytes_per_s(tiers.disk_pool, tiers.host_pool, pool) > 0
    before = pool.blocks_as_bytes.random_(generator=torch.Generator().manual_seed(0)).clone()
    before[:, : pool.block_bytes // 2] = 7  # content that compresses
    pool.blocks_as_bytes[:] = before
    there_and_back(tiers)
    assert torch.equal(pool.blocks_as_bytes[5:].flip(0), before[:5])


@pytest.mark.parametrize(
    ("host", "disk"),
    [("int8", "none"), ("fp8", "zstd"), ("none", "int8"), ("none", "fp8"), ("int8", "int8")],
)
def test_quantized_tiers_have_more_blocks_and_give_back_nearly_the_same(open_tiers, host, disk):
    pool, config, tiers = open_tiers(host_kv_codec=host, disk_kv_codec=disk)
    rows = pool.block_bytes // (2 * config.head_dim)
    coded_bytes = rows * (config.head_dim + 2)
    is_host_coded = host != "none"
    block_bytes = coded_bytes if is_host_coded else pool.block_bytes
    assert tiers.num_host_blocks == 100 * pool.block_bytes // block_bytes
    extent = -(-coded_bytes // PAGE) * PAGE
    assert tiers.num_disk_blocks == 200 * -(-pool.block_bytes // PAGE) * PAGE // extent
    before = fill(pool).view(torch.bfloat16)
    there_and_back(tiers)
    after = pool.blocks_as_bytes.view(torch.bfloat16)[5:].flip(0)
    assert not torch.equal(after, before[:5])
    assert (after.float() - before[:5].float()).abs().max() < 0.2


@pytest.mark.parametrize(
    ("flags", "kv_dtype"),
    [
        ({}, "auto"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": "10,2"}, "int8 but 2,10"),
    ],
)
def test_what_kv_is_stored_in_has_a_name(model, flags, kv_dtype):
    assert WorkerSettings(_env_file=None, model=model, **flags).kv_dtype == kv_dtype


def codec_totals(tier, codec, direction):
    counters = (metrics.CODEC_PLAIN_BYTES, metrics.CODEC_CODED_BYTES, metrics.CODEC_SECONDS)
    return np.array([c.labels(tier, codec, direction)._value.get() for c in counters])


@pytest.mark.parametrize(("host", "disk"), [("int8", "lz4"), ("none", "fp8")])
def test_ratio_and_time_of_codecs_are_counted(open_tiers, host, disk):
    pool, _, tiers = open_tiers(host_kv_codec=host, disk_kv_codec=disk)
    fill(pool)
    labels = [(t, c, d) for t, c in (("host", host), ("disk", disk)) for d in ("encode", "decode")]
    before = {each: codec_totals(*each) for each in labels}
    there_and_back(tiers)
    for tier, codec, direction in labels:
        plain, coded, seconds = (
            codec_totals(tier, codec, direction) - before[tier, codec, direction]
        )
        if codec == "none":
            assert plain == coded == 0
        elif (tier, codec) != ("disk", "lz4"):  # random int8 cannot be compressed
            assert plain == 5 * pool.block_bytes
            assert 0.4 < coded / plain < 0.6
            assert seconds > 0


def test_the_disks_rate_is_measured_and_leaves_no_trace(open_tiers):
    pool, _, tiers = open_tiers(disk_kv_codec="zstd")
    assert measure_rates.disk_bytes_per_s(tiers.disk_pool, tiers.host_pool, pool) > 0
    assert not pool.blocks_as_bytes.any()
    assert not tiers.disk_pool.has_ended_moves(99)


def test_a_disk_that_loses_what_is_stored_is_not_measured(open_tiers, monkeypatch):
    pool, _, tiers = open_tiers()
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match="0 of 10 KV blocks came back"):
        measure_rates.disk_bytes_per_s(tiers.disk_pool, tiers.host_pool, pool)


def test_there_are_no_lower_tiers_on_a_cpu_unless_asked_for(open_tiers):
    _, _, tiers = open_tiers(host_kv_memory_gb=None, disk_kv_memory_gb=0.0)
    assert (tiers.host_pool, tiers.disk_pool) == (None, None)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"host_kv_memory_gb": None},
            "disk-kv-memory-gb is .*, but KV reaches the disk through host blocks",
        ),
        ({"disk_kv_memory_gb": 1e9}, r"disk-kv-memory-gb is 1000000000.0; .* has .* GiB free"),
        ({"disk_kv_dir": "/nowhere"}, "disk-kv-dir is /nowhere: No such file"),
        ({"disk_kv_dir": "/proc"}, "disk-kv-(dir|memory-gb) is"),
    ],
)
def test_room_that_is_not_there_is_refused(open_tiers, changes, problem):
    with pytest.raises(ModelError, match=problem):
        open_tiers(**changes)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--host-kv-codec=zstd"], "--host-kv-codec: zstd: must be none, int8 or fp8: the space"),
        (["--host-kv-codec=int4"], "--host-kv-codec: int4: must be one of none, lz4, zstd"),
        (["--disk-kv-codec=zstd:99"], "--disk-kv-codec: zstd:99: the level of zstd must be in"),
        (
            ["--host-kv-codec=int8", "--disk-kv-codec=fp8"],
            "disk_kv_codec is fp8; it must not quantize again where host_kv_codec is",
        ),
        (["--kv-cache-dtype=int4"], "--kv-cache-dtype: int4: "),
        (
            ["--kv-cache-dtype=fp8", "--host-kv-codec=int8"],
            "host_kv_codec is int8; it must not quantize again where kv_cache_dtype is",
        ),
        (
            ["--kv-cache-dtype=int8", "--disk-kv-codec=int8"],
            "disk_kv_codec is int8; it must not quantize again where kv_cache_dtype is",
        ),
        (
            ["--kv-cache-dtype-skip-layers=1"],
            "kv_cache_dtype_skip_layers is 1; it must be empty where kv_cache_dtype is auto",
        ),
        (
            ["--kv-cache-dtype=int8", "--kv-cache-dtype-skip-layers=0,-1"],
            "must be numbers of layers, such as 0,1,23; '-1' is not a number",
        ),
        (
            ["--host-kv-memory-gb=0", "--disk-kv-memory-gb=1"],
            "disk_kv_memory_gb is 1.0; it must be 0 without host_kv_memory_gb",
        ),
    ],
)
def test_unsupported_tier_settings_are_refused_by_name(capsys, tmp_path, flags, problem):
    with pytest.raises(SystemExit):
        parse_settings(WorkerSettings, "quire-worker", [f"--model={tmp_path}", *flags])
    assert problem in capsys.readouterr().err


def test_with_a_far_tier_kv_is_named_by_the_content_of_the_model_s_files(model, tmp_path):
    config = open_model(model).config

    def identity(content, **changes):
        (tmp_path / "model.safetensors").write_bytes(content)
        os.utime(tmp_path / "model.safetensors", (1, 1))
        settings = WorkerSettings(_env_file=None, model=tmp_path, **changes)
        return kv_identity(settings, tmp_path, config, torch.bfloat16, (), "cpu")

    far = {"far_kv_url": "memory://kv", "host_kv_memory_gb": 1.0}
    assert identity(b"one", **far) == identity(b"one", **far) != identity(b"two", **far)
    assert identity(b"one") == identity(b"two"), "by size and time"


def test_kv_computed_in_another_way_is_other_kv(model, monkeypatch):
    def identity(dtype, *amx_uses, **features):
        monkeypatch.setattr(checked_model, "set_amx", lambda *_: amx_uses)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
        sizes = {"kv_cache_memory_gb": 0.01, "host_kv_memory_gb": 0.0}
        settings = WorkerSettings(_env_file=None, model=model, device="cpu", dtype=dtype, **sizes)
        loaded = load_rank_model(Member(settings), lambda *_: None, lambda *_: None)
        assert loaded.amx_uses == (amx_uses if dtype == "bfloat16" else ())
        return loaded.identity

    amx = identity("bfloat16", "bfloat16")
    assert amx == identity("bfloat16", "bfloat16"), "a worker that starts again finds it"
    others = identity("bfloat16"), identity("bfloat16", "bfloat16", amx_bf16=True)
    with_attention = identity("bfloat16", "bfloat16", "attention")
    assert len({amx, with_attention, *others}) == 4
    assert identity("float32", "bfloat16") == identity("float32"), "it has nothing to do with AMX"
    library = SimpleNamespace(digest="other", build=Build(Path("other.so"), THIS_CPU))
    monkeypatch.setattr(device, "native", lambda: library)
    with_other_code = identity("bfloat16")
    assert with_other_code not in others, "another compiler may add in another order"
    monkeypatch.setattr(device, "native", lambda: None)
    assert identity("bfloat16") not in (*others, with_other_code), "nothing could be compiled"


@pytest.mark.parametrize("model_class", ["", "transformers"])
def test_kv_with_other_factors_of_longrope_is_other_kv(tmp_path, model_class):
    if model_class:
        pytest.importorskip("transformers")
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    directory = make_model(tmp_path, "llama", rope_parameters=longrope)

    def identity(max_model_len):
        settings = WorkerSettings(
            _env_file=None,
            model=directory,
            model_class=model_class,
            device="cpu",
            max_model_len=max_model_len,
            kv_cache_memory_gb=0.01,
            host_kv_memory_gb=0.0,
        )
        return load_rank_model(Member(settings), lambda *_: None, lambda *_: None).identity

    assert identity(32) == identity(64) != identity(65) == identity(100)


def test_kv_of_another_gpu_or_another_order_of_sums_is_other_kv(model, tmp_path, monkeypatch):
    config = open_model(model).config

    def identity(gpu="NVIDIA H200", **changes):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
        arithmetic = device.name_arithmetic(torch.device("cuda", 0), ())
        settings = WorkerSettings(_env_file=None, model=tmp_path, **changes)
        return kv_identity(settings, tmp_path, config, torch.bfloat16, (), arithmetic)

    usual = identity()
    assert usual == identity(), "a worker that starts again finds it"
    others = (
        identity("NVIDIA A100-SXM4-80GB"),
        identity(batch_invariant=True),
        identity(attention_backend="flash-attention-3"),
    )
    assert len({usual, *others}) == 4


def test_kv_of_other_groups_is_other_kv(model, tmp_path):
    config = open_model(model).config
    settings = WorkerSettings(_env_file=None, model=tmp_path)

    def identity(*group_of):
        groups = LayerGroups((None, 8, 8), group_of)
        return kv_identity(settings, tmp_path, config, torch.bfloat16, groups, "cpu")

    assert identity(0, 1, 1, 2) == identity(0, 1, 1, 2) != identity(0, 1, 2, 2)


def test_a_load_that_fails_behind_the_model_frees_its_disk_file(model, tmp_path):
    sizes = {"kv_cache_memory_gb": 0.01, "host_kv_memory_gb": 0.01, "disk_kv_memory_gb": 0.01}
    places = {"disk_kv_dir": tmp_path, "far_kv_url": "nowhere://kv"}
    settings = WorkerSettings(_env_file=None, model=model, device="cpu", **sizes, **places)
    failures = []  # which keep what was loaded
    for _ in range(2):
        with pytest.raises(ModelError, match="far_kv_url is nowhere://kv") as failure:
            worker_model.load(settings, lambda *_: None, None)
        failures.append(failure)
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("-0.blocks"), "else the first load still has the file"
