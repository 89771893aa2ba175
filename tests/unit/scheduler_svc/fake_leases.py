"""An API server of Kubernetes with one Lease."""

import asyncio
import contextlib
import copy
import json

from aiohttp import web

from scheduler_svc.lease import Cluster, Lease

PATH = "/apis/coordination.k8s.io/v1/namespaces/here/leases"


class FakeApi:
    """Behaves as Kubernetes does for `get`, `watch` and `update` of a Lease."""

    def __init__(self, folder):
        self.lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        self.lease["metadata"] = {"name": "cell", "resourceVersion": "1"}
        self.forbidden = set()
        """Methods that answer 403."""
        self.tokens = []
        self.num_watches = 0
        self.writing = asyncio.Event()
        """Set while updates are answered."""
        self.writing.set()
        self.are_watches_dead = False
        """Whether watches bring nothing, though their connections stay."""
        self.ends_watches = False
        """Whether each watch ends at once, as with some proxies."""
        self._watches = set()
        self.folder = folder
        for name, text in (("namespace", "here"), ("token", "first"), ("ca.crt", "")):
            (folder / name).write_text(f"{text}\n")
        self.url = ""

    @property
    def holder(self):
        return self.lease.get("spec", {}).get("holderIdentity", "")

    @property
    def cluster(self):
        return Cluster(self.url, self.folder)

    def open(self, holder):
        """Return a scheduler's end."""
        return Lease("cell", holder, self.cluster)

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_get(PATH, self._watch)
        app.router.add_get(f"{PATH}/cell", self._get)
        app.router.add_put(f"{PATH}/cell", self._put)
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def touch(self):
        """Change something else than the holder."""
        version = str(int(self.lease["metadata"]["resourceVersion"]) + 1)
        metadata = {**self.lease["metadata"], "resourceVersion": version}
        self.lease = {**self.lease, "metadata": metadata}
        self._tell("MODIFIED")

    def delete(self):
        self._tell("DELETED")

    def end_watches(self):
        """As when the version that a watch began at is too old."""
        self._tell("ERROR", {"kind": "Status", "code": 410, "message": "too old"})

    def _tell(self, kind, what=None):
        for watch in () if self.are_watches_dead else self._watches:
            watch.put_nowait((kind, copy.deepcopy(what or self.lease)))

    def _refused(self, request):
        self.tokens.append(request.headers["Authorization"])
        if request.method in self.forbidden:
            return web.json_response({"code": 403, "message": "may not"}, status=403)
        return None

    async def _get(self, request):
        return self._refused(request) or web.json_response(self.lease)

    async def _put(self, request):
        await self.writing.wait()
        if refused := self._refused(request):
            return refused
        given = await request.json()
        if given["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            return web.json_response({"code": 409, "message": "was modified"}, status=409)
        version = str(int(given["metadata"]["resourceVersion"]) + 1)
        self.lease = {**given, "metadata": {**given["metadata"], "resourceVersion": version}}
        self._tell("MODIFIED")
        return web.json_response(self.lease)

    async def _watch(self, request):
        if refused := self._refused(request):
            return refused
        assert request.query["watch"] == "1"
        assert request.query["fieldSelector"] == "metadata.name=cell"
        self.num_watches += 1
        response = web.StreamResponse()
        await response.prepare(request)
        if self.ends_watches:
            return response
        events = asyncio.Queue()
        if request.query["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            events.put_nowait(("MODIFIED", self.lease))
        self._watches.add(events)
        try:
            while True:
                kind, what = await events.get()
                line = json.dumps({"type": kind, "object": what})
                await response.write(line.encode() + b"\n")
        finally:
            self._watches.discard(events)
