"""`quire batch` against a fake of the router's HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from quire.cli.__main__ import main
from quire.cli.commands.inference import batch


class Router:
    """Answers by `handler`, and records the calls."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, dict, dict]] = []
        self.refusals: list[web.Response | None] = []
        """Answers before those of `handler`, the last one first; None: it hangs up."""
        self.num_at_once = self.most_at_once = 0

    async def handle(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked.append((request.path, asked, dict(request.headers)))
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await asyncio.sleep(0)
        self.num_at_once -= 1
        if self.refusals:
            refusal = self.refusals.pop()
            if refusal is None:
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            return refusal
        body = {"path": request.path, "text": asked["prompt"]}
        return web.json_response(body, headers={"X-Request-Id": "r"})


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router()
    app = web.Application()
    app.add_routes([web.post("/{path:.*}", router.handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    router.url = f"http://{host}:{port}/v1"
    yield router
    await runner.cleanup()


def line(custom_id: str, text: str = "x", **fields: object) -> str:
    value = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
    return json.dumps(value | {"body": {"prompt": text}} | fields)


async def run(router: Router, tmp_path: Path, *lines: str, flags: tuple[str, ...] = ()) -> int:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(lines) + "\n")
    output = str(tmp_path / "out.jsonl")
    argv = ["batch", str(file), "-o", output, "--url", router.url, *flags]
    return await asyncio.to_thread(main, argv)


def answers(tmp_path: Path) -> dict[str, dict]:
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    assert len({value["custom_id"] for value in values}) == len(values)
    return {value["custom_id"]: value for value in values}


async def test_each_line_is_answered(router, tmp_path, capsys):
    lines = [line(str(i), f"text {i}") for i in range(20)]
    flags = ("--concurrency", "3", "--api-key", "k")
    assert await run(router, tmp_path, *lines, "", flags=flags) == 0
    assert router.most_at_once <= 3
    for custom_id, answer in answers(tmp_path).items():
        assert answer["error"] is None
        assert answer["response"] == {
            "status_code": 200,
            "request_id": "r",
            "body": {"path": "/v1/completions", "text": f"text {custom_id}"},
        }
    assert {headers["X-Quire-Priority"] for _, _, headers in router.asked} == {"-100"}
    assert {headers["Authorization"] for _, _, headers in router.asked} == {"Bearer k"}
    assert capsys.readouterr().out.startswith("20 of 20 answered: ")


async def test_an_interrupted_run_goes_on(router, tmp_path):
    assert await run(router, tmp_path, line("a"), line("b")) == 0
    output = tmp_path / "out.jsonl"
    output.write_text(output.read_text() + '{"custom_id": "c", "resp')  # it was killed
    assert await run(router, tmp_path, line("a"), line("b"), line("c", "new")) == 0
    assert [body["prompt"] for _, body, _ in router.asked] == ["x", "x", "new"]
    assert answers(tmp_path).keys() == {"a", "b", "c"}


async def test_a_line_that_fails_is_told_and_tried_by_the_next_run(router, tmp_path, capsys):
    router.refusals = [web.json_response({"error": {"message": "too long"}}, status=400)]
    assert await run(router, tmp_path, line("a")) == 1
    assert answers(tmp_path)["a"]["response"]["status_code"] == 400
    shown = capsys.readouterr()
    assert "a: {'error': {'message': 'too long'}}" in shown.err
    assert shown.out.startswith("0 of 1 answered, 1 failed: ")
    assert await run(router, tmp_path, line("a")) == 0
    assert answers(tmp_path)["a"]["response"]["status_code"] == 200


async def test_a_full_queue_is_waited_for(router, tmp_path):
    headers = {"Retry-After": "0"}
    router.refusals = [web.json_response({}, status=s, headers=headers) for s in (429, 503, 529)]
    assert await run(router, tmp_path, line("a")) == 0
    assert len(router.asked) == 4


async def test_patience_begins_when_the_connection_is_lost(router, tmp_path, monkeypatch):
    """The computation of a line may take longer than the service may be out of reach."""
    monkeypatch.setattr(batch, "_PATIENCE_S", 0.0)
    router.refusals = [None]
    assert await run(router, tmp_path, line("a"), line("b")) == 0
    keys = {}
    for _, body, headers in router.asked:
        keys.setdefault(headers["Idempotency-Key"], []).append(body)
    assert sorted(map(len, keys.values())) == [1, 2]  # the lost line keeps its key


async def test_a_service_that_stays_out_of_reach_is_given_up(router, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "_PATIENCE_S", 0.0)
    router.refusals = [None, None]
    assert await run(router, tmp_path, line("a")) == 1
    assert answers(tmp_path)["a"]["error"]["code"] == "unreachable"


@pytest.mark.parametrize("flags", [("--model", "m"), ("--http-port", "8000")])
async def test_two_services_are_refused(router, tmp_path, capsys, flags):
    with pytest.raises(SystemExit):
        await run(router, tmp_path, line("a"), flags=flags)
    assert f"--url and {flags[0]}: each names a service; give one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "in.jsonl:1: is not JSON"),
        ([line("a"), "[]"], "in.jsonl:2: must be an object with custom_id, url and body"),
        ([line("a"), line("a")], "in.jsonl:2: custom_id 'a' is on an earlier line"),
        ([line("a", url="/v1/models")], "url is '/v1/models'; it must be one of"),
        ([line("a", method="GET")], "method is 'GET'; it must be POST"),
        ([line("a", body={"stream": True})], "body.stream is set"),
    ],
)
async def test_a_wrong_file_is_refused_before_anything_is_asked(
    router, tmp_path, capsys, lines, message
):
    assert await run(router, tmp_path, *lines) == 1
    assert message in capsys.readouterr().err
    assert not router.asked


async def test_a_file_of_something_else_is_not_overwritten(router, tmp_path, capsys):
    (tmp_path / "out.jsonl").write_text('{"a": 1}\n')
    assert await run(router, tmp_path, line("a")) == 1
    assert "is not a file of answers" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == '{"a": 1}\n'
