import json
import sys

import pytest
import torch

from kernels.triton import configs as tuned
from kernels.triton.configs import (
    CONFIG_DIR,
    DecodeConfig,
    LaunchShape,
    PrefillConfig,
    first_match,
    read_rules,
)
from kernels.tuning import __main__ as tune
from kernels.tuning.candidates import decode_seconds, prefill_seconds
from kernels.tuning.workload import ModelSizes

SHAPE = LaunchShape("bfloat16", "int8", 128, 4)
DECODE = DecodeConfig(64, 128, 1, 4, 5, 4)
CONFIGS = sorted(CONFIG_DIR.glob("*.json"))


def seconds_by(table):
    def seconds_of(config, workload):
        seconds = table[config.num_warps][workload]
        if seconds is None:
            raise RuntimeError("out of resource: shared memory")
        return seconds

    return seconds_of


def candidates(*num_warps):
    return [DecodeConfig(64, 128, 1, each, 5, 4) for each in num_warps]


def test_the_best_is_least_over_all_workloads_relative_to_the_default():
    table = {1: (1.0, 100.0), 2: (0.5, 90.0), 4: (0.9, 60.0), 8: (0.1, None)}
    said = []
    best = tune.best_of(candidates(1, 2, 4, 8), (0, 1), seconds_by(table), said.append)
    assert best.config.num_warps == 2
    assert best.seconds == (0.5, 90.0)
    assert best.default_seconds == (1.0, 100.0)
    assert "out of resource" in said[-1]


def test_a_candidate_far_behind_is_not_measured_to_the_end():
    table = {1: (1.0, 1.0), 2: (1.6, 0.0)}
    best = tune.best_of(candidates(1, 2), (0, 1), seconds_by(table), str)
    assert best.config.num_warps == 1


def test_if_nothing_runs_nothing_is_chosen():
    with pytest.raises(ValueError, match="no candidate ran"):
        tune.best_of(candidates(1), (0,), seconds_by({1: (None,)}), str)


def test_a_launch_uses_the_tuned_configuration():
    before = (CONFIG_DIR / "sm_90.json").read_text()
    chosen = tune.Tuned(DecodeConfig(32, 256, 2, 8, 3, 2), (1.0,), (2.0,))
    text = tune.with_rules(before, "A device", {"date": "2000-01-01"}, SHAPE, [chosen])
    again = tune.with_rules(text, "A device", {"date": "2000-01-02"}, SHAPE, [chosen])
    for written in (text, again):
        rules = read_rules(DecodeConfig, written)
        assert len(rules) == len(read_rules(DecodeConfig, before)) + 1
        assert first_match(rules, SHAPE) == chosen.config
        other = LaunchShape("bfloat16", "int8", 128, 5)
        assert first_match(rules, other) == first_match(read_rules(DecodeConfig, before), other)
    assert json.loads(again)["tuned"] == {"date": "2000-01-02"}


def test_the_default_is_the_first_candidate_and_none_comes_twice():
    for each in (
        tune.decode_candidates(DECODE),
        tune.prefill_candidates(PrefillConfig(64, 64, 4, 3)),
    ):
        assert len(set(each)) == len(each)
    assert tune.decode_candidates(DECODE)[0] == DECODE


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_file_has_a_configuration_for_every_shape(path):
    text = path.read_text()
    for dtype in ("float32", "float16", "bfloat16"):
        for stored in (dtype, "int8", "float8_e4m3fn"):
            for dims in (16, 64, 128, 256, 512):
                shape = LaunchShape(dtype, stored, dims, 4)
                decode = first_match(read_rules(DecodeConfig, text), shape)
                prefill = first_match(read_rules(PrefillConfig, text), shape)
                assert decode.split % decode.positions == 0
                powers = decode.positions, prefill.positions, prefill.rows, prefill.value_dims
                for size in powers:
                    assert size >= 16
                    assert size.bit_count() == 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_missing_measurements_are_marked(path):
    content = json.loads(path.read_text())
    if content["tuned"] is None:
        rules = content["kernels"]["decode"] + content["kernels"]["prefill"]
        assert not any("measured" in rule for rule in rules)
    else:
        assert content["tuned"]["device"] == content["device"]


def test_a_device_without_a_file_takes_that_of_its_capability():
    assert tuned.config_path("No such device", (9, 0)).stem == "sm_90"
    assert tuned.config_path("No such device", (8, 9)).stem == "sm_80"
    assert tuned.config_path("No such device", (12, 0)).stem == "sm_90"
    assert tuned.config_path("No such device", (7, 5)).stem == "sm_80"


def test_a_device_s_own_file_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "CONFIG_DIR", tmp_path)
    for stem in ("sm_80", "NVIDIA_H200"):
        (tmp_path / f"{stem}.json").write_text("{}")
    assert tuned.config_path("NVIDIA H200", (9, 0)).stem == "NVIDIA_H200"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": {"batch": 1}, "config": {}}, r"match has \['batch'\], which no shape has"),
        ({"match": {}, "config": {"rows": 16}}, r"config has \['rows'\], required are"),
        (
            {
                "match": {},
                "config": {"rows": 16, "positions": 16, "num_warps": 0, "num_stages": 1},
            },
            "num_warps is 0; it must be an integer of at least 1",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(rule, message):
    text = json.dumps({"kernels": {"prefill": [rule]}})
    with pytest.raises(ValueError, match=message):
        read_rules(PrefillConfig, text)


def test_no_rule_is_an_error_that_names_the_shape():
    with pytest.raises(ValueError, match="no rule matches LaunchShape"):
        first_match([({"dims": 64}, DECODE)], SHAPE)


@pytest.mark.parametrize("stored", [None, torch.int8])
def test_a_configuration_is_timed_on_the_present_device(stored, device):
    model = ModelSizes(4, 2, 16, 8, torch.float16, stored)
    decode = DecodeConfig(16, 32, 8, 4, 1, 1)
    assert decode_seconds(model, decode, [40, 3], device, 1) > 0
    assert prefill_seconds(model, PrefillConfig(16, 16, 4, 1), [(5, 30), (2, 2)], device, 1) > 0


def test_only_values_that_can_be_divided_take_tiles_for_a_part_of_them():
    """On sm_90 a tile of 128 rows with all of 320 dims, or of a latent's, would not fit."""
    rules = read_rules(PrefillConfig, (CONFIG_DIR / "sm_90.json").read_text())
    rows = {}
    for key_dim, value_dim in ((512, 512), (320, 320), (576, 512)):
        query = torch.empty(1, 8, key_dim, dtype=torch.bfloat16)
        shape = tuned.shape_of(query, torch.empty(1, 1, 1, value_dim, dtype=torch.int8))
        assert shape.dims == 512
        rows[key_dim] = first_match(rules, shape).rows
    assert rows == {512: 128, 320: 64, 576: 64}


def test_times_without_a_gpu_stay_out_of_the_shipped_files(monkeypatch, capsys):
    monkeypatch.setattr(tune, "_tune", lambda _: pytest.fail("it would write"))
    sizes = ["--heads=1", "--kv-heads=1", "--head-dim=1"]
    monkeypatch.setattr(sys, "argv", ["tuning", *sizes, "--cpu-smoke"])
    with pytest.raises(SystemExit, match="2"):
        tune._main()
    assert "--cpu-smoke needs --out" in capsys.readouterr().err
