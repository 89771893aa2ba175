"""The Kubernetes manifests that the Helm chart renders from its examples."""

from functools import cache
from typing import Any

import yaml

from docs.generate.manifests import EXAMPLES, render

Manifest = dict[str, Any]


@cache
def manifests_of(example: str, *more: str) -> list[Manifest]:
    """Return what `helm install` would apply."""
    return [each for each in yaml.safe_load_all(render(EXAMPLES[example], *more)) if each]


def pod_templates(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return the template of each workload, by the workload's name."""
    found = {}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            found[manifest["metadata"]["name"]] = spec["template"]
        elif manifest["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            found[f"{manifest['metadata']['name']} leader"] = group["leaderTemplate"]
            found[f"{manifest['metadata']['name']} other"] = group["workerTemplate"]
        elif manifest["kind"] == "DisaggregatedSet":
            for role in spec["roles"]:
                template = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
                found[f"{manifest['metadata']['name']} {role['name']}"] = template
    return found


def component_of(template: Manifest) -> str:
    """Return the process that a pod runs."""
    component: str = template["metadata"]["labels"]["app.kubernetes.io/component"]
    return component


def variables(manifests: list[Manifest], template: Manifest) -> dict[str, str]:
    """Return a container's environment variables, from config maps and from the pod's template."""
    maps = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
    (container,) = template["spec"]["containers"]
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        found |= maps[source["configMapRef"]["name"]]
    return found | {entry["name"]: entry.get("value", "") for entry in container.get("env", ())}
