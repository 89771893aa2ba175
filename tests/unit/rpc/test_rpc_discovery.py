"""Listed targets, and DNS names that stand for several targets."""

import socket

import pytest

from rpc.peers.discovery import Discovery, DnsResolver, check_targets


class FakeResolver:
    """Returns a test's answer; an answer that is no tuple is raised."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    async def resolve(self, host, port):
        self.asked.append((host, port))
        answer = self.answers[host]
        if isinstance(answer, OSError):
            raise answer
        return [f"{address}:{port}" for address in answer]


async def test_a_static_list_is_what_is_listed():
    discovery = Discovery(["b:2", "unix:/a", "dns:///c:3"])
    assert discovery.is_static
    assert await discovery.targets() == ("b:2", "unix:/a", "dns:///c:3")


async def test_a_name_stands_for_its_addresses_beside_what_is_listed():
    resolver = FakeResolver(w=("10.0.0.1", "10.0.0.2"), v=("10.0.0.2",))
    discovery = Discovery(["dns:w:1", "h:2", "dns:v:1"], resolver=resolver)
    assert not discovery.is_static
    assert await discovery.targets() == ("10.0.0.1:1", "10.0.0.2:1", "h:2")
    assert resolver.asked == [("w", 1), ("v", 1)]


async def test_a_name_is_looked_up_again_when_its_answer_is_old():
    resolver = FakeResolver(w=("10.0.0.1",))
    old, young = (
        Discovery(["dns:w:1"], resolver=resolver, interval_s=interval_s) for interval_s in (0, 3600)
    )
    await old.targets()
    await young.targets()
    resolver.answers["w"] = ("10.0.0.3",)
    assert await old.targets() == ("10.0.0.3:1",)
    assert await young.targets() == ("10.0.0.1:1",)


@pytest.mark.parametrize("failure", [(), socket.gaierror("SERVFAIL")], ids=["empty", "failed"])
async def test_a_failure_of_dns_forgets_nothing(failure):
    resolver = FakeResolver(w=failure, v=("10.0.0.9",))
    discovery = Discovery(["dns:w:1", "dns:v:1"], resolver=resolver, interval_s=0)
    assert await discovery.targets() == ("10.0.0.9:1",)
    resolver.answers["w"] = ("10.0.0.1",)
    assert await discovery.targets() == ("10.0.0.1:1", "10.0.0.9:1")
    resolver.answers["w"] = failure
    assert await discovery.targets() == ("10.0.0.1:1", "10.0.0.9:1")


async def test_the_system_resolves_a_name_to_one_family():
    assert await DnsResolver().resolve("localhost", 7) in (["127.0.0.1:7"], ["[::1]:7"])


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        ([], "is empty"),
        (["a:1", "b:1", "a:1"], "names a:1 twice"),
        (["dns:worker"], "has dns:worker, which must be dns:HOST:PORT"),
        (["dns::1"], "must be dns:HOST:PORT"),
        (["dns:a:70000"], "must be dns:HOST:PORT"),
    ],
)
def test_prompts_that_cannot_be_looked_up_are_refused(targets, problem):
    with pytest.raises(ValueError, match=problem):
        check_targets(targets)
