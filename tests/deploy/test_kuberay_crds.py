"""Our strict schemas of KubeRay's types against the operator's own CRDs, and the code that reads those."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import crd_schemas
from tests.deploy.manifests import DEPLOY, ROOT, crd_folder, full_crd, objects, problems

sys.path.insert(0, str(ROOT / "scripts"))
import fetch_kuberay_crds


@pytest.fixture(scope="module")
def folder() -> Path:
    """The operator's CRDs: from KUBERAY_CRDS, from an earlier fetch, or fetched now."""
    try:
        return crd_folder() or fetch_kuberay_crds.crds()
    except RuntimeError as error:
        pytest.skip(str(error))


def differences(ours: dict[str, Any], theirs: dict[str, Any], path: str = "") -> Iterator[str]:
    """Fields that one side has and the other lacks, in what is KubeRay's own."""
    if "x-kubernetes" in ours or ours.get("properties") is None:
        if ours.get("type") == "array" and "x-kubernetes" not in ours["items"]:
            yield from differences(ours["items"], theirs["items"], f"{path}[]")
        return
    have, want = set(ours["properties"]), set(theirs.get("properties", {}))
    yield from (f"{path}.{name}: not in the CRD" for name in sorted(have - want))
    yield from (f"{path}.{name}: not in our schema" for name in sorted(want - have - {"onSuccess", "onFailure"}))
    for name in sorted(have & want):
        yield from differences(ours["properties"][name], theirs["properties"][name], f"{path}.{name}")


@pytest.mark.parametrize(("kind", "ours"), [("RayJob", crd_schemas.JOB), ("RayCluster", crd_schemas.CLUSTER)])
def test_our_schema_has_the_fields_of_the_operators_crd(folder: Path, kind: str, ours: dict[str, Any]) -> None:
    theirs = full_crd(folder, kind, "v1")["properties"]["spec"]
    assert list(differences(ours, theirs)) == []


def test_manifests_validate_against_the_operators_crd(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERAY_CRDS", str(folder))
    for file in ("kuberay/base/rayjob.yaml", "kuberay/cluster/raycluster.yaml"):
        assert [p for item in objects((DEPLOY / file).read_text()) for p in problems(item)] == []


def as_crd(schema: dict[str, Any]) -> Any:
    """A schema of ours in the words of a CRD: open objects with their properties, as controller-gen writes them."""
    if isinstance(schema, list):
        return [as_crd(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "x-kubernetes" in schema:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {key: as_crd(value) for key, value in schema.items() if (key, value) != ("additionalProperties", False)}


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder of CRD files made from our own schemas: shows that the reading works where the real ones cannot be had."""
    for kind, spec in (("RayJob", crd_schemas.JOB), ("RayCluster", crd_schemas.CLUSTER)):
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in ("apiVersion", "kind")}}
        schema["properties"]["spec"] = as_crd(spec)
        crd = {"kind": "CustomResourceDefinition", "spec": {"versions": [{"name": "v1", "schema": {}}]}}
        crd["spec"]["versions"][0]["schema"] = {"openAPIV3Schema": schema}
        (tmp_path / f"ray.io_{kind.lower()}s.yaml").write_text(yaml.safe_dump(crd))
    return tmp_path


def test_a_folder_of_crds_is_read_and_closed(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERAY_CRDS", str(stand_in))
    (job,) = objects((DEPLOY / "kuberay/base/rayjob.yaml").read_text())
    assert list(problems(job)) == []
    job["spec"]["rayClusterSpec"]["autoscalerOptions"]["idleTimeoutSecond"] = 1
    assert [p for p in problems(job) if "full CRD" in p]
    assert list(differences(crd_schemas.JOB, full_crd(stand_in, "RayJob", "v1")["properties"]["spec"])) == []


def test_a_field_that_only_one_side_has_is_found(stand_in: Path) -> None:
    theirs = full_crd(stand_in, "RayJob", "v1")["properties"]["spec"]
    del theirs["properties"]["rayClusterSpec"]["properties"]["workerGroupSpecs"]["items"]["properties"]["priority"]
    theirs["properties"]["novelty"] = {"type": "string"}
    assert list(differences(crd_schemas.JOB, theirs)) == [
        ".novelty: not in our schema",
        ".rayClusterSpec.workerGroupSpecs[].priority: not in the CRD",
    ]


def test_crds_are_fetched_once_and_an_unreachable_release_says_so(stand_in: Path, tmp_path: Path) -> None:
    there = stand_in.as_uri() + "/{file}"
    folder = fetch_kuberay_crds.crds(there, tmp_path / "fetched")
    assert {path.name for path in folder.iterdir()} == set(fetch_kuberay_crds.FILES)
    assert fetch_kuberay_crds.crds("file:///nowhere/{file}", folder) == folder
    with pytest.raises(RuntimeError, match="in no package registry, and file:///nowhere"):
        fetch_kuberay_crds.crds("file:///nowhere/{file}", tmp_path / "other")


@pytest.mark.parametrize(
    ("where", "value", "asked"),
    [
        (("shutdownAfterJobFinishes",), False, "need shutdownAfterJobFinishes"),
        (("submissionMode",), "SidecarMode", "no submitter pod"),
        (("runtimeEnvYAML",), "just words", "YAML of a mapping"),
        (
            ("rayClusterSpec", "headGroupSpec", "template", "spec", "restartPolicy"),
            "Always",
            "restartPolicy must be Never",
        ),
        (("rayClusterSpec", "workerGroupSpecs", 0, "replicas"), 9, "between minReplicas and maxReplicas"),
        (("rayClusterSpec", "workerGroupSpecs", 0, "minReplicas"), 9, "minReplicas <= maxReplicas"),
        (("rayClusterSpec", "headGroupSpec", "resources"), {"CPU": "0"}, "not both"),
        (("rayClusterSpec", "tlsOptions"), {"enabled": True}, "feature gate"),
        (("rayClusterSpec", "authOptions"), {"mode": "token", "enableK8sTokenAuth": True}, "not for jobs"),
    ],
)
def test_what_the_operator_would_refuse_is_refused_here(where: tuple, value: object, asked: str) -> None:
    (job,) = objects((DEPLOY / "kuberay/base/rayjob.yaml").read_text())
    node = job = copy.deepcopy(job)
    node = job["spec"]
    for part in where[:-1]:
        node = node[part]
    node[where[-1]] = value
    assert [problem for problem in problems(job) if asked in problem]
