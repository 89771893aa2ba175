"""deploy/ and compose.yaml agree with each other and with the processes' settings."""

import json
import re
import tomllib

import pytest
import yaml

from gpu_worker.settings import WorkerSettings
from quire.cli.settings import ProbeSettings
from quire.cli.up.layout import SHIPPED_MODEL
from router.settings import RouterSettings
from scheduler_svc.settings import SchedulerSettings
from tests.compose.deployment import ROOT
from tests.compose.engine import docker, why_no_compose

SETTINGS = {"router": RouterSettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}
OBSERVERS = {"collector", "jaeger", "prometheus", "grafana"}
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
GPU = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())
OBSERVABILITY = ROOT / "deploy" / "observability"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
STAGES = dict(re.findall(r"(?ms)^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE))
FILES = {
    "cpu": ["--file", "compose.yaml"],
    "gpu": ["--file", "compose.yaml", "--file", "compose.gpu.yaml"],
    "observed": ["--env-file", "deploy/observability/observe.env"],
}


def _default(value: str) -> str:
    """The default of a variable of compose.yaml."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value)


def test_services_are_the_processes_and_the_observers():
    assert SERVICES.keys() == SETTINGS.keys() | OBSERVERS
    assert {name for name, service in SERVICES.items() if "profiles" in service} == OBSERVERS


@pytest.mark.parametrize("name", SETTINGS)
def test_each_variable_is_a_setting_of_the_process_and_has_a_valid_value(name, monkeypatch):
    fields = SETTINGS[name].model_fields
    in_image = dict(re.findall(r"(QUIRE_\w+)=(\S+)", STAGES["runtime"] + STAGES[name]))
    on_gpu = GPU["services"].get(name, {}).get("environment", {})
    for environment in (SERVICES[name]["environment"], in_image, on_gpu):
        for variable, value in environment.items():
            if variable in ("HF_HOME", "HF_TOKEN"):  # the hub library reads these
                continue
            field = variable.removeprefix("QUIRE_").lower()
            assert field in fields, f"{variable} is no setting of the {name}"
            monkeypatch.setenv(
                variable, str(SHIPPED_MODEL) if field == "model" else _default(value)
            )
    SETTINGS[name]()


@pytest.mark.parametrize("name", SETTINGS)
def test_each_service_is_a_stage_that_exposes_and_probes_its_ports(name):
    assert SERVICES[name]["build"]["target"] == name
    stage = STAGES[name]
    assert f'ENTRYPOINT ["quire-{name}"]' in stage
    fields = SETTINGS[name].model_fields
    ports = {str(fields[port].default) for port in ("http_port", "grpc_port")}
    assert set(re.findall(r"\d+", re.findall("EXPOSE (.*)", stage)[0])) == ports
    assert set(re.findall(r"QUIRE_\w+_PORT=(\d+)", stage)) == ports


def test_health_check_takes_the_variables_that_tell_a_process_where_it_listens():
    assert 'CMD ["quire", "probe"]' in STAGES["runtime"]
    told = set(re.findall(r"QUIRE_(HOST|HTTP_PORT)=", DOCKERFILE))
    assert told == {"HOST", "HTTP_PORT"}
    assert told <= {name.upper() for name in ProbeSettings.model_fields}


def test_processes_find_each_other_by_service_name_and_port():
    scheduler, worker = (SETTINGS[name].model_fields["grpc_port"].default for name in
                         ("scheduler", "worker"))  # fmt: skip
    assert SERVICES["router"]["environment"]["QUIRE_SCHEDULER"] == f"scheduler:{scheduler}"
    assert SERVICES["scheduler"]["environment"]["QUIRE_WORKERS"] == f"worker:{worker}"


@pytest.mark.parametrize("name", SETTINGS)
def test_engine_waits_longer_than_a_process_drains(name):
    grace_s = float(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s > float(SERVICES[name]["environment"]["QUIRE_DRAIN_S"])


def test_ports_are_published_on_the_loopback_by_default():
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports
    assert all(_default(port).startswith("127.0.0.1:") for port in ports)


def test_of_the_processes_only_the_router_publishes_its_ports():
    published = {name for name, service in SERVICES.items() if "ports" in service}
    assert published & SETTINGS.keys() == {"router"}


def test_a_network_connects_only_those_that_call_each_other():
    members = {
        network: {name for name, service in SERVICES.items() if network in service["networks"]}
        for network in COMPOSE["networks"]
    }
    reporting = {"prometheus", "collector"}
    assert members == {
        "routing": {"router", "scheduler"} | reporting,
        "working": {"scheduler", "worker"} | reporting,
        "watching": OBSERVERS,
    }


@pytest.mark.parametrize("settings", SETTINGS.values())
def test_without_a_flag_a_process_listens_on_the_loopback(settings):
    addresses = {"host", "master_addr"} & settings.model_fields.keys()
    assert {settings.model_fields[name].default for name in addresses} == {"127.0.0.1"}


def test_build_arguments_exist_in_the_dockerfile():
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    for service in (*SERVICES.values(), *GPU["services"].values()):
        assert set(service.get("build", {}).get("args", ())) <= declared


def test_torch_is_the_one_that_make_installs():
    makefile = (ROOT / "Makefile").read_text()
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)
    assert f"ARG TORCH={torch}\n" in DOCKERFILE
    for service in (SERVICES["worker"], GPU["services"]["worker"]):
        assert _default(service["build"]["args"]["TORCH"]) == torch


def test_files_copied_into_an_image_exist_and_are_let_through():
    let_through = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    for name in " ".join(copied).split():
        assert f"!{name}\n" in let_through
        assert (ROOT / name).exists()


@pytest.mark.parametrize("name", SETTINGS)
def test_processes_do_not_run_as_root(name):
    assert re.search(r"^USER \d+$", STAGES[name], re.MULTILINE)


def test_version_on_the_images_is_the_project_s():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"ARG VERSION={project['version']}\n" in DOCKERFILE


def test_router_and_scheduler_require_nothing_of_the_worker_s():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [line for line in project["dependencies"] if re.match("torch|triton", line)]
    assert STAGES["service"].count("--from=worker") == 0


def test_mounted_files_exist():
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", ())]
    sources = [source for source in (_default(mount).split(":")[0] for mount in mounts)
               if source.startswith("./")]  # fmt: skip
    assert sources
    assert all((ROOT / source).exists() for source in sources)


def test_prometheus_scrapes_each_process_at_its_port():
    config = yaml.safe_load((OBSERVABILITY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    targets = {target for group in job["static_configs"] for target in group["targets"]}
    assert targets == {
        f"{name}:{settings.model_fields['http_port'].default}"
        for name, settings in SETTINGS.items()
    }


def test_dashboards_ask_data_sources_that_are_provisioned():
    provisioning = OBSERVABILITY / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "quire.yaml").read_text())
    uids = {source["uid"] for source in sources["datasources"]}
    for path in (OBSERVABILITY / "grafana" / "dashboards").iterdir():
        panels = json.loads(path.read_text())["panels"]
        asked = {panel["datasource"]["uid"] for panel in panels if "datasource" in panel}
        assert asked <= uids


def test_spans_go_to_the_collector_and_from_there_to_jaeger():
    environment = (OBSERVABILITY / "observe.env").read_text()
    config = yaml.safe_load((OBSERVABILITY / "collector.yaml").read_text())
    port = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].split(":")[1]
    assert f"QUIRE_OTLP_TRACES_ENDPOINT=http://collector:{port}\n" in environment
    assert config["exporters"]["otlp"]["endpoint"] == "jaeger:4317"


@pytest.mark.parametrize("variant", FILES)
@pytest.mark.skipif(why_no_compose() is not None, reason=why_no_compose() or "")
def test_compose_accepts_the_files(variant):
    docker("compose", "--project-directory", str(ROOT), *_from_root(FILES[variant]), "config")


def _from_root(arguments: list[str]) -> list[str]:
    return [word if word.startswith("--") else str(ROOT / word) for word in arguments]
