"""The Kubernetes manifests are valid by the published schemas, and match the processes."""

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from manifests import (
    CUSTOM_KINDS,
    KUBERNETES,
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


def callers(policies, component):
    """Who may call which port of a component, by these policies: components or namespaces."""
    labels = {"app.kubernetes.io/name": "quire", "app.kubernetes.io/component": component}
    found = set()
    for policy in policies:
        spec = policy["spec"]
        assert spec["policyTypes"] == ["Ingress"]
        if not spec["podSelector"]["matchLabels"].items() <= labels.items():
            continue
        for rule in spec.get("ingress", ()):
            ports = [port["port"] for port in rule.get("ports", ({"port": "any"},))]
            callers = [caller(peer) for peer in rule.get("from", ("anyone",))]
            found |= {(port, each) for port in ports for each in callers}
    return found


def caller(peer):
    if peer == "anyone":
        return peer
    ((kind, selector),) = peer.items()
    labels = selector["matchLabels"]
    if kind == "namespaceSelector":
        return f"namespace {labels['kubernetes.io/metadata.name']}"
    assert labels["app.kubernetes.io/name"] == "quire"
    return labels["app.kubernetes.io/component"]


def policies_in(path):
    manifests = yaml.safe_load_all((KUBERNETES / path).read_text())
    return [each for each in manifests if each["kind"] == "NetworkPolicy"]


def test_only_the_routers_ports_are_open_and_each_other_port_to_its_callers():
    """Probes come from the node, which no policy stops."""
    base = policies_in("base/network-policies.yaml")
    assert {"app.kubernetes.io/name": "quire"} in [
        each["spec"]["podSelector"]["matchLabels"] for each in base if "ingress" not in each["spec"]
    ], "what no policy names is closed"
    assert callers(base, "router") == {("http", "anyone"), ("grpc", "anyone")}
    assert callers(base, "scheduler") == {("grpc", "router")}
    assert callers(base, "worker") == {("grpc", "scheduler"), ("grpc", "worker")}


def test_components_and_overlays_open_no_more_than_they_need():
    metrics = policies_in("components/monitoring/network-policy.yaml")
    for component in SETTINGS:
        assert callers(metrics, component) == {("http", "namespace monitoring")}
    ranks = policies_in("overlays/worker-group/worker-group.yaml")
    assert callers(ranks, "worker") == {("any", "worker")}
    assert callers(ranks, "router") | callers(ranks, "scheduler") == set()
    others = {path for path in KUBERNETES.rglob("*.yaml") if "NetworkPolicy" in path.read_text()}
    assert {path.name for path in others} == {
        *("network-policies.yaml", "network-policy.yaml", "worker-group.yaml")
    }


def test_images_are_targets_of_the_dockerfile():
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    targets = re.findall(r"^FROM .* AS (\S+)$", dockerfile, re.MULTILINE)
    for template in pod_templates(base_manifests()).values():
        (container,) = template["spec"]["containers"]
        assert container["image"].removeprefix("quire-") in targets
