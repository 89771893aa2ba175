"""The schemas of the chart's fields in other projects' CRDs, by API version and kind.

Written down from the CRDs in the repositories of these projects; fields that the chart does not set
are left out, and so refused here, and pods are checked as pods. Versions: prometheus-operator 0.93,
LeaderWorkerSet 0.9, KEDA's main branch of 2026-08-20, the Gateway API 1.6.1, its inference
extension 1.6.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
POD: Schema = {"type": "object", "required": ["metadata", "spec"]}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
LABEL: Schema = {**TEXT, "maxLength": 63, "pattern": r"^(([A-Za-z0-9][-\w.]*)?[A-Za-z0-9])?$"}
LABELS: Schema = {"type": "object", "additionalProperties": LABEL, "minProperties": 1}
GROUP: Schema = {**TEXT, "pattern": r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[-a-z0-9]+)*$"}
KIND: Schema = {**TEXT, "pattern": "^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$"}
NAME: Schema = {**TEXT, "minLength": 1, "maxLength": 253}


def having(*required: str, **fields: Schema) -> Schema:
    """Return an object with these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def several(item: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": item, **limits}


_GROUP_OF_PODS = having(
    "leaderWorkerTemplate",
    replicas=COUNT,
    leaderWorkerTemplate=having(
        "workerTemplate",
        size={**COUNT, "minimum": 1},
        restartPolicy={
            "enum": [
                *("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
            ]
        },
        leaderTemplate=POD,
        workerTemplate=POD,
    ),
)
_SCALING = having(
    stabilizationWindowSeconds=COUNT,
    policies=several(
        having("type", "value", "periodSeconds", type=TEXT, value=COUNT, periodSeconds=COUNT)
    ),
)

CUSTOM_SCHEMAS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): having(
        "selector",
        selector=having(matchLabels=LABELS),
        podMetricsEndpoints=several(
            having(port=TEXT, path=TEXT, interval={**TEXT, "pattern": r"^(\d+h)?(\d+m)?(\d+s)?$"})
        ),
        podTargetLabels=several(TEXT),
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _GROUP_OF_PODS,
    ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"): having(
        "roles",
        roles=several(
            having(
                "name",
                name={**TEXT, "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
                spec=_GROUP_OF_PODS,
            ),
            minItems=2,
            maxItems=10,
        ),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): having(
        "scaleTargetRef",
        "triggers",
        scaleTargetRef=having("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        advanced=having(
            horizontalPodAutoscalerConfig=having(
                behavior=having(scaleUp=_SCALING, scaleDown=_SCALING)
            )
        ),
        triggers=several(
            having(
                "type",
                "metadata",
                type=TEXT,
                metadata={"type": "object", "additionalProperties": TEXT},
            ),
            minItems=1,
        ),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): having(
        "selector",
        "targetPorts",
        selector=having("matchLabels", matchLabels=LABELS),
        targetPorts=several(having("number", number=PORT), minItems=1, maxItems=8),
        endpointPickerRef=having("name", name=NAME, port=having("number", number=PORT)),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): having(
        parentRefs=several(having("name", group=GROUP, kind=KIND, name=NAME, namespace=LABEL)),
        hostnames=several(NAME, maxItems=16),
        rules=several(
            having(
                backendRefs=several(having("name", group=GROUP, kind=KIND, name=NAME, port=PORT)),
                timeouts=having(
                    request={**TEXT, "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"},
                ),
            ),
            minItems=1,
            maxItems=16,
        ),
    ),
}
"""Of `spec`."""
