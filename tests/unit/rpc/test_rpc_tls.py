"""Servers and channels with certificates: allowed calls, and errors of others."""

import asyncio
import contextlib
import ssl

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contract.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from quire.v1 import admin_pb2, admin_pb2_grpc
from rpc.peers.channel import open_blocking_channel, open_channel
from rpc.security.client_certificates import check_names
from rpc.security.tls import ClientTls, explain
from rpc.settings import ProcessSettings, parse_settings
from rpc.status import status_to_error
from tests.certificates import Authority

CHECK = health_pb2.HealthCheckRequest()


@pytest.fixture(params=[True, False], ids=["grpcio", "quire"])
def by_grpcio(request):
    return request.param


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def process(ours):
    return ours.issue("process")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("theirs")).issue("stranger")


def client_tls(files, ca=None, **more):
    return ClientTls(ca or files.ca, files.cert, files.key, **more)


async def check(target, tls):
    async with open_channel(target, tls=tls) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(CHECK, timeout=10)
        return response.status


async def refusal(target, tls):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(target, tls)
    error = status_to_error(caught.value)
    assert isinstance(error, UnavailableError)
    return str(error)


async def test_both_ends_show_certificates(run_server, process):
    async with run_server(ProcessSettings(**process.as_peer)) as addresses:
        assert await check(addresses.grpc, client_tls(process))
        with open_blocking_channel(addresses.grpc, tls=client_tls(process)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            # In its own thread: the server's event loop is this one.
            call = stub.Check.future(CHECK, timeout=10)
            while not call.done():
                await check(addresses.grpc, client_tls(process))
            assert call.result().status


async def test_client_without_certificate_gets_in_only_where_none_is_asked_for(run_server, process):
    async with run_server(ProcessSettings(**process.as_server)) as addresses:
        assert await check(addresses.grpc, ClientTls(process.ca))
    async with run_server(ProcessSettings(**process.as_peer)) as addresses:
        assert "--tls-cert" in await refusal(addresses.grpc, ClientTls(process.ca))


@pytest.mark.parametrize("sign", ["Socket closed", "recvmsg:Connection reset by peer (104)"])
def test_each_way_in_which_a_tls_server_refuses_a_client_has_the_hint(sign):
    details = f"failed to connect to all addresses; last error: UNAVAILABLE: {sign}"
    assert "--tls-cert" in explain(details)


async def test_a_certificate_opens_only_where_its_name_is_accepted(run_server, ours, process):
    files = {name: ours.issue(name, f"{name}.quire") for name in ("router", "client")}
    settings = ProcessSettings(
        **process.as_peer, tls_client_names="scheduler.quire, router.quire", local_drain=True
    )
    async with run_server(settings) as addresses:
        assert await check(addresses.grpc, client_tls(files["router"]))
        async with open_channel(addresses.grpc, tls=client_tls(files["client"])) as channel:
            unary = health_pb2_grpc.HealthStub(channel).Check(CHECK, timeout=10)
            stream = admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
            for call in (unary, stream):
                assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
                assert "client.quire" in await call.details()
        async with aiohttp.ClientSession() as session:
            for name, path, status in (
                ("client", "/metrics", 403),
                ("router", "/metrics", 200),
                ("client", "/health", 200),
            ):
                context = ssl.create_default_context(cafile=ours.ca)
                context.load_cert_chain(files[name].cert, files[name].key)
                url = f"https://{addresses.http}{path}"
                async with session.get(url, ssl=context) as response:
                    assert response.status == status
                    assert status != 403 or "client.quire" in await response.text()


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["router.quire", "10.0.0.1"], None),
        (["spiffe://quire/router"], None),
        (["Router.quire"], PermissionDeniedError),
        (["evil-router.quire"], PermissionDeniedError),
        ([], UnauthenticatedError),
    ],
)
def test_names_are_taken_as_they_are(names, error):
    accepted = {"router.quire", "spiffe://quire/router"}
    with pytest.raises(error) if error else contextlib.nullcontext():
        check_names(names, accepted)
    check_names(names, set())


def test_names_without_certificates_are_refused_at_the_start(capsys):
    with pytest.raises(SystemExit):
        parse_settings(ProcessSettings, "p", ["--tls-client-names=a"])
    assert "--tls-client-ca" in capsys.readouterr().err


async def test_client_certificate_of_the_wrong_authority_is_refused(run_server, process, stranger):
    async with run_server(ProcessSettings(**process.as_peer)) as addresses:
        assert await refusal(addresses.grpc, client_tls(stranger, ca=process.ca))
        assert await check(addresses.grpc, client_tls(process)), "others still get in"


