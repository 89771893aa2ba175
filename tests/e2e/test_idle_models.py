"""A model that has had no request leaves the device, and the next request brings it back."""

from collections.abc import Callable
from pathlib import Path

from tests.e2e.child import eventually
from tests.e2e.generation import generate_request, read
from tests.e2e.service import Service

PROMPT = [5, 9, 11, 400, 17]


def is_unloaded(service: Service) -> bool | None:
    return service.metrics(service.worker)["quire_worker_unloaded"] == 1 or None


def test_the_next_request_waits_for_the_model_and_has_the_same_tokens(
    model_dirs, run_dir: Callable[[], Path]
):
    model = model_dirs.get("llama")
    router = ["--idle-unload-s=0.3"]
    standby = ["--standby", "--standby-s=0", "--lease=cell"]  # there is no Kubernetes here
    with Service(run_dir(), model, router=router, scheduler=standby) as service:
        request = generate_request(PROMPT, max_tokens=8, ignore_eos=True)
        expected = read(service.stub.Generate(request, timeout=60)).outputs
        eventually(lambda: is_unloaded(service), "the idle model is unloaded")
        assert read(service.stub.Generate(request, timeout=60)).outputs == expected
        eventually(lambda: is_unloaded(service), "the idle model is unloaded")
        service.scheduler.kill()
        service.wait_until_not_ready()
        service.start_scheduler()
        # Its scheduler knows no model before one is loaded, and no request comes until it is ready.
        service.wait_until_ready()
        assert service.scheduler.log.count("the lease is ignored") == 1
