"""Two models behind one router: each gives its own answers, without the other too, or on demand."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from quire.v1 import inference_pb2, loading_pb2
from quire.v1.loading_pb2_grpc import LoadingServiceStub
from tests.e2e.child import Child, eventually
from tests.e2e.generation import generate_request, read
from tests.e2e.references import greedy_tokens
from tests.e2e.service import Service
from tests.models_fixture import ModelDirs

pytestmark = pytest.mark.e2e

PROMPTS = [[5 + (7 * i + j) % 490 for j in range(20 + i)] for i in range(3)]
NUM_TOKENS = 400
NAMES = ("one", "two")


class TwoModels(Service):
    """A service of one model, and a scheduler and worker of another behind the same router.

    The second worker starts unloaded.
    """

    def __init__(self, directory: Path, models: dict[str, Path]) -> None:
        self.models = models
        one, two = models.values()
        super().__init__(
            directory,
            one,
            worker=["--num-blocks=256"],
            router=[
                "--served-model-name=one",
                f"--cell=two={two}@unix:{directory}/scheduler2.sock",
            ],
        )
        self._second = {
            "gpu_worker": [
                *(f"--uds={directory}/worker2.sock", f"--model={two}", "--unloaded"),
                *(flag for flag in self._flags["worker"] if not flag.startswith(("--uds", "--mo"))),
            ],
            "scheduler_svc": [
                *(f"--uds={directory}/scheduler2.sock", "--http-port=0"),
                f"--workers=unix:{directory}/worker2.sock",
            ],
        }
        self.worker2 = Child("gpu_worker", directory / "worker2.log", {})
        self.scheduler2 = Child("scheduler_svc", directory / "scheduler2.log", {})
        self._router_flags: tuple[str, ...] = ()

    def start_worker(self) -> None:
        super().start_worker()
        self.worker2.start(self._second["gpu_worker"])

    def start_scheduler(self, *more_flags: str) -> None:
        super().start_scheduler(*more_flags)
        self.start_second_scheduler()

    def start_second_scheduler(self) -> None:
        self.scheduler2.start(self._second["scheduler_svc"])

    def use_router(self, *flags: str) -> None:
        """Restart the idle service's router with the usual flags and these."""
        if flags != self._router_flags:
            self._router_flags = flags
            self.router.stop()
            self.router.start([*self._flags["router"], *flags])
            self.wait_until_ready()

    @property
    def loading(self) -> LoadingServiceStub:
        return LoadingServiceStub(self.channel)

    def load_both(self) -> None:
        """For tests without --on-demand."""
        self.use_router()
        for name in NAMES:
            list(self.loading.Load(loading_pb2.LoadRequest(model=name), timeout=60))
        eventually(
            lambda: all(each["ready"] for each in self.ready_models().values()) or None,
            "both models are ready",
        )

    def ready_models(self) -> dict[str, dict[str, object]]:
        models: dict[str, dict[str, object]] = self.get_json(self.router, "/ready")[1]["models"]
        return models

    def num_loaded(self) -> int:
        workers = (self.worker, self.worker2)
        return sum(self.metrics(worker)["quire_worker_unloaded"] == 0 for worker in workers)

    @property
    def _children(self):
        return (*super()._children, self.scheduler2, self.worker2)


@pytest.fixture(scope="module")
def models(model_dirs: ModelDirs) -> dict[str, Path]:
    sizes = {"max_position_embeddings": 1024}
    families = ("llama", "qwen3")
    return {
        name: model_dirs.get(family, seed=seed, **sizes)
        for seed, (name, family) in enumerate(zip(NAMES, families, strict=True))
    }


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[list[int]]]:
    return {name: greedy_tokens(path, PROMPTS, NUM_TOKENS) for name, path in models.items()}


@pytest.fixture(scope="module")
def service(models: dict[str, Path], run_dir: Callable[[], Path]) -> Iterator[TwoModels]:
    with TwoModels(run_dir(), models) as service:
        yield service


def _start(service: TwoModels, pool: ThreadPoolExecutor, name: str) -> list["Future[list[int]]"]:
    def generate(prompt: list[int]) -> list[int]:
        request = generate_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        request.model = name
        return read(service.stub.Generate(request, timeout=240)).outputs[0]

    return [pool.submit(generate, prompt) for prompt in PROMPTS]


def test_both_answer_by_name_to_the_openai_client(
    service: TwoModels, expected: dict[str, list[list[int]]]
):
    service.load_both()
    url = f"{service.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == [*NAMES]
        options = {"max_tokens": 32, "temperature": 0}
        extra = {"return_token_ids": True, "ignore_eos": True}
        for name in (*NAMES, *NAMES):
            made = client.completions.create(
                model=name, prompt=PROMPTS[0], extra_body=extra, **options
            )
            assert made.model == name
            assert made.choices[0].token_ids == expected[name][0][:32]
        with pytest.raises(openai.NotFoundError, match="'three' is not served; 'one', 'two' are"):
            client.completions.create(model="three", prompt="x")


def test_a_killed_scheduler_pauses_its_own_model_only(
    service: TwoModels, expected: dict[str, list[list[int]]]
):
    service.load_both()
    with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
        before = service.metrics(service.router)["quire_generation_tokens_total"]
        streams = {name: _start(service, pool, name) for name in NAMES}
        eventually(
            lambda: (
                service.metrics(service.router)["quire_generation_tokens_total"] > before + 60
                or None
            ),
            "tokens come",
        )
        service.scheduler2.kill()
        # The other requests end while it is restarted.
        assert [each.result() for each in streams["one"]] == expected["one"]
        eventually(lambda: not service.ready_models()["two"]["ready"] or None, "it is missed")
        assert service.get_json(service.router, "/ready")[0] == 200
        service.start_second_scheduler()
        assert [each.result() for each in streams["two"]] == expected["two"]


def test_models_of_one_device_take_turns_and_lose_nothing(
    service: TwoModels, expected: dict[str, list[list[int]]]
):
    service.load_both()
    service.loading.Unload(loading_pb2.UnloadRequest(model="two"), timeout=60)
    service.use_router("--on-demand=1", "--min-loaded-s=0.5")
    with ThreadPoolExecutor(4 * len(PROMPTS)) as pool:
        streams = [(name, _start(service, pool, name)) for name in (*NAMES, *NAMES)]
        for name, started in streams:
            assert [each.result() for each in started] == expected[name]
    for name in (*NAMES, *NAMES):
        request = generate_request(PROMPTS[0], max_tokens=4, ignore_eos=True)
        request.model = name
        made = service.stub.GenerateOnce(
            inference_pb2.GenerateOnceRequest(request=request), timeout=60
        )
        assert list(made.outputs[0].token_ids) == expected[name][0][:4]
        assert service.num_loaded() == 1
