"""By its API key, a call has its tenant's requests, cache and quota, and no other tenant's."""

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from keyed_router import (
    ALICE,
    ALICE_2,
    BOB,
    CAROL,
    OPERATOR,
    bearer,
    failure,
    keyed_settings,
    running,
)

from quire.v1 import inference_pb2

pytestmark = pytest.mark.timeout(120)

CANCELLED, RESOURCE_EXHAUSTED, ABORTED = 1, 8, 10


@pytest.fixture
def settings(model_dir, tmp_path):
    return keyed_settings(model_dir, tmp_path)


@pytest.fixture
async def router(settings, tmp_path):
    async with running(settings, tmp_path) as router:
        yield router


async def test_a_key_does_not_speak_for_another_tenant(router):
    error = await failure(router.generate(BOB, ("x-quire-tenant", "alice")))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    headers = {"Authorization": f"Bearer {BOB}", "x-quire-tenant": "alice"}
    body = {"model": "tiny", "prompt": "hello"}
    async with router.http.post("/v1/completions", headers=headers, json=body) as response:
        assert response.status == 403
        assert (await response.json())["error"]["type"] == "permission_error"
    _, submit = await router.submitted(ALICE, ("x-quire-tenant", "alice"))
    assert submit.tenant == "alice"


async def test_the_requests_of_one_call_belong_to_the_tenant_of_its_key(router):
    call = router.stub.GenerateMany(metadata=bearer(ALICE))
    generate = inference_pb2.GenerateRequest(text="hello")
    await call.write(inference_pb2.GenerateManyRequest(number=1, generate=generate))
    assert (await router.scheduler.submits.get()).tenant == "alice"
    await call.write(inference_pb2.GenerateManyRequest(number=2, generate=generate, tenant="bob"))
    (refused,) = (await call.read()).events
    assert (refused.number, refused.error.code) == (2, grpc.StatusCode.PERMISSION_DENIED.value[0])
    call.cancel()
    unknown = router.stub.GenerateMany()
    assert await unknown.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_used_up_quota_stops_neither_resume_nor_leave(router):
    call = router.stub.GenerateMany(metadata=bearer(BOB))

    async def send(number, **action):
        await call.write(inference_pb2.GenerateManyRequest(number=number, **action))

    async def next_error():
        (event,) = (await call.read()).events
        return event.number, event.error.code

    generate = inference_pb2.GenerateRequest(
        text="hello", request_id="r", resumable=True, sampling={"max_tokens": 4}
    )
    await send(1, generate=generate)
    await router.scheduler.submits.get()
    await send(2, generate=generate)  # bob may have one request
    assert await next_error() == (2, RESOURCE_EXHAUSTED)
    await send(3, resume=inference_pb2.ResumeRequest(request_id="r"))
    assert await next_error() == (1, ABORTED)
    await router.scheduler.resumes.get()
    await send(3, leave=inference_pb2.LeaveRequest())
    assert await next_error() == (3, CANCELLED)
    call.cancel()


async def test_tenants_kv_is_for_operators_to_see(router):
    request = inference_pb2.DescribeKvRequest()
    error = await failure(router.stub.DescribeKv(request, metadata=bearer(ALICE)))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert await router.stub.DescribeKv(request, metadata=bearer(OPERATOR))
    request = inference_pb2.DescribeActivityRequest()
    error = await failure(router.stub.DescribeActivity(request, metadata=bearer(ALICE)))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert await router.stub.DescribeActivity(request, metadata=bearer(OPERATOR))


async def test_another_tenants_request_id_is_as_good_as_free(router):
    _, alices = await router.submitted(ALICE, request_id="mine", sampling={"max_tokens": 4})
    error = await failure(router.generate(ALICE_2, request_id="mine"))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    call, bobs = await router.submitted(BOB, request_id="mine", sampling={"max_tokens": 4})
    call.cancel()
    assert await router.scheduler.cancels.get() == [bobs.first_seq_key]
    assert alices.first_seq_key != bobs.first_seq_key


