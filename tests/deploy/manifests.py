"""Reads the Kubernetes manifests, as files and as kustomize renders them."""

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
CUSTOM_KINDS = {"ServiceMonitor", "LeaderWorkerSet"}
"""Kinds of other projects, whose schemas Kubernetes does not publish."""

Manifest = dict[str, Any]


def base_manifests() -> list[Manifest]:
    """Return the base's manifests, without those that kustomize generates."""
    return [
        manifest
        for file in sorted((KUBERNETES / "base").glob("*.yaml"))
        if file.name != "kustomization.yaml"
        for manifest in yaml.safe_load_all(file.read_text())
    ]


@cache
def render(overlay: str) -> list[Manifest]:
    """Return the manifests that `kubectl apply -k` would apply; skips without kustomize."""
    if kubectl := shutil.which("kubectl"):
        command = [kubectl, "kustomize"]
    elif kustomize := shutil.which("kustomize"):
        command = [kustomize, "build"]
    else:
        pytest.skip("neither kubectl nor kustomize is here, so overlays cannot be rendered")
    folder = KUBERNETES / "overlays" / overlay
    result = subprocess.run(
        [*command, str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


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
    return found


def variables(manifests: list[Manifest], template: Manifest) -> dict[str, str]:
    """Return the variables that a pod's container gets from config maps and by value."""
    maps = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
    (container,) = template["spec"]["containers"]
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        found |= maps[source["configMapRef"]["name"]]
    return found | {entry["name"]: entry.get("value", "") for entry in container.get("env", ())}
