"""Strict schemas of the custom resources that deploy/ uses, in our own words.

The operators' CRDs are in no package registry and not copied here (KubeRay's RayJob alone is a megabyte, nearly all of it
Kubernetes' own pod template). Instead:
  * crd_types.yaml has KubeRay's types with every field of its ray.io/v1 API reference, release 1.7, and here are the rules
    between fields that its CRD or its operator enforces (RULES); unknown fields are refused;
  * what is Kubernetes' own inside them (pod templates, resources, environments) is checked by kubernetes-validate's strict
    core schemas, which is what the CRD repeats;
  * of Kueue (v1beta1) and prometheus-operator (monitoring.coreos.com/v1) the fields that we use, unknown ones refused.
Where scripts/fetch_kuberay_crds.py can reach the release, or KUBERAY_CRDS names a folder, the objects are checked against
the operator's own CRDs as well, and these schemas are compared with them (test_kuberay_crds.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

TYPES = yaml.safe_load(Path(__file__).with_name("crd_types.yaml").read_text())
QUANTITY = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^\d+(\.\d+)?([KMGTP]i?|m)?$"}]}
WORDS: dict[str, dict[str, Any]] = {
    "bool": {"type": "boolean"},
    "natural": {"type": "integer", "minimum": 0},
    "positive": {"type": "integer", "minimum": 1},
    "list": {"type": "array"},
    "quantity": QUANTITY,
    "quantities": {"type": "object", "additionalProperties": QUANTITY},
    "strings": {"type": "object", "additionalProperties": {"type": "string"}},
    **{name: {"type": name} for name in ("string", "number", "integer", "object")},
}


def schema_of(written: Any) -> dict[str, Any]:
    """The JSON schema of a type as crd_types.yaml writes it."""
    if isinstance(written, list):
        (item,) = written
        return {"type": "array", "items": schema_of(item)}
    if isinstance(written, dict):
        properties = {}
        for field, kind in written.items():
            properties[field.rstrip("!+")] = schema_of(kind) | ({"minItems": 1} if field.endswith("+") else {})
        required = [field.rstrip("!") for field in written if field.endswith("!")]
        return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}
    if written in WORDS:
        return WORDS[written]
    if written.startswith("k8s:"):
        return {"type": "object", "x-kubernetes": written.removeprefix("k8s:")}
    if written.startswith("/"):
        return {"type": "string", "pattern": written.strip("/")}
    return {"enum": written.split("|")} if "|" in written else schema_of(TYPES[written])


def resource(kind: str) -> dict[str, Any]:
    """The schema of a whole object whose `spec` is of that kind."""
    label = "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$"  # a DNS-1035 label of at most 47: KubeRay adds to it
    metadata = {"name!": f"/{label}/", "namespace": "string", "labels": "strings", "annotations": "strings"}
    return schema_of({"apiVersion!": "string", "kind!": "string", "metadata!": metadata, "spec!": kind})


JOB, CLUSTER = schema_of("RayJob"), schema_of("RayCluster")
SCHEMAS = {
    (version, kind): resource(kind)
    for version, kinds in {
        "ray.io/v1": ("RayJob", "RayCluster"),
        "kueue.x-k8s.io/v1beta1": ("ResourceFlavor", "ClusterQueue", "LocalQueue"),
        "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule"),
    }.items()
    for kind in kinds
}

# What the operator's validation refuses beyond single fields: (what it asks, whether a spec obeys).
Rule = tuple[str, Callable[[dict[str, Any]], bool]]
GATED = ("historyServerOptions", "networkPolicy", "tlsOptions")  # behind feature gates that are off by default


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]


def replaces_pods(cluster: dict[str, Any]) -> bool:
    """Autoscaler v2, which is also the default of Ray 2.47 and later."""
    options = cluster.get("autoscalerOptions", {})
    return bool(cluster.get("enableInTreeAutoscaling")) and options.get("version", "v2") == "v2"


def resources_stated_once(group: dict[str, Any]) -> bool:
    stated = {"num-cpus", "num-gpus", "memory", "resources"} & set(group.get("rayStartParams", {}))
    return not (stated and group.get("resources"))


def head_environment(cluster: dict[str, Any]) -> set[str]:
    return {entry["name"] for entry in cluster["headGroupSpec"]["template"]["spec"]["containers"][0].get("env", [])}


CLUSTER_RULES: list[Rule] = [
    (
        "autoscaler v2 replaces pods: restartPolicy must be Never",
        lambda c: (
            not replaces_pods(c)
            or {g["template"]["spec"].get("restartPolicy", "Never") for g in groups(c)} == {"Never"}
        ),
    ),
    ("minReplicas <= maxReplicas", lambda c: all(g["minReplicas"] <= g["maxReplicas"] for g in groups(c)[1:])),
    (
        "replicas between minReplicas and maxReplicas",
        lambda c: all(
            g["minReplicas"] <= g.get("replicas", g["minReplicas"]) <= g["maxReplicas"] for g in groups(c)[1:]
        ),
    ),
    ("group names are unique", lambda c: len({g["groupName"] for g in groups(c)[1:]}) == len(groups(c)[1:])),
    ("resources in rayStartParams or in resources, not both", lambda c: all(map(resources_stated_once, groups(c)))),
    ("labels not in rayStartParams", lambda c: not any("labels" in g.get("rayStartParams", {}) for g in groups(c))),
    (
        "a group's idle timeout and priority need autoscaler v2",
        lambda c: replaces_pods(c) or not any({"idleTimeoutSeconds", "priority"} & set(g) for g in groups(c)[1:]),
    ),
    (
        "the operator sets RAY_enable_autoscaler_v2, and Redis only through gcsFaultToleranceOptions",
        lambda c: not {"RAY_enable_autoscaler_v2", "RAY_REDIS_ADDRESS", "REDIS_USERNAME"} & head_environment(c),
    ),
    ("no option behind a feature gate that is off", lambda c: not set(GATED) & set(c)),
    (
        "token authentication needs Ray 2.52",
        lambda c: (
            c.get("authOptions", {"mode": "disabled"}).get("mode", "token") != "token"
            or [int(part) for part in c.get("rayVersion", "0").split(".")] >= [2, 52]
        ),
    ),
]
JOB_RULES: list[Rule] = [
    (
        "ttlSecondsAfterFinished and suspend need shutdownAfterJobFinishes",
        lambda j: bool(j.get("shutdownAfterJobFinishes")) or not (j.get("ttlSecondsAfterFinished") or j.get("suspend")),
    ),
    (
        "deletionRules and shutdownAfterJobFinishes exclude each other",
        lambda j: not (j.get("deletionStrategy") and j.get("shutdownAfterJobFinishes")),
    ),
    (
        "clusterSelector goes without retries, suspension and SidecarMode",
        lambda j: (
            not j.get("clusterSelector")
            or not (j.get("backoffLimit") or j.get("suspend") or j.get("submissionMode") == "SidecarMode")
        ),
    ),
    (
        "InteractiveMode has no retries",
        lambda j: j.get("submissionMode") != "InteractiveMode" or not j.get("backoffLimit"),
    ),
    (
        "SidecarMode has no submitter pod",
        lambda j: j.get("submissionMode") != "SidecarMode" or not {"submitterPodTemplate", "submitterConfig"} & set(j),
    ),
    ("runtimeEnvYAML is YAML of a mapping", lambda j: isinstance(yaml.safe_load(j.get("runtimeEnvYAML", "{}")), dict)),
    (
        "delegated Kubernetes tokens are not for jobs",
        lambda j: not j["rayClusterSpec"].get("authOptions", {}).get("enableK8sTokenAuth"),
    ),
    *[(asked, lambda j, obeys=obeys: obeys(j["rayClusterSpec"])) for asked, obeys in CLUSTER_RULES],
]
RULES: dict[tuple[str, str], list[Rule]] = {
    ("ray.io/v1", "RayJob"): JOB_RULES,
    ("ray.io/v1", "RayCluster"): CLUSTER_RULES,
}
