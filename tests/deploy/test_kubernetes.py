"""The Helm chart's manifests are valid by the published schemas, and match the processes."""

import json
import os
import re
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from custom_schemas import CUSTOM_SCHEMAS
from manifests import component_of, manifests_of, pod_templates, variables

from docs.generate.manifests import CHART, EXAMPLES, HELM, render
from gpu_worker.settings import WorkerSettings
from router.settings import RouterSettings
from scheduler_svc.settings import SchedulerSettings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not on this machine")
SETTINGS = {
    "router": RouterSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}


LIBRARIES = {"HF_HOME", "HF_TOKEN"}
"""Variables that libraries read."""
every_example = pytest.mark.parametrize("example", EXAMPLES)


def settings_of(template):
    return SETTINGS[component_of(template)]


def check_schema(manifest):
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@every_example
def test_manifests_are_valid(example):
    for manifest in manifests_of(example):
        name = manifest["apiVersion"], manifest["kind"]
        if name in CUSTOM_SCHEMAS:
            jsonschema.validate(manifest["spec"], CUSTOM_SCHEMAS[name])
        else:
            check_schema(manifest)


def test_each_kind_of_another_project_is_in_an_example():
    found = {(m["apiVersion"], m["kind"]) for example in EXAMPLES for m in manifests_of(example)}
    assert found >= CUSTOM_SCHEMAS.keys()


@every_example
def test_pods_of_other_projects_workloads_are_valid(example):
    for template in pod_templates(manifests_of(example)).values():
        check_schema(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
            | {"spec": template["spec"]}
        )


@every_example
def test_each_variable_is_a_setting_of_the_process_that_gets_it(example):
    manifests = manifests_of(example)
    for template in pod_templates(manifests).values():
        # The common map may contain variables that only some processes read.
        fields = {name for cls in SETTINGS.values() for name in cls.model_fields}
        for name in variables(manifests, template):
            if name not in LIBRARIES:
                assert name.startswith("QUIRE_")
                assert name.removeprefix("QUIRE_").lower() in fields, name
        own = template["spec"]["containers"][0]["envFrom"][1]["configMapRef"]["name"]
        data = next(
            m["data"]
            for m in manifests
            if m["kind"] == "ConfigMap" and m["metadata"]["name"] == own
        )
        for name in data.keys() - LIBRARIES:
            assert name.removeprefix("QUIRE_").lower() in settings_of(template).model_fields, name


@every_example
def test_each_argument_is_a_flag(example):
    for template in pod_templates(manifests_of(example)).values():
        for argument in template["spec"]["containers"][0].get("args", ()):
            name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
            assert name in settings_of(template).model_fields, argument


@every_example
def test_values_are_what_the_settings_take(example, monkeypatch, tmp_path):
    (tmp_path / "tokenizer.json").touch()
    manifests = manifests_of(example)
    for template in pod_templates(manifests).values():
        with monkeypatch.context() as environment:
            for name, value in variables(manifests, template).items():
                if value:
                    environment.setenv(name, value)
            environment.setenv("QUIRE_MODEL", str(tmp_path))
            settings_of(template)()


@every_example
def test_ports_are_those_that_the_processes_listen_on(example):
    manifests = manifests_of(example)
    for template in pod_templates(manifests).values():
        fields = settings_of(template).model_fields
        (container,) = template["spec"]["containers"]
        if "ports" in container:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert ports.pop("http") == fields["http_port"].default
            assert ports.pop("grpc") == fields["grpc_port"].default
            told = variables(manifests, template)
            for name, flag in (("kv-events", "ZMQ"), ("kv-replay", "REPLAY")):
                if name in ports:
                    assert told[f"QUIRE_KV_EVENTS_{flag}"] == f"tcp://*:{ports.pop(name)}"
            assert not ports or f"--master-port={ports.pop('ranks')}" in container["args"]


