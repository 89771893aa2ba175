"""The Kubernetes manifests are valid by the published schemas, and match the processes."""

import re
from pathlib import Path

import kubernetes_validate
import pytest
from manifests import (
    CUSTOM_KINDS,
    OVERLAYS,
    base_manifests,
    pod_templates,
    render,
    variables,
)

from gpu_worker.settings import WorkerSettings
from router.settings import RouterSettings
from scheduler_svc.settings import SchedulerSettings

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "router": RouterSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}


def settings_of(template):
    return SETTINGS[template["metadata"]["labels"]["app.kubernetes.io/component"]]


def check_schema(manifest):
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    "manifest", base_manifests(), ids=lambda m: f"{m['kind']}-{m['metadata']['name']}"
)
def test_base_is_valid(manifest):
    check_schema(manifest)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_is_valid(overlay):
    for manifest in render(overlay):
        if manifest["kind"] not in CUSTOM_KINDS:
            check_schema(manifest)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_of_other_projects_workloads_are_valid(overlay):
    for template in pod_templates(render(overlay)).values():
        check_schema(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
            | {"spec": template["spec"]}
        )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_variable_is_a_setting_of_the_process_that_gets_it(overlay):
    manifests = render(overlay)
    for template in pod_templates(manifests).values():
        # The common map may contain variables that only some processes read.
        fields = {name for cls in SETTINGS.values() for name in cls.model_fields}
        for name in variables(manifests, template):
            assert name.startswith("QUIRE_")
            assert name.removeprefix("QUIRE_").lower() in fields, name
        own = template["spec"]["containers"][0]["envFrom"][1]["configMapRef"]["name"]
        data = next(m["data"] for m in manifests if m["metadata"]["name"] == own)
        for name in data:
            assert name.removeprefix("QUIRE_").lower() in settings_of(template).model_fields, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_argument_is_a_flag(overlay):
    for template in pod_templates(render(overlay)).values():
        for argument in template["spec"]["containers"][0].get("args", ()):
            name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
            assert name in settings_of(template).model_fields, argument


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_values_are_what_the_settings_take(overlay, monkeypatch, tmp_path):
    (tmp_path / "tokenizer.json").touch()
    manifests = render(overlay)
    for template in pod_templates(manifests).values():
        with monkeypatch.context() as environment:
            for name, value in variables(manifests, template).items():
                if value:
                    environment.setenv(name, value)
            environment.setenv("QUIRE_MODEL", str(tmp_path))
            settings_of(template)()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_are_those_that_the_processes_listen_on(overlay):
    for template in pod_templates(render(overlay)).values():
        fields = settings_of(template).model_fields
        (container,) = template["spec"]["containers"]
        if "ports" in container:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert ports.pop("http") == fields["http_port"].default
            assert ports.pop("grpc") == fields["grpc_port"].default
            assert not ports or f"--master-port={ports.pop('ranks')}" in container["args"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_has_time_to_drain(overlay):
    manifests = render(overlay)
    for name, template in pod_templates(manifests).items():
        (container,) = template["spec"]["containers"]
        pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain = int(variables(manifests, template)["QUIRE_DRAIN_S"])
        needed = (
            2 if name == "scheduler" else drain
        )  # a scheduler hands its requests over within two seconds
        assert template["spec"]["terminationGracePeriodSeconds"] > pause + needed, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_pods(overlay):
    manifests = render(overlay)
    labels = [t["metadata"]["labels"].items() for t in pod_templates(manifests).values()]
    for manifest in manifests:
        spec = manifest.get("spec", {})
        wanted = {
            "Service": lambda spec: spec["selector"],
            "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
            "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
        }.get(manifest["kind"])
        if wanted is not None:
            assert any(wanted(spec).items() <= have for have in labels), manifest["metadata"][
                "name"
            ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_targets_name_services_of_the_overlay(overlay):
    manifests = render(overlay)
    services = {m["metadata"]["name"] for m in manifests if m["kind"] == "Service"}
    services |= {m["metadata"]["name"] for m in manifests if m["kind"] == "LeaderWorkerSet"}
    for template in pod_templates(manifests).values():
        told = variables(manifests, template)
        for name in ("QUIRE_SCHEDULER", "QUIRE_WORKERS"):
            for target in re.findall(r"([a-z0-9.-]+):\d+", told.get(name, "")):
                assert target.rpartition(".")[2] in services, target


def test_images_are_targets_of_the_dockerfile():
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    targets = re.findall(r"^FROM .* AS (\S+)$", dockerfile, re.MULTILINE)
    for template in pod_templates(base_manifests()).values():
        (container,) = template["spec"]["containers"]
        assert container["image"].removeprefix("quire-") in targets
