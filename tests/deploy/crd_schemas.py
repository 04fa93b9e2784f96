"""Strict, reduced schemas of the custom resources that deploy/ uses, in our own words.

The full CRDs (KubeRay's RayJob alone is 1.2 MB, most of it a copy of Kubernetes' own pod template) are not in a package
registry and not copied here.  Instead:
  * the fields of KubeRay's own types, after its API reference (ray.io/v1, 1.4 to 1.7), unknown fields refused;
  * pod templates inside are checked by kubernetes-validate's strict core schemas, which is what the full CRD holds;
  * the fields of Kueue (v1beta1) and prometheus-operator (monitoring.coreos.com/v1) that we use, unknown ones refused.
With the environment variable KUBERAY_CRDS=folder (ray.io_rayjobs.yaml and ray.io_rayclusters.yaml of your operator's
release) the test checks against those files as well; see docs/OPERATIONS.md.
"""

from __future__ import annotations

from typing import Any

QUANTITY = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^\d+(\.\d+)?([KMGTP]i?|m)?$"}]}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
POD_TEMPLATE = {"type": "object", "x-pod-template": True}  # checked against the core schemas, see test_manifests.py
METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?$"},  # KubeRay adds to it: 47 at most
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


NATURAL = {"type": "integer", "minimum": 0}
BOOL, STRING = {"type": "boolean"}, {"type": "string"}
RESOURCES = closed(
    {
        "requests": {"type": "object", "additionalProperties": QUANTITY},
        "limits": {"type": "object", "additionalProperties": QUANTITY},
    }
)
AUTOSCALER = closed(
    {
        "version": {"enum": ["v1", "v2"]},
        "idleTimeoutSeconds": NATURAL,
        "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
        "image": STRING,
        "imagePullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
        "resources": RESOURCES,
        "securityContext": {"type": "object"},
        "env": {"type": "array"},
        "envFrom": {"type": "array"},
        "volumeMounts": {"type": "array"},
    }
)
HEAD = closed(
    {
        "rayStartParams": STRINGS,
        "template": POD_TEMPLATE,
        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        "headService": {"type": "object"},
        "enableIngress": BOOL,
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
        "numOfHosts": {"type": "integer", "minimum": 1},
        "idleTimeoutSeconds": NATURAL,
        "suspend": BOOL,
        "rayStartParams": STRINGS,
        "template": POD_TEMPLATE,
        "scaleStrategy": closed({"workersToDelete": {"type": "array", "items": STRING}}),
        "resources": STRINGS,
        "labels": STRINGS,
    },
    ("groupName", "minReplicas", "maxReplicas", "template"),
)
CLUSTER = closed(
    {
        "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "enableInTreeAutoscaling": BOOL,
        "autoscalerOptions": AUTOSCALER,
        "headServiceAnnotations": STRINGS,
        "headGroupSpec": HEAD,
        "workerGroupSpecs": {"type": "array", "items": WORKERS},
        "gcsFaultToleranceOptions": {"type": "object"},
        "authOptions": {"type": "object"},
        "managedBy": {"enum": ["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]},
        "suspend": BOOL,
    },
    ("headGroupSpec",),
)
DELETION = closed({"policy": {"enum": ["DeleteCluster", "DeleteWorkers", "DeleteSelf", "DeleteNone"]}})
JOB = closed(
    {
        "entrypoint": STRING,
        "runtimeEnvYAML": STRING,
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        "submitterConfig": closed({"backoffLimit": NATURAL}),
        "submitterPodTemplate": POD_TEMPLATE,
        "backoffLimit": NATURAL,
        "activeDeadlineSeconds": {"type": "integer", "minimum": 1},
        "ttlSecondsAfterFinished": NATURAL,
        "shutdownAfterJobFinishes": BOOL,
        "suspend": BOOL,
        "jobId": STRING,
        "metadata": STRINGS,
        "clusterSelector": STRINGS,
        "managedBy": {"enum": ["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]},
        "deletionStrategy": closed({"onSuccess": DELETION, "onFailure": DELETION}),
        "entrypointNumCpus": {"type": "number"},
        "entrypointNumGpus": {"type": "number"},
        "entrypointResources": STRING,
        "rayClusterSpec": CLUSTER,
    },
    ("entrypoint", "rayClusterSpec"),
)

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
