"""Strict schemas of the custom resources that deploy/ uses, in our own words.

The operators' CRDs are in no package registry and not copied here (KubeRay's RayJob alone is a megabyte, nearly all of it
Kubernetes' own pod template). Instead:
  * KubeRay's own types with every field of its ray.io/v1 API reference, release 1.7, unknown fields refused, and the rules
    between fields that its CRD or its operator enforces (RULES);
  * what is Kubernetes' own inside them (pod templates, resources, environments) is checked by kubernetes-validate's strict
    core schemas, which is what the CRD repeats;
  * of Kueue (v1beta1) and prometheus-operator (monitoring.coreos.com/v1) the fields that we use, unknown ones refused.
Where scripts/fetch_kuberay_crds.py can reach the release, or KUBERAY_CRDS names a folder, the objects are checked against
the operator's own CRDs as well, and these schemas are compared with them (test_kuberay_crds.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

QUANTITY = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^\d+(\.\d+)?([KMGTP]i?|m)?$"}]}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
POD_TEMPLATE = {
    "type": "object",
    "x-kubernetes": "PodTemplateSpec",
}  # checked against the core schemas, see manifests.py
METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {
            "type": "string",
            "pattern": "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$",
        },  # a DNS-1035 label; KubeRay adds to it: 47 at most
        "namespace": {"type": "string"},
        "labels": STRINGS,
        "annotations": STRINGS,
    },
}


def closed(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """An object that refuses what is not named."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def resource(spec: dict[str, Any]) -> dict[str, Any]:
    return closed(
        {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": METADATA, "spec": spec},
        ("apiVersion", "kind", "metadata", "spec"),
    )


def core(kind: str) -> dict[str, Any]:
    """A type of Kubernetes' own: its schema is not repeated here."""
    return {"type": "object", "x-kubernetes": kind}


def listed(items: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


NATURAL, POSITIVE = {"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 1}
BOOL, STRING, NUMBER = {"type": "boolean"}, {"type": "string"}, {"type": "number"}
PULL = {"enum": ["Always", "IfNotPresent", "Never"]}
MANAGED_BY = {"enum": ["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]}
RESOURCES = closed(
    {
        "requests": {"type": "object", "additionalProperties": QUANTITY},
        "limits": {"type": "object", "additionalProperties": QUANTITY},
        "claims": listed(core("ResourceClaim")),
    }
)
AUTOSCALER = closed(
    {
        "version": {"enum": ["v1", "v2"]},
        "idleTimeoutSeconds": NATURAL,
        "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
        "image": STRING,
        "imagePullPolicy": PULL,
        "resources": RESOURCES,
        "securityContext": core("SecurityContext"),
        "env": listed(core("EnvVar")),
        "envFrom": listed(core("EnvFromSource")),
        "volumeMounts": listed(core("VolumeMount")),
        "command": listed(STRING),
        "args": listed(STRING),
    }
)
INGRESS = closed(
    {
        "host": STRING,
        "path": STRING,
        "pathType": {"enum": ["Exact", "Prefix", "ImplementationSpecific"]},
        "tls": listed(core("IngressTLS")),
    }
)
HEAD = closed(
    {
        "rayStartParams": STRINGS,
        "template": POD_TEMPLATE,
        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        "headService": core("Service"),
        "enableIngress": BOOL,
        "ingressOptions": INGRESS,
        "resources": STRINGS,
        "labels": STRINGS,
    },
    ("template",),
)
WORKERS = closed(
    {
        "groupName": {"type": "string", "pattern": "^[a-z0-9][-a-z0-9]*$"},
        "replicas": NATURAL,
        "minReplicas": NATURAL,
        "maxReplicas": NATURAL,
        "numOfHosts": POSITIVE,
        "idleTimeoutSeconds": NATURAL,
        "priority": {"type": "integer"},
        "suspend": BOOL,
        "rayStartParams": STRINGS,
        "template": POD_TEMPLATE,
        "scaleStrategy": closed({"workersToDelete": listed(STRING)}),
        "resources": STRINGS,
        "labels": STRINGS,
    },
    ("groupName", "minReplicas", "maxReplicas", "template"),
)
REDIS_CREDENTIAL = closed({"value": STRING, "valueFrom": core("EnvVarSource")})
GCS = closed(
    {
        "backend": {"enum": ["redis", "rocksdb"]},
        "redisAddress": STRING,
        "redisUsername": REDIS_CREDENTIAL,
        "redisPassword": REDIS_CREDENTIAL,
        "externalStorageNamespace": STRING,
        "storage": closed(
            {
                "claimName": STRING,
                "size": QUANTITY,
                "storageClassName": STRING,
                "accessModes": listed(STRING),
                "subPath": STRING,
                "deletionPolicy": {"enum": ["DeleteWithCluster", "Retain"]},
            }
        ),
    }
)
NETWORK_RULES = {
    "ingressRules": listed(core("NetworkPolicyIngressRule")),
    "egressRules": listed(core("NetworkPolicyEgressRule")),
}
NETWORK = closed(
    {
        "mode": {"enum": ["DenyAll", "DenyAllIngress", "DenyAllEgress"]},
        "head": closed(NETWORK_RULES),
        "worker": closed(NETWORK_RULES),
        "workerGroups": listed(closed({"groupName": STRING, **NETWORK_RULES}, ("groupName",))),
    }
)
HISTORY = closed(
    {
        "collectorOptions": closed(
            {"image": STRING, "imagePullPolicy": PULL, "resources": RESOURCES, "env": listed(core("EnvVar"))}
        )
    }
)
CLUSTER = closed(
    {
        "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "enableInTreeAutoscaling": BOOL,
        "autoscalerOptions": AUTOSCALER,
        "headServiceAnnotations": STRINGS,
        "headGroupSpec": HEAD,
        "workerGroupSpecs": listed(WORKERS),
        "gcsFaultToleranceOptions": GCS,
        "authOptions": closed(
            {"mode": {"enum": ["disabled", "token"]}, "secretName": STRING, "enableK8sTokenAuth": BOOL}
        ),
        "upgradeStrategy": closed({"type": {"enum": ["Recreate", "None"]}}),
        "historyServerOptions": HISTORY,
        "networkPolicy": NETWORK,
        "tlsOptions": closed({"enabled": BOOL}),
        "managedBy": MANAGED_BY,
        "suspend": BOOL,
    },
    ("headGroupSpec",),
)
DELETION_POLICY = {"enum": ["DeleteCluster", "DeleteWorkers", "DeleteSelf", "DeleteNone"]}
DELETION = closed(
    {  # onSuccess and onFailure, which 1.7 still knows, are deprecated: not for us
        "deletionRules": listed(
            closed(
                {
                    "policy": DELETION_POLICY,
                    "condition": closed({"jobStatus": STRING, "jobDeploymentStatus": STRING, "ttlSeconds": NATURAL}),
                },
                ("policy", "condition"),
            ),
            1,
        )
    }
)
JOB = closed(
    {
        "entrypoint": STRING,
        "runtimeEnvYAML": STRING,
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        "submitterConfig": closed({"backoffLimit": NATURAL}),
        "submitterPodTemplate": POD_TEMPLATE,
        "backoffLimit": NATURAL,
        "activeDeadlineSeconds": POSITIVE,
        "preRunningDeadlineSeconds": POSITIVE,
        "ttlSecondsAfterFinished": NATURAL,
        "shutdownAfterJobFinishes": BOOL,
        "suspend": BOOL,
        "jobId": STRING,
        "metadata": STRINGS,
        "clusterSelector": STRINGS,
        "managedBy": MANAGED_BY,
        "deletionStrategy": DELETION,
        "entrypointNumCpus": NUMBER,
        "entrypointNumGpus": NUMBER,
        "entrypointResources": STRING,
        "rayClusterSpec": CLUSTER,
    },
    ("entrypoint", "rayClusterSpec"),
)

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

FLAVOR_QUOTA = closed(
    {
        "name": STRING,
        "resources": {
            "type": "array",
            "items": closed(
                {"name": STRING, "nominalQuota": QUANTITY, "borrowingLimit": QUANTITY}, ("name", "nominalQuota")
            ),
        },
    },
    ("name", "resources"),
)
CLUSTER_QUEUE = closed(
    {
        "namespaceSelector": {"type": "object"},
        "cohort": STRING,
        "queueingStrategy": {"enum": ["StrictFIFO", "BestEffortFIFO"]},
        "resourceGroups": {
            "type": "array",
            "items": closed(
                {
                    "coveredResources": {"type": "array", "items": STRING},
                    "flavors": {"type": "array", "items": FLAVOR_QUOTA},
                },
                ("coveredResources", "flavors"),
            ),
        },
    }
)
ENDPOINT = closed(
    {
        "port": STRING,
        "path": STRING,
        "interval": {"type": "string", "pattern": r"^\d+s$"},
        "relabelings": {
            "type": "array",
            "items": closed(
                {
                    "action": {"enum": ["replace", "keep", "drop", "labelmap"]},
                    "sourceLabels": {"type": "array", "items": STRING},
                    "targetLabel": STRING,
                    "regex": STRING,
                    "replacement": STRING,
                }
            ),
        },
    },
    ("port",),
)
RULE = closed(
    {"alert": STRING, "record": STRING, "expr": STRING, "for": STRING, "labels": STRINGS, "annotations": STRINGS},
    ("expr",),
)

SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    ("ray.io/v1", "RayJob"): resource(JOB),
    ("ray.io/v1", "RayCluster"): resource(CLUSTER),
    ("kueue.x-k8s.io/v1beta1", "ResourceFlavor"): resource(
        closed({"nodeLabels": STRINGS, "tolerations": {"type": "array"}})
    ),
    ("kueue.x-k8s.io/v1beta1", "ClusterQueue"): resource(CLUSTER_QUEUE),
    ("kueue.x-k8s.io/v1beta1", "LocalQueue"): resource(closed({"clusterQueue": STRING}, ("clusterQueue",))),
    ("monitoring.coreos.com/v1", "PodMonitor"): resource(
        closed(
            {
                "jobLabel": STRING,
                "selector": {"type": "object"},
                "namespaceSelector": {"type": "object"},
                "podMetricsEndpoints": {"type": "array", "items": ENDPOINT},
            },
            ("selector", "podMetricsEndpoints"),
        )
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): resource(
        closed(
            {
                "groups": {
                    "type": "array",
                    "items": closed(
                        {"name": STRING, "interval": STRING, "rules": {"type": "array", "items": RULE}},
                        ("name", "rules"),
                    ),
                }
            },
            ("groups",),
        )
    ),
}
