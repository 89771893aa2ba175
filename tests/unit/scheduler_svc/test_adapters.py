"""A scheduler's adapters when workers attach, are lost, or refuse."""

import asyncio

import pytest

from contract.errors import InvalidArgumentError, UnavailableError
from contract.lora import LoadedAdapter, LoraAdapter
from scheduler_svc.workers import adapters as adapters_module
from scheduler_svc.workers.adapters import Adapters

OLD, NEW = (LoraAdapter("sql", digest * 32, "/sql") for digest in (b"o", b"n"))
CHAT = LoraAdapter("chat", b"c" * 32, "/chat")
GONE = InvalidArgumentError("directory", "is not there")


class Worker:
    """A fake worker with adapters; `found` has the contents of its directories, or their errors."""

    def __init__(self, *has, found=()):
        self.has = {adapter.name: adapter for adapter in has}
        self.found = dict(found)
        self.is_ending = False
        self.on_load = lambda: None
        self.asked = []

    async def load_adapter(self, name, directory):
        self.asked.append(name)
        self.on_load()
        found = self.found.get(directory, GONE)
        if isinstance(found, Exception):
            raise found
        was_there = self.has.setdefault(name, found) == found and name in self.asked[:-1]
        return LoadedAdapter(found, was_there)

    async def unload_adapter(self, adapter):
        self.asked.append(f"not {adapter.name}")
        if self.has.get(adapter.name) == adapter:
            del self.has[adapter.name]


class Service:
    def __init__(self):
        self.sessions = {}  # as a roster has them
        self.is_used = False
        self.told = []
        self.adapters = Adapters(
            self, is_used=lambda _: self.is_used, on_change=lambda now: self.told.append(set(now))
        )

    async def attach(self, name, worker):
        await self.adapters.settle(name, worker, list(worker.has.values()))
        self.sessions[name] = worker
        return worker


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(adapters_module, "_POLL_S", 0.0)
    return Service()


async def begin_unloading(service, name):
    """Begin an unload while a request uses the adapter."""
    service.is_used = True
    unloading = asyncio.create_task(service.adapters.unload(name))
    await asyncio.sleep(0)
    assert service.adapters.is_leaving(service.adapters.held[0])
    return unloading


async def test_what_was_to_be_unloaded_takes_no_other_of_its_name_along(service):
    await service.attach("a", Worker(OLD))
    unloading = await begin_unloading(service, "sql")
    service.sessions.clear()
    worker = await service.attach("b", Worker(NEW))
    service.is_used = False
    await unloading
    assert service.adapters.held == service.adapters.offered == (NEW,)
    assert worker.asked == []
    assert service.told == [{OLD}, set(), {NEW}]
    assert not service.adapters.is_leaving(NEW)
    # its adapter was to be unloaded
    back = await service.attach("a", Worker(OLD, found={"/sql": NEW}))
    assert back.has == {"sql": NEW}


async def test_what_was_lost_and_loaded_again_is_not_what_was_to_be_unloaded(service):
    await service.attach("a", Worker(OLD))
    unloading = await begin_unloading(service, "sql")
    service.sessions.clear()
    worker = await service.attach("b", Worker())  # this worker cannot load it
    worker.found["/sql"] = OLD
    await service.adapters.load("sql", "/sql")
    service.is_used = False
    await unloading
    assert service.adapters.offered == (OLD,)
    assert worker.has == {"sql": OLD}


async def test_what_the_others_refuse_nobody_has_and_they_are_asked_once(service):
    other = await service.attach("a", Worker())
    worker = await service.attach("b", Worker(CHAT))
    assert (other.asked, worker.asked) == (["chat"], ["not chat"])
    assert service.adapters.held == ()
    await service.attach("b", worker)
    assert other.asked == ["chat"]


async def test_what_the_others_find_is_another_and_nobody_has_either(service):
    other = await service.attach("a", Worker(found={"/sql": OLD}))
    worker = await service.attach("b", Worker(NEW))
    assert other.has == worker.has == {}
    assert service.adapters.held == ()


async def test_a_worker_that_is_refused_has_asked_nothing_of_the_others(service):
    other = await service.attach("a", Worker(OLD, found={"/chat": CHAT}))
    worker = Worker(CHAT)
    with pytest.raises(UnavailableError, match="worker b cannot join: directory is not there"):
        await service.attach("b", worker)
    assert other.asked == []
    assert service.adapters.offered == (OLD,)


async def test_routers_are_told_what_has_changed_before_a_worker_is_refused(service):
    await service.attach("a", Worker(found={"/chat": CHAT, "/sql": UnavailableError("lost")}))
    with pytest.raises(UnavailableError, match="lost"):
        await service.attach("b", Worker(CHAT, OLD))
    assert service.told == [{CHAT}]


async def test_what_was_lost_is_unloaded_wherever_it_comes_from(service):
    await service.attach("a", Worker(OLD))
    service.sessions.clear()
    await service.attach("a", Worker())
    assert service.told == [{OLD}, set()]
    service.sessions.clear()
    worker = await service.attach("b", Worker(OLD))
    assert worker.has == {}
    assert service.adapters.held == ()


FOUND = {"/chat": CHAT, "/sql": OLD}


async def test_a_worker_that_loads_what_is_forgotten_meanwhile_is_refused(service):
    await service.attach("a", Worker(OLD, CHAT))
    service.sessions.clear()
    worker = Worker(found=FOUND)
    worker.on_load = service.adapters.forget
    with pytest.raises(UnavailableError, match="worker b cannot join: another model is served"):
        await service.attach("b", worker)
    assert worker.asked == ["chat"]
    assert service.adapters.held == ()
    await service.attach("c", Worker(NEW))
    assert service.adapters.offered == (NEW,)


async def test_what_cannot_be_loaded_and_is_forgotten_meanwhile_is_not_lost(service):
    await service.attach("a", Worker(OLD, CHAT))
    service.sessions.clear()
    worker = Worker()
    worker.on_load = service.adapters.forget
    with pytest.raises(UnavailableError, match="another model is served now"):
        await service.attach("b", worker)
    back = await service.attach("c", Worker(OLD))
    assert back.has == {"sql": OLD}  # it is not the adapter that was unloaded


async def test_what_is_loaded_at_all_when_they_are_forgotten_is_not_held(service):
    other = await service.attach("a", Worker(found=FOUND))
    other.on_load = service.adapters.forget
    with pytest.raises(UnavailableError, match="another model is served now"):
        await service.adapters.load("sql", "/sql")
    with pytest.raises(UnavailableError, match="another model is served now"):
        await service.attach("b", Worker(CHAT))
    assert service.adapters.held == ()


async def test_a_draining_process_gets_no_calls(service):
    ending = await service.attach("a", Worker())
    staying = await service.attach("b", Worker(found={"/sql": OLD}))
    ending.is_ending = True
    await service.adapters.load("sql", "/sql")
    await service.adapters.unload("sql")
    assert (ending.asked, staying.asked) == ([], ["sql", "not sql"])
    staying.is_ending = True
    with pytest.raises(UnavailableError, match="no worker is attached"):
        await service.adapters.load("sql", "/sql")