@every_example
def test_a_pod_has_time_to_drain(example):
    manifests = manifests_of(example)
    for name, template in pod_templates(manifests).items():
        (container,) = template["spec"]["containers"]
        pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain = int(variables(manifests, template)["QUIRE_DRAIN_S"])
        # a scheduler hands its requests over within two seconds
        needed = 2 if component_of(template) == "scheduler" else drain
        assert template["spec"]["terminationGracePeriodSeconds"] > pause + needed, name


@every_example
def test_selectors_find_pods(example):
    manifests = manifests_of(example)
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


@every_example
def test_targets_name_services_of_the_release(example):
    manifests = manifests_of(example)
    services = {m["metadata"]["name"] for m in manifests if m["kind"] == "Service"}
    services |= {m["metadata"]["name"] for m in manifests if m["kind"] == "LeaderWorkerSet"}
    for template in pod_templates(manifests).values():
        told = variables(manifests, template)
        for name in ("QUIRE_SCHEDULER", "QUIRE_WORKERS"):
            for target in re.findall(r"([a-z0-9.-]+):\d+", told.get(name, "")):
                assert target.rpartition(".")[2] in services, target


def callers(policies, component):
    """By port of a component: the components and namespaces that these policies let call it."""
    labels = {f"app.kubernetes.io/{label}": "quire" for label in ("name", "instance")} | {
        "app.kubernetes.io/component": component
    }
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
    if len(peer) == 2:
        ((label, value),) = peer["podSelector"]["matchLabels"].items()
        return f"{label}: {value} in {caller({'namespaceSelector': peer['namespaceSelector']})}"
    ((kind, selector),) = peer.items()
    labels = selector["matchLabels"]
    if kind == "namespaceSelector":
        return f"namespace {labels['kubernetes.io/metadata.name']}"
    assert labels["app.kubernetes.io/name"] == "quire"
    return labels["app.kubernetes.io/component"]


def policies(example):
    return [each for each in manifests_of(example) if each["kind"] == "NetworkPolicy"]


def test_only_the_routers_ports_are_open_and_each_other_port_to_its_callers():
    """Probes come from the node, and no policy applies to them."""
    found = policies("cpu-demo")
    assert {"app.kubernetes.io/name": "quire", "app.kubernetes.io/instance": "quire"} in [
        each["spec"]["podSelector"]["matchLabels"]
        for each in found
        if "ingress" not in each["spec"]
    ], "what no policy names is closed"
    scraper = ("http", "namespace monitoring")
    assert callers(found, "router") == {("http", "anyone"), ("grpc", "anyone"), scraper}
    assert callers(found, "scheduler") == {("grpc", "router"), scraper}
    assert callers(found, "worker") == {("grpc", "scheduler"), ("grpc", "worker"), scraper}


def test_the_ranks_of_a_group_reach_one_another():
    found = policies("worker-group")
    assert callers(found, "worker") - callers(policies("cpu-demo"), "worker") == {("any", "worker")}


def test_named_subscribers_reach_kv_events_at_the_service_and_no_one_else_does():
    found, closed = policies("cell"), policies("cpu-demo")
    ports = {"kv-events", "kv-replay"}
    peers = {(port, "app: endpoint-picker in namespace llm-d") for port in ports}
    assert callers(found, "scheduler") - callers(closed, "scheduler") == peers
    manifests = manifests_of("cell")
    (service,) = (
        each["spec"]
        for each in manifests
        if (each["kind"], each["metadata"]["name"]) == ("Service", "quire-scheduler")
    )
    assert {each["name"] for each in service["ports"]} == {"grpc", "http"} | ports
    template = pod_templates(manifests)["quire-scheduler"]
    (container,) = template["spec"]["containers"]
    assert ports < {each["name"] for each in container["ports"]}
    names = [each["name"] for each in container["env"]]
    assert names == ["QUIRE_SCHEDULER_ID", "QUIRE_KV_EVENTS_TOPIC"], "the second may use the first"


