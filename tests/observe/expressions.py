"""The Prometheus expressions of the dashboard and the alert rules."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "observability" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "observability" / "grafana" / "dashboards" / "quire.json"


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels in order, including rows."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def alerts() -> dict[str, dict[str, Any]]:
    """The rules, by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def of_dashboard() -> dict[str, str]:
    """Each expression with Grafana's variables filled in, by panel and legend."""
    filled = {"$__rate_interval": "1m", "$worker": ".*"}
    found = {}
    for panel in panels():
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for variable, value in filled.items():
                expression = expression.replace(variable, value)
            found[f"{panel['title']}: {target['legendFormat']}"] = expression
    return found


def metrics_in(expression: str) -> set[str]:
    """The names of Quire's metrics in an expression, as in samples."""
    return set(re.findall(r"\bquire_\w+", expression))
