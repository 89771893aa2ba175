"""Bodies of the API with a store: uploads, downloads, lists, and their limits and refusals."""

import asyncio
import io

import aiohttp
import openai
import pytest
from test_batches import KEPT, created, ended, serving

from contract.errors import TooBusyError
from router.http.api import routes
from router.http.batches import file_routes, transfers
from router.http.batches.batches import Batches
from router.http.batches.concurrency_limit import Places
from router.stored_turns.turns import Turns

pytestmark = pytest.mark.timeout(60)

PURPOSE = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
END = b"\r\n--x--\r\n"


@pytest.fixture
async def client(router, new_store):
    async with serving(router, new_store()) as client:
        yield client


@pytest.fixture
async def http(client):
    """A client that sends bodies as they are."""
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    async with aiohttp.ClientSession(str(client.base_url), headers=kind) as session:
        yield session


async def refusal(http, data):
    async with http.post("files", data=data) as response:
        return response.status, (await response.json())["error"]["message"]


async def test_every_route_refuses_a_body_that_is_not_json(router, new_store, client):
    turns = Turns(new_store(), router.cells, router.usage, **KEPT)
    batches = Batches(router.cells, turns, 60, 2**20)
    served = routes(router.cells, None, max_body_bytes=1, turns=turns, batches=batches)
    paths = {route.path.replace("{id}", "x") for route in served if route.method == "POST"}
    assert {"/v1/messages", "/v1/batches/x/cancel", "/v1/responses/x/cancel"} < paths
    kind = {"Content-Type": "text/plain"}
    async with aiohttp.ClientSession(str(client.base_url.join("/")), headers=kind) as session:
        statuses = {}
        for path in paths:
            async with session.post(path, data=b"{}") as response:
                statuses[path] = response.status
    assert statuses == dict.fromkeys(paths, 415)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "body is not valid"),
        (b"{}", "body is not valid"),
        (b"--x\r\n", "body has a part without a name"),
        (PURPOSE + FILE + b"no end", "body is not valid"),
        (PURPOSE, "body is not valid"),
        (b"\n" * 100_000, "body has more than 64 boundaries and headers"),
        (b"--x\r\n" + b"a: b\r\n" * 1000 + END, "body has more than 64 boundaries and headers"),
        (b"--x\r\n" + b"a" * 10_000 + END, "body is not valid"),
        (PURPOSE + FILE + b"1\r\n" + FILE + b"2" + END, "file is set twice"),
        (PURPOSE + PURPOSE + FILE + b"1" + END, "purpose is set twice"),
        (PURPOSE + END[2:], "file is missing"),
        (FILE + b"1" + END, "purpose is null"),
        (PURPOSE.replace(b"batch", b"b" * 65) + FILE + b"1" + END, "purpose has more than 64"),
        (PURPOSE.replace(b"purpose", b"other") + END, '"other" is set; there is no such field'),
        (
            PURPOSE + FILE.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n")
            + b"MQ==" + END,
            'Content-Transfer-Encoding of "file" is "base64"',
        ),
    ],
)  # fmt: skip
async def test_malformed_uploads_are_refused_by_name(http, data, message):
    status, text = await refusal(http, data)
    assert 400 <= status < 500
    assert message in text


async def test_a_file_is_received_and_sent_in_pieces(client, http):
    content = bytes(range(256)) * 10_000
    file = await client.files.create(file=("x", content), purpose="batch")
    assert file.bytes == len(content)
    async with http.get(f"files/{file.id}/content") as response:
        assert response.content_length == len(content)
        assert await response.read() == content


async def test_a_field_may_arrive_in_many_pieces(http, monkeypatch):
    monkeypatch.setattr(transfers, "_READ_BYTES", 8)
    body = PURPOSE.replace(b"batch", b"b" * 60) + FILE + b"1" + END
    assert await refusal(http, body) == (
        400, f'purpose is "{"b" * 60}"; it must be "batch"'
    )  # fmt: skip


async def test_a_client_that_stops_reading_loses_its_connection(monkeypatch):
    class Connection:
        is_aborted = False

        def abort(self):
            self.is_aborted = True

    class Stalled:
        transport = Connection()

        async def write(self, _piece):
            await asyncio.Event().wait()

    monkeypatch.setattr(transfers, "_PIECE_S", 0)
    stalled = Stalled()
    with pytest.raises(aiohttp.ClientConnectionResetError, match="took more than 0 s"):
        await transfers.send(stalled, stalled, io.BytesIO(b"x"))
    assert stalled.transport.is_aborted