def test_workers_that_use_nixl_reach_one_another_at_every_port():
    added = callers(policies("cell"), "worker") - callers(policies("prefill-decode"), "worker")
    assert added == {("any", "worker")}


@every_example
def test_images_are_targets_of_the_dockerfile(example):
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    targets = re.findall(r"^FROM .* AS (\S+)$", dockerfile, re.MULTILINE)
    for template in pod_templates(manifests_of(example)).values():
        (container,) = template["spec"]["containers"]
        name, _, tag = container["image"].partition(":")
        assert name.removeprefix("quire-") in targets
        assert tag == "latest"


# The chart's values.


def test_two_releases_of_a_namespace_share_no_name_and_no_pod():
    def names(release):
        text = render(EXAMPLES["one-gpu"]).replace("quire", release)
        return {(m["kind"], m["metadata"]["name"]) for m in yaml.safe_load_all(text) if m}

    assert len(names("a")) == len(manifests_of("one-gpu"))
    for manifest in manifests_of("one-gpu"):
        assert manifest["metadata"]["name"].startswith("quire")
        selector = manifest.get("spec", {}).get("selector") or {}
        labels = selector.get("matchLabels", selector)
        assert not labels or labels["app.kubernetes.io/instance"] == "quire"


def test_no_variable_of_kubernetes_looks_like_a_setting():
    """With service links, Kubernetes gives each pod variables such as QUIRE_WORKER_PORT."""
    for template in pod_templates(manifests_of("cpu-demo")).values():
        assert template["spec"]["enableServiceLinks"] is False


def test_pods_restart_when_their_settings_change():
    def checksums(*more):
        return {
            name: template["metadata"]["annotations"]["checksum/settings"]
            for name, template in pod_templates(manifests_of("cpu-demo", *more)).items()
        }

    before = checksums()
    for value, restarted in (
        ("worker.settings.max-num-seqs=8", "quire-worker"),
        ("worker.idleUnloadSeconds=60", "quire-router"),
        ("scheduler.lease=true", "quire-scheduler"),
    ):
        changed = checksums("--set", value)
        assert {name for name in before if before[name] != changed[name]} == {restarted}
    assert not before.items() & checksums("--set", "settings.log-level=debug").items()


def test_settings_become_variables():
    more = ("--set", "settings.log-level=debug", "--set", "router.settings.limits={1,2}")
    manifests = manifests_of("cpu-demo", *more)
    given = variables(manifests, pod_templates(manifests)["quire-router"])
    assert (given["QUIRE_LOG_LEVEL"], given["QUIRE_LIMITS"]) == ("debug", "1,2")


def test_a_token_reaches_the_processes_that_download():
    manifests = manifests_of("several-workers", "--set", "model.tokenSecret=hub")
    having = [
        component_of(template)
        for template in pod_templates(manifests).values()
        if any(
            entry.get("valueFrom", {}).get("secretKeyRef") == {"name": "hub", "key": "HF_TOKEN"}
            for entry in template["spec"]["containers"][0].get("env", ())
        )
    ]
    assert having == ["router", "worker"]


@pytest.mark.parametrize(("pod", "role"), [("quire-worker-0", "prefill"), ("w-11", "decode")])
def test_the_first_workers_prefill(pod, role, tmp_path):
    template = pod_templates(manifests_of("prefill-decode"))["quire-worker"]
    command = template["spec"]["containers"][0]["command"]
    worker = tmp_path / "quire-worker"
    worker.write_text("#!/bin/sh\necho $@\n")
    worker.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "QUIRE_WORKER_ID": pod}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"--role={role}\n"


def test_a_disaggregated_set_has_a_role_for_prompts_and_one_for_decoding():
    (found,) = (m for m in manifests_of("disaggregated-set") if m["kind"] == "DisaggregatedSet")
    roles = {}
    for role in found["spec"]["roles"]:
        template = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        (container,) = template["spec"]["containers"]
        roles[role["name"]] = role["spec"]["replicas"], container["args"]
    assert roles == {"prefill": (1, ["--role=prefill"]), "decode": (3, ["--role=decode"])}