async def test_server_of_the_wrong_authority_is_not_believed(run_server, process, stranger):
    async with run_server(ProcessSettings(**stranger.as_server)) as addresses:
        assert "no authority in --tls-ca" in await refusal(addresses.grpc, ClientTls(process.ca))


async def test_server_with_another_name_is_not_believed(run_server, ours):
    elsewhere = ours.issue("elsewhere", "quire.internal")
    async with run_server(ProcessSettings(**elsewhere.as_server)) as addresses:
        assert "--tls-server-name" in await refusal(addresses.grpc, ClientTls(ours.ca))
        named = ClientTls(ours.ca, server_name="quire.internal")
        assert await check(addresses.grpc, named)


async def test_plain_text_to_a_tls_port_is_refused(run_server, process):
    async with run_server(ProcessSettings(**process.as_server)) as addresses:
        assert "--tls-ca" in await refusal(addresses.grpc, None)
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{addresses.http}/health")


@pytest.mark.parametrize("protocols", [[], ["http/1.1"]])
async def test_a_client_that_does_not_agree_on_http_2_is_refused(run_server, process, protocols):
    async with run_server(ProcessSettings(**process.as_server)) as addresses:
        context = ssl.create_default_context(cafile=process.ca)
        context.check_hostname = False
        if protocols:
            context.set_alpn_protocols(protocols)
        host, _, port = addresses.grpc.rpartition(":")
        received = b""
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            received = await asyncio.wait_for(reader.read(1), 20)
        assert received == b""


async def test_tls_to_a_plain_port_says_so(run_server, process):
    async with run_server(ProcessSettings()) as addresses:
        assert "does not use TLS" in await refusal(addresses.grpc, ClientTls(process.ca))


async def test_unix_socket_has_no_tls(run_server, process, settings):
    settings = settings.model_copy(update=process.as_peer)
    async with run_server(settings) as addresses:
        assert await check(addresses.grpc, client_tls(process))
        assert await check(addresses.grpc, None)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_http_asks_for_a_certificate_except_by_probes(run_server, process, stranger, path):
    def context(files=None):
        made = ssl.create_default_context(cafile=process.ca)
        if files is not None:
            made.load_cert_chain(files.cert, files.key)
        return made

    async with (
        run_server(ProcessSettings(**process.as_peer)) as addresses,
        aiohttp.ClientSession(f"https://{addresses.http}") as session,
    ):
        async with session.get(path, ssl=context(process)) as response:
            assert response.status in (200, 503)
        async with session.get(path, ssl=context()) as response:
            assert (response.status == 401) == (path == "/metrics")
        with pytest.raises(aiohttp.ClientError):
            await session.get(path, ssl=context(stranger))


async def test_certificate_that_is_replaced_counts_at_the_next_connection(run_server, tmp_path):
    authority = Authority(tmp_path / "ca")
    files = authority.issue("process", "before", "127.0.0.1")
    tls = ClientTls(authority.ca, server_name="after")
    async with run_server(ProcessSettings(**files.as_server)) as addresses:
        await refusal(addresses.grpc, tls)
        files.cert.write_text("half a cert")
        assert await check(addresses.grpc, ClientTls(authority.ca)), "the old one goes on"
        authority.issue("process", "after", "127.0.0.1")
        assert await check(addresses.grpc, tls)
        context = ssl.create_default_context(cafile=authority.ca)
        async with (
            aiohttp.ClientSession() as session,
            session.get(
                f"https://{addresses.http}/health", ssl=context, server_hostname="after"
            ) as response,
        ):
            assert response.status == 200


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tls-cert={cert}"], "--tls-cert and --tls-key need each other"),
        (["--tls-cert={cert}", "--tls-key={other_key}"], "key values mismatch"),
        (["--tls-cert={cert}", "--tls-key={cert}"], "certificate {cert} with key {cert}: "),
        (["--tls-cert={cert}", "--tls-key=/nowhere"], "No such file or directory"),
        (["--tls-ca=/nowhere"], "authorities /nowhere: No such file"),
        (["--tls-ca={key}"], "authorities {key}: "),
        (["--tls-client-ca={ca}"], "--tls-client-ca needs --tls-cert"),
        (["--tls-server-name=quire"], "--tls-server-name needs --tls-ca"),
    ],
)
def test_files_that_cannot_be_used_are_named_at_the_start(
    process, stranger, capsys, flags, problem
):
    names = {
        "cert": process.cert,
        "key": process.key,
        "ca": process.ca,
        "other_key": stranger.key,
    }
    with pytest.raises(SystemExit):
        parse_settings(ProcessSettings, "p", [flag.format(**names) for flag in flags])
    assert problem.format(**names) in capsys.readouterr().err
