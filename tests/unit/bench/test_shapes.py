"""`bench/shapes.py`: its shapes, the models that it writes, and the peer's process."""

import json
import sys

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer


def test_the_shapes_have_the_sizes_that_the_comparison_asks_for():
    from shapes import SHAPES  # noqa: PLC0415

    sizes = SHAPES.values()
    assert {each.hidden for each in sizes} == {576, 896, 1024, 1152, 2048}
    assert {(9, 3), (14, 2)} <= {(each.heads, each.kv_heads) for each in sizes}
    assert {each.vocab for each in sizes} == {32_003, 262_144}
    assert {(each.hidden, each.is_tied) for each in sizes} == {
        (each.hidden, is_tied) for each in sizes for is_tied in (False, True)
    }
    for each in sizes:
        assert each.head_dim or each.hidden % each.heads == 0
        assert each.heads % each.kv_heads == 0


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_large_vocabulary_has_a_text_for_every_token(tmp_path, is_tied):
    from make_model import Sizes, make_model  # noqa: PLC0415

    sizes = Sizes(32, 1, 2, 1, 32, 16_001, is_tied=is_tied)
    make_model(tmp_path, sizes)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == sizes.vocab
    assert tokenizer.decode([16_000]) != ""
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] == is_tied
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert ("lm_head.weight" in weights.keys()) != is_tied  # noqa: SIM118  it is no dict


SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_ours = "PYTHONPATH" in os.environ
        self.send_response(200 if self.path == "/health" and not is_ours else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_the_peer_is_ready_when_it_is_healthy_and_ends_with_the_comparison(tmp_path):
    from harness.processes import Process  # noqa: PLC0415
    from shapes import peer_server  # noqa: PLC0415

    (tmp_path / "server.py").write_text(SERVER)
    command = f"A=1 {sys.executable} {tmp_path}/server.py {{port}} {{model}}"
    async with peer_server(command, tmp_path / "model") as url:
        seen = Process("seen", (), tmp_path / "log", int(url.rpartition(":")[2]))
        assert await seen.get("/health") == ""
    assert await seen.get("/health") is None
    async with peer_server(None, tmp_path) as url:
        assert url is None


async def test_a_peer_that_does_not_start_says_why(tmp_path):
    from harness.case import BenchError  # noqa: PLC0415
    from shapes import peer_server  # noqa: PLC0415

    reason = r"(?s)the peer ended with 3; its log ends:.*no such model"
    with pytest.raises(BenchError, match=reason):
        async with peer_server("echo no such model; exit 3", tmp_path / "model"):
            pass