async def test_no_tenant_can_have_another_tenants_cache_salt(router):
    salts = {}
    for key in (OPERATOR, ALICE, ALICE_2, BOB):
        for salt in ("", "s", "alice", "alice\0s"):
            call, submit = await router.submitted(key, cache_salt=salt, sampling={"max_tokens": 4})
            salts[key, salt] = submit.cache_salt
            await router.finish(submit)
            async for _ in call:
                pass
    # A client that sends another tenant's derived salt gets a different one.
    _, submit = await router.submitted(BOB, cache_salt=salts[ALICE, ""], sampling={"max_tokens": 4})
    assert submit.cache_salt not in salts.values()
    assert all(len(salt) == 64 for salt in salts.values())
    for salt in ("", "s"):
        assert salts[ALICE, salt] == salts[ALICE_2, salt], "a tenant's keys share"
    assert len(set(salts.values())) == 12


async def test_quota_is_named_with_when_to_come_again(router):
    _, submit = await router.submitted(BOB, sampling={"max_tokens": 4})
    error = await failure(router.generate(BOB, sampling={"max_tokens": 4}))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_concurrent_requests is 1" in error.details()
    packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
    details = status_pb2.Status.FromString(packed).details
    assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)
    headers = {"Authorization": f"Bearer {BOB}"}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    async with router.http.post("/v1/completions", headers=headers, json=body) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
    await router.submitted(ALICE)  # other tenants are served
    await router.finish(submit)


async def test_quota_is_free_again_however_a_request_ends(router):
    small = {"max_tokens": 4}
    error = await failure(router.generate(BOB, sampling={"max_tokens": 41}))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens_in_flight" in error.details()
    call, submit = await router.submitted(BOB, sampling=small)
    call.cancel()
    await router.scheduler.cancels.get()
    call, submit = await router.submitted(BOB, sampling=small)
    await router.scheduler.refuse(submit.first_seq_key, grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    await failure(call)
    call, submit = await router.submitted(BOB, sampling=small)
    await router.finish(submit)
    async for _ in call:
        pass
    await router.submitted(BOB, sampling=small)


async def test_what_runs_on_without_its_client_is_still_in_flight(router):
    call, _ = await router.submitted(BOB, sampling={"max_tokens": 30}, resumable=True)
    call.cancel()
    await router.scheduler.leaves.get()
    error = await failure(router.generate(BOB, sampling={"max_tokens": 30}))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "tokens in flight" in error.details()


async def test_a_cancel_costs_nothing_and_frees_what_was_in_flight(router):
    call, submit = await router.submitted(
        CAROL, request_id="mine", sampling={"max_tokens": 30}, resumable=True
    )
    call.cancel()
    await router.scheduler.leaves.get()
    cancel = inference_pb2.CancelRequest(request_id="mine")
    cancelling = router.stub.Cancel(cancel, metadata=bearer(CAROL))
    asked = await router.scheduler.resumes.get()
    await router.scheduler.resumed(submit, asked.first_seq_key)
    await cancelling
    assert await router.scheduler.cancels.get() == [asked.first_seq_key]
    await router.submitted(CAROL, sampling={"max_tokens": 30})  # the second, and the last
    error = await failure(router.generate(CAROL, sampling={"max_tokens": 30}))
    assert "requests_per_minute" in error.details()


async def test_another_tenants_request_is_neither_resumed_nor_cancelled(router):
    _, alices = await router.submitted(ALICE, request_id="mine", resumable=True)
    resume = inference_pb2.ResumeRequest(request_id="mine")
    cancel = inference_pb2.CancelRequest(request_id="mine")
    forged = (*bearer(OPERATOR), ("x-quire-tenant", "alice"))
    for metadata in (forged, (*bearer(BOB), ("x-quire-tenant", "alice"))):
        for call in (
            router.stub.Resume(resume, metadata=metadata),
            router.stub.Cancel(cancel, metadata=metadata),
        ):
            assert (await failure(call)).code() is grpc.StatusCode.PERMISSION_DENIED
    call = router.stub.Resume(resume, metadata=bearer(BOB))
    asked = await router.scheduler.resumes.get()
    assert (asked.request_id, asked.tenant) == ("mine", "bob")
    call.cancel()
    assert router.scheduler.cancels.empty()
    await router.scheduler.step({alices.first_seq_key: [70]})