def only(manifests, kind):
    (found,) = (each for each in manifests if each["kind"] == kind)
    return found


def test_schedulers_may_write_their_lease_and_nothing_else():
    manifests = manifests_of("several-workers")
    templates = pod_templates(manifests)
    told = variables(manifests, templates["quire-scheduler"])
    lease, role, binding = (only(manifests, kind) for kind in ("Lease", "Role", "RoleBinding"))
    assert told["QUIRE_LEASE"] == lease["metadata"]["name"]
    assert role["rules"] == [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [told["QUIRE_LEASE"]],
            "verbs": ["get", "watch", "update"],
        }
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    accounts = {
        component_of(each): (
            each["spec"]["serviceAccountName"],
            each["spec"]["automountServiceAccountToken"],
        )
        for each in templates.values()
    }
    assert accounts == {
        "router": ("quire", False),
        "scheduler": (subject["name"], True),
        "worker": ("quire", False),
    }
    names = [m["metadata"]["name"] for m in manifests if m["kind"] == "ServiceAccount"]
    assert sorted(names) == ["quire", subject["name"]]


def test_without_a_lease_no_pod_may_call_kubernetes():
    manifests = manifests_of("cpu-demo")
    assert not {each["kind"] for each in manifests} & {"Lease", "Role", "RoleBinding"}
    for template in pod_templates(manifests).values():
        assert template["spec"]["serviceAccountName"] == "quire"
        assert template["spec"]["automountServiceAccountToken"] is False


@every_example
def test_a_scheduler_stands_by_until_the_other_one_ends_and_has_probes_then(example):
    """A pod that replaces another is ready while it stands by; so the other one is ended."""
    manifests = manifests_of(example)
    told = variables(manifests, pod_templates(manifests)["quire-scheduler"])
    assert told["QUIRE_STANDBY"] == told["QUIRE_STANDBY_HTTP"] == "true"


def test_an_idle_model_is_unloaded_by_the_only_router():
    manifests = manifests_of("one-gpu")
    told = variables(manifests, pod_templates(manifests)["quire-router"])
    assert told["QUIRE_IDLE_UNLOAD_S"] == "1800"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("worker.replica=3", "Additional property replica is not allowed"),
        ("worker.gpus=-1", "worker.gpus"),
        ("router.settings.Log_Level=debug", "Does not match pattern"),
        ("gateway.enabled=true", "gateway.parentRefs is empty; name the Gateway"),
        (
            "worker.autoscaling.enabled=true,worker.gpus=8,worker.podsPerGroup=2",
            "worker.autoscaling.enabled is true, and worker.podsPerGroup is above 1",
        ),
        ("worker.idleUnloadSeconds=9,router.replicas=2", "it needs router.replicas 1"),
        ("worker.idleUnloadSeconds=9,worker.gpus=2", "workers of several devices keep their model"),
        ("scheduler.kvEvents.enabled=true", "scheduler.kvEvents.subscribers is empty"),
        ("scheduler.kvEvents.port=80", "scheduler.kvEvents.port"),
        ("worker.podsPerGroup=2", "worker.podsPerGroup is 2; worker.gpus is 0"),
        ("worker.prefillReplicas=1", "worker.prefillReplicas is 1; it must be less than"),
        ("worker.disaggregatedSet=true", "worker.disaggregatedSet is true; it needs"),
        (
            "worker.prefillReplicas=1,worker.replicas=3,worker.gpus=8,worker.podsPerGroup=2",
            "worker.prefillReplicas is set, and worker.podsPerGroup is above 1",
        ),
    ],
)
def test_values_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        render(EXAMPLES["cpu-demo"], "--set", given)


def test_every_value_is_explained_and_in_the_schema():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert values.keys() == schema.keys() - {"global"}
    for name, value in values.items():
        if name != "settings":
            assert value.keys() == schema[name]["properties"].keys()