async def test_a_body_that_is_too_large_is_refused(http, monkeypatch):
    monkeypatch.setattr(transfers, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(transfers, "_MAX_BODY_BYTES", 2000)
    assert await refusal(http, PURPOSE + FILE + bytes(1001) + END) == (
        413, "file has more than 1000 bytes, which is the limit"
    )  # fmt: skip
    assert (await refusal(http, PURPOSE + FILE + bytes(3000) + END))[0] == 413

    async def chunked():
        yield PURPOSE + FILE
        yield bytes(100_000)

    assert (await refusal(http, chunked()))[0] == 413


async def refused(client):
    """Upload until that is refused; the server takes a place once it has read the head."""
    while True:
        try:
            await client.files.create(file=b"x", purpose="batch")
        except openai.RateLimitError as error:
            return error


async def test_few_uploads_of_a_tenant_at_once(client, http):
    go_on = asyncio.Event()
    begun = asyncio.Queue()

    async def body():
        yield PURPOSE + FILE
        begun.put_nowait(None)
        await go_on.wait()
        yield b"1" + END

    uploads = [asyncio.create_task(http.post("files", data=body())) for _ in range(4)]
    for _ in range(4):
        await begun.get()
    error = await refused(client)
    assert "4 uploads of this tenant are in progress; the limit is 4" in error.message
    assert error.response.headers["Retry-After"] == "5"
    go_on.set()
    assert [(await upload).status for upload in uploads] == [200] * 4
    await client.files.create(file=b"x", purpose="batch")


def test_places_are_limited_in_all_and_given_back():
    places = Places("uploads", per_tenant=2, in_all=3)
    with places.take("a"), places.take("a"), places.take("b"):
        with pytest.raises(TooBusyError, match=r"^3 uploads are in progress; the limit is 3"):
            places.take("c").__enter__()
        with pytest.raises(TooBusyError, match=r"^2 uploads of this tenant are in progress"):
            places.take("a").__enter__()
    with places.take("a"), places.take("c"), places.take("c"):
        pass


async def test_what_a_tenant_stores_is_limited(client, monkeypatch):
    monkeypatch.setattr(file_routes, "MAX_STORED_BYTES", 3)
    call = {"file": b"123", "purpose": "batch", "extra_headers": {"Idempotency-Key": "k"}}
    file = await client.files.create(**call)
    assert await client.files.create(**call) == file
    with pytest.raises(openai.RateLimitError, match="have 3 bytes; the limit is 3"):
        await client.files.create(file=b"4", purpose="batch")
    await client.files.delete(file.id)
    await client.files.create(file=b"4", purpose="batch")


async def test_a_call_of_more_sequences_than_may_ever_wait_is_invalid(router, client, monkeypatch):
    monkeypatch.setattr(router.inference._admission, "_max_live_requests", 4096)
    router.inference.schedulers._links[0].max_waiting = 1024
    router.scheduler.load.num_workers = 1
    router.scheduler.load.max_num_seqs = 256
    with pytest.raises(openai.BadRequestError, match="makes 65536 sequences, n for each prompt"):
        await client.completions.create(model="tiny", prompt=["a"] * 1024, n=64, max_tokens=1)


async def test_pages(client):
    ids = [(await client.files.create(file=b"x", purpose="batch")).id for _ in range(5)]
    assert [file.id async for file in client.files.list()] == ids[::-1]
    assert [file.id async for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids
    first = await client.files.list(limit=2, after=ids[3])
    assert ([file.id for file in first.data], first.has_more) == ([ids[2], ids[1]], True)
    assert not (await client.files.list(purpose="batch_output")).data
    with pytest.raises(openai.BadRequestError, match='after is "file-1"; no entry has that id'):
        await client.files.list(after="file-1")
    with pytest.raises(openai.BadRequestError, match=r"limit is 10001; it must be in \[1, 10000\]"):
        await client.files.list(limit=10_001)


async def test_pages_of_batches(client):
    batches = [await ended(client, await created(client, "{")) for _ in range(3)]
    ids = [batch.id for batch in batches]
    assert [batch.id async for batch in client.batches.list(limit=1)] == ids[::-1]
    assert (await client.batches.list(limit=2)).has_more
    with pytest.raises(openai.BadRequestError, match=r"limit is 101; it must be in \[1, 100\]"):
        await client.batches.list(limit=101)
