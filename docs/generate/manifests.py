"""Renders the Helm chart to plain manifests, for deployments without Helm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "quire"
EXAMPLES = {path.stem: path for path in sorted((CHART.parent / "examples").glob("*.yaml"))}
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
"""The executable from the package helm-binary, or else the machine's."""
_NOTICE = "# Written by `make docs` from deploy/helm/examples/{}.yaml; change the chart.\n"


def render(values: Path, *more: str) -> str:
    """Return the chart's manifests with the values of a file, as release `quire`."""
    if HELM is None:
        raise FileNotFoundError("helm is not on this machine")
    command = [HELM, "template", "quire", CHART, "--namespace", "quire", "--values", values]
    done = subprocess.run(  # noqa: S603 - our own chart
        [*command, *more], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def page(example: str) -> str:
    """Return an example's manifests, under a comment that names their source."""
    return _NOTICE.format(example) + render(EXAMPLES[example])
