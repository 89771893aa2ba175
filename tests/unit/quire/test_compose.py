"""compose.yaml and the Dockerfile agree with each other and with the processes' settings."""

import re
from pathlib import Path

import pytest
import yaml

from gpu_worker.settings import WorkerSettings
from quire.cli.layout import SHIPPED_MODEL
from router.settings import RouterSettings
from scheduler_svc.settings import SchedulerSettings

ROOT = Path(__file__).parents[3]
SETTINGS = {"router": RouterSettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def test_there_are_the_three_services():
    assert SERVICES.keys() == SETTINGS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_each_variable_is_a_setting_of_the_process_and_has_a_valid_value(name, monkeypatch):
    fields = SETTINGS[name].model_fields
    for variable, value in SERVICES[name]["environment"].items():
        field = variable.removeprefix("QUIRE_").lower()
        assert field in fields, f"{variable} is no setting of the {name}"
        default = re.sub(r"\$\{\w+:-(.*)\}", r"\1", value)
        monkeypatch.setenv(variable, str(SHIPPED_MODEL) if field == "model" else default)
    SETTINGS[name]()


@pytest.mark.parametrize("name", SETTINGS)
def test_each_service_is_a_stage_that_exposes_its_ports(name):
    assert SERVICES[name]["build"]["target"] == name
    stage = DOCKERFILE.split(f"AS {name}\n")[1].split("FROM ")[0]
    environment = SERVICES[name]["environment"]
    ports = {environment["QUIRE_HTTP_PORT"], environment["QUIRE_GRPC_PORT"]}
    assert set(re.findall(r"\d+", re.findall("EXPOSE (.*)", stage)[0])) == ports


def test_processes_find_each_other_by_service_name_and_port():
    environments = {name: service["environment"] for name, service in SERVICES.items()}
    scheduler_port = environments["scheduler"]["QUIRE_GRPC_PORT"]
    worker_port = environments["worker"]["QUIRE_GRPC_PORT"]
    assert environments["router"]["QUIRE_SCHEDULER"] == f"scheduler:{scheduler_port}"
    assert environments["scheduler"]["QUIRE_WORKERS"] == f"worker:{worker_port}"


@pytest.mark.parametrize("name", SETTINGS)
def test_each_service_is_checked_by_its_readiness(name):
    assert "/ready" in SERVICES[name]["healthcheck"]["test"][-1]


def test_build_arguments_exist_in_the_dockerfile():
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    for service in SERVICES.values():
        assert set(service["build"]["args"]) <= declared


def test_files_copied_into_the_image_exist_and_are_let_through():
    let_through = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    for name in " ".join(copied).split():
        assert f"!{name}\n" in let_through
        assert (ROOT / name).exists()


def test_processes_do_not_run_as_root():
    runtime = DOCKERFILE.split("AS runtime\n")[1].split("FROM ")[0]
    assert re.search(r"^USER \d+$", runtime, re.MULTILINE)
