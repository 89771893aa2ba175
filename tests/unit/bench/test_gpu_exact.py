"""bench/gpu/exact.py: a comparison that fails is a row, and the others go on."""

import argparse

import pytest
import torch

pytest.importorskip("triton")
from gpu import exact
from gpu.rows import Rows

TOKENS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_missing_and_different_tokens_are_wrong():
    assert exact.num_wrong(TOKENS, TOKENS) == 0
    assert exact.num_wrong([[1, 2, 9, 4], [5, 6, 7]], TOKENS) == 2
    assert exact.num_wrong(TOKENS[:1], TOKENS) == 4


def test_tokens_after_the_first_difference_do_not_count_as_agreeing():
    assert exact.agreeing([[1, 2, 9, 4], [5, 6, 7, 8]], TOKENS) == 6 / 8


def test_a_failed_capture_is_a_row_that_counts_as_wrong_and_the_rest_is_compared(
    tmp_path, monkeypatch
):
    def generate(self, kind, dtype, way):
        del self, kind, dtype
        if way == "graphs":
            raise RuntimeError("operation not permitted when stream is capturing")
        return TOKENS

    monkeypatch.setattr(exact.Comparison, "_generate", generate)
    table = Rows(tmp_path / "numbers.json")
    given = argparse.Namespace(device="cpu", rows=2, tokens=4)
    comparison = exact.Comparison(given, table)
    for name in ("plain", "int8 KV"):
        comparison.compare(exact.Kind(name, tmp_path))
    assert table.rows["plain, float32: eager, CPU"] == {"wrong": 0, "of": 8, "agreeing": 1.0}
    assert "capturing" in table.rows["plain, float32: graphs, CPU"]["error"]
    assert exact.wrong_float32(table) == 1, "quantized KV does not count"


def test_each_way_of_computing_runs_once(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        exact.Comparison, "_generate", lambda _, *key: made.append(key[1:]) or TOKENS
    )
    given = argparse.Namespace(device="cpu", rows=2, tokens=4)
    comparison = exact.Comparison(given, Rows(None))
    comparison.compare(exact.Kind("plain", tmp_path))
    assert made == [(torch.float32, "CPU"), (torch.float32, "eager"), (torch.float32, "graphs")]


def test_a_kind_whose_process_dies_is_a_row(tmp_path, monkeypatch):
    """Without a device each process ends at once."""
    monkeypatch.setattr(exact.sys, "executable", "/bin/false")
    table = Rows(tmp_path / "numbers.json")
    given = argparse.Namespace(
        device="cpu", rows=2, tokens=4, kinds=("plain", "drafts"), processes=2
    )
    exact.compare_in_processes(given, table)
    assert table.errors == {
        "plain, float32": "its process ended with 1",
        "drafts, float32": "its process ended with 1",
    }
    assert exact.wrong_float32(table) == 2


def test_a_kind_whose_process_dies_after_a_row_has_failed(tmp_path, monkeypatch):
    program = tmp_path / "python"
    row = '{"rows": {"plain, float32: eager, CPU": {"wrong": 0}}}'
    program.write_text(
        f"#!/bin/sh\nfor file; do :; done\necho '{row}' > \"$file\"\nkill -SEGV $$\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(exact.sys, "executable", str(program))
    table = Rows(tmp_path / "numbers.json")
    given = argparse.Namespace(device="cpu", rows=2, tokens=4, kinds=("plain",), processes=1)
    exact.compare_in_processes(given, table)
    assert table.rows["plain, float32: eager, CPU"] == {"wrong": 0}
    assert table.errors == {"plain, float32": "its process ended with -11"}
    assert exact.wrong_float32(table) == 1


def test_a_kind_that_cannot_be_made_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    def make_adapter(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr(exact, "make_adapter", make_adapter)
    monkeypatch.setattr(exact.Comparison, "_generate", lambda *_: TOKENS)
    given = argparse.Namespace(
        device="cpu",
        rows=2,
        tokens=4,
        kinds=("adapters", "drafts"),
        processes=1,
        json=tmp_path / "numbers.json",
    )
    results = exact.compare(given)
    assert results["failed"] == results["wrong_float32"] == 1
    assert results["rows"]["adapters, float32"] == {"error": "OSError: the disk is full"}
    assert results["rows"]["drafts, float32: graphs, CPU"]["wrong"] == 0
