"""Values for other people's charts: they parse, and every key is one that the chart has.

The charts are in no package registry, so they are rendered only where HELM_CHARTS names a folder with their archives; a key
that a chart does not know is what goes wrong in practice (helm ignores it silently), and that is what these tables catch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import DEPLOY

# The part of each chart's values that we set: type of every leaf; ... = free below.
KNOWN: dict[str, dict[str, Any]] = {
    "kuberay-operator": {  # ray-project/kuberay, helm-chart/kuberay-operator/values.yaml
        "image": {"repository": str, "tag": str, "pullPolicy": str},
        "replicas": int,
        "reconcileConcurrency": int,
        "featureGates": [{"name": str, "enabled": bool}],
        "env": [{"name": str, "value": str}],
        "metrics": {"enabled": bool, "serviceMonitor": {"enabled": bool, "interval": str, "honorLabels": bool}},
        "resources": {"requests": ..., "limits": ...},
    },
    "kube-prometheus-stack": {  # prometheus-community/helm-charts
        "prometheus": {
            "prometheusSpec": {
                "podMonitorSelectorNilUsesHelmValues": bool,
                "ruleSelectorNilUsesHelmValues": bool,
                "retention": str,
            }
        },
        "grafana": {"sidecar": {"dashboards": {"enabled": bool, "label": str, "searchNamespace": str}}},
    },
    "kueue": {  # kubernetes-sigs/kueue, charts/kueue/values.yaml
        "enablePrometheus": bool,
        "managerConfig": {"controllerManagerConfigYaml": str},
    },
}


def unknown(values: Any, known: Any, path: str = "") -> list[str]:
    """Keys and types that the chart does not have."""
    if known is ...:
        return []
    if isinstance(known, type):
        return [] if isinstance(values, known) else [f"{path}: expected {known.__name__}, found {values!r}"]
    if isinstance(known, list):
        return [p for i, value in enumerate(values) for p in unknown(value, known[0], f"{path}[{i}]")]
    found = [f"{path}.{key}: the chart has no such key" for key in values if key not in known]
    return found + [
        p for key in values if key in known for p in unknown(values[key], known[key], f"{path}.{key}".lstrip("."))
    ]


@pytest.mark.parametrize("chart", KNOWN)
def test_values_name_only_keys_of_the_chart(chart: str) -> None:
    values = yaml.safe_load((DEPLOY / f"helm/{chart}.values.yaml").read_text())
    assert unknown(values, KNOWN[chart]) == []


def test_every_values_file_has_its_table() -> None:
    assert {path.name.removesuffix(".values.yaml") for path in (DEPLOY / "helm").iterdir()} == KNOWN.keys()


def test_kueue_manages_rayjobs() -> None:
    values = yaml.safe_load((DEPLOY / "helm/kueue.values.yaml").read_text())
    inner = yaml.safe_load(values["managerConfig"]["controllerManagerConfigYaml"])
    assert "ray.io/rayjob" in inner["integrations"]["frameworks"]


def rendered(chart: Path, values: Path) -> str:
    """A chart's manifests by `helm`, or by the engine of the package helm-python-sdk; skips where neither is installed."""
    if shutil.which("helm"):
        done = subprocess.run(["helm", "template", "x", str(chart), "-f", str(values)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout
    helm = pytest.importorskip("helm_python", reason="neither helm nor the package helm-python-sdk is installed")
    with helm.Chart.load(str(chart)) as loaded:
        return "\n---\n".join(loaded.render(yaml.safe_load(values.read_text()), name="x", namespace="kuberay").values())


def test_the_operators_chart_renders_with_our_values() -> None:
    folder = os.environ.get("HELM_CHARTS")
    if not folder:
        pytest.skip("the chart is in no package registry: HELM_CHARTS=folder with kuberay-operator-*.tgz renders it")
    (chart,) = Path(folder).glob("kuberay-operator-*")
    manifests = [
        item for item in yaml.safe_load_all(rendered(chart, DEPLOY / "helm/kuberay-operator.values.yaml")) if item
    ]
    (deployment,) = (item for item in manifests if item["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith(":v1.7.1")
    assert {"name": "RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS", "value": "600"} in container["env"]
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "1Gi"}
    assert "ServiceMonitor" in {item["kind"] for item in manifests}
