"""Every Kubernetes object validates strictly, and the ones that belong together agree."""

from __future__ import annotations

import copy
import os
import re
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from pipeline.config import parse_job
from tests.deploy.manifests import DEPLOY, Object, objects, problems, render

NOT_OBJECTS = ("kustomization.yaml",)
FILES = sorted(
    path
    for folder in ("kuberay", "trainer", "monitoring")
    for path in (DEPLOY / folder).rglob("*.yaml")
    if path.name not in NOT_OBJECTS and "apiVersion:" in path.read_text()
)
OVERLAYS = sorted(
    path.parent for path in DEPLOY.rglob("kustomization.yaml") if "kind: Component" not in path.read_text()
)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(DEPLOY)) for path in paths]


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_manifest_validates_strictly(path: Path) -> None:
    found = [problem for item in objects(path.read_text()) for problem in problems(item)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", OVERLAYS, ids=names(OVERLAYS))
def test_rendered_overlay_validates_strictly(folder: Path) -> None:
    rendered = render(folder)
    found = [problem for item in rendered for problem in problems(item)]
    assert not found, "\n".join(found)
    keys = [(item["kind"], item["metadata"]["name"]) for item in rendered]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("spec", "submisionMode"), "K8sJobMode"),
        (("spec", "rayClusterSpec", "autoscalerOptions", "version"), "v3"),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "minReplica"), 1),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "restartPolice"), "Never"),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "ports", 0, "port"), 1),
    ],
)
def test_unknown_or_wrong_fields_are_refused(where: tuple, value: object) -> None:
    """The checkers check: a misspelt field anywhere, also inside a pod template, is found."""
    item = rayjob()
    node = item
    for part in where[:-1]:
        node = node[part]
    assert list(problems(item)) == []
    node[where[-1]] = value
    assert list(problems(item))


def rayjob() -> Object:
    (item,) = objects((DEPLOY / "kuberay/base/rayjob.yaml").read_text())
    return copy.deepcopy(item)


def test_the_standing_cluster_runs_the_same_pods_as_the_job() -> None:
    (cluster,) = objects((DEPLOY / "kuberay/cluster/raycluster.yaml").read_text())
    spec = rayjob()["spec"]["rayClusterSpec"]
    pod = spec["headGroupSpec"]["template"]["spec"]
    (container,) = pod["containers"]
    del container["workingDir"]  # the one difference: a job that brings its own job.yaml by a mount
    container["volumeMounts"] = [m for m in container["volumeMounts"] if m["name"] != "job"]
    pod["volumes"] = [v for v in pod["volumes"] if v["name"] != "job"]
    assert cluster["spec"] == spec


def test_ray_version_is_the_one_that_the_images_pin() -> None:
    pinned = re.search(r"^ray==(.+)$", (DEPLOY.parent / "constraints/cuda.txt").read_text(), re.M)
    assert pinned is not None
    assert rayjob()["spec"]["rayClusterSpec"]["rayVersion"] == pinned[1] == metadata.version("ray")


def test_job_is_safe_to_repeat_and_cleans_up() -> None:
    spec = rayjob()["spec"]
    assert spec["entrypoint"] == "python -m pipeline run job.yaml"
    assert spec["submissionMode"] == "K8sJobMode"
    assert spec["shutdownAfterJobFinishes"]
    assert spec["backoffLimit"] > 0
    assert spec["ttlSecondsAfterFinished"] > 0
    head = spec["rayClusterSpec"]["headGroupSpec"]
    container = head["template"]["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    job_mount = next(m for m in container["volumeMounts"] if m["name"] == "job")
    assert container["workingDir"] == job_mount["mountPath"]  # so that the relative job.yaml is found


@pytest.mark.parametrize("folder", OVERLAYS, ids=names(OVERLAYS))
def test_pods_are_unprivileged_and_bounded(folder: Path) -> None:
    for item in render(folder):
        for pod in pods(item):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in pod["containers"]:
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
                assert ":latest" not in container["image"]
                assert ":" in container["image"]
                mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
                assert mounted <= {volume["name"] for volume in pod.get("volumes", [])}


def pods(item: Object) -> list[Object]:
    if item["kind"] == "Job":
        return [item["spec"]["template"]["spec"]]
    if item["kind"] in ("RayJob", "RayCluster"):
        cluster = item["spec"].get("rayClusterSpec", item["spec"])
        groups = [g["template"]["spec"] for g in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
        submitter = item["spec"].get("submitterPodTemplate")
        return [*groups, submitter["spec"]] if submitter else groups
    return []


@pytest.mark.parametrize("name", ["teacher-8b", "teacher-120b-tp"])
def test_a_pod_of_the_overlay_holds_exactly_one_teacher_of_its_job(name: str) -> None:
    """A tensor-parallel teacher stays inside one pod, and the pool is as large as the job's `actors`."""
    rendered = render(DEPLOY / "kuberay/overlays" / name)
    config = next(i for i in rendered if i["kind"] == "ConfigMap" and i["metadata"]["name"] == "teachercache-job")
    job = parse_job(yaml.safe_load(config["data"]["job.yaml"]))
    (ray_job,) = (i for i in rendered if i["kind"] == "RayJob")
    (group,) = ray_job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == job.teacher.tensor_parallel
    assert group["maxReplicas"] == job.run.actors


@pytest.mark.parametrize("base", ["kuberay/overlays/teacher-8b", "kuberay/cluster"])
def test_a_token_can_be_asked_for(base: str, tmp_path: Path) -> None:
    resources, component = (os.path.relpath(DEPLOY / p, tmp_path.resolve()) for p in (base, "kuberay/components/token"))
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump({"kind": "Kustomization", "resources": [resources], "components": [component]})
    )
    (item,) = (i for i in render(tmp_path) if i["kind"].startswith("Ray"))
    assert list(problems(item)) == []
    assert item["spec"].get("rayClusterSpec", item["spec"])["authOptions"] == {"mode": "token"}


def test_a_trainer_on_several_gpus_has_a_process_for_each() -> None:
    (job,) = (item for item in render(DEPLOY / "trainer-gpus") if item["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = container["command"]
    assert command[:3] == ["torchrun", "--standalone", "--nproc-per-node"]
    assert command[4:] == ["-m", "trainer", "fit", "train.yaml"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == command[3]


def test_kueue_gets_a_job_of_fixed_size() -> None:
    (item,) = (i for i in render(DEPLOY / "kuberay/overlays/teacher-8b-kueue") if i["kind"] == "RayJob")
    cluster = item["spec"]["rayClusterSpec"]
    assert item["spec"]["suspend"] is True
    assert item["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "teachercache"
    assert cluster["enableInTreeAutoscaling"] is False
    assert "autoscalerOptions" not in cluster


def test_everything_that_a_pod_refers_to_is_rendered_or_documented_as_a_secret() -> None:
    rendered = render(DEPLOY / "kuberay/overlays/teacher-8b")
    have = {(i["kind"], i["metadata"]["name"]) for i in rendered}
    for item in rendered:
        for pod in pods(item):
            assert ("ServiceAccount", pod.get("serviceAccountName", "teachercache-writer")) in have
            for volume in pod.get("volumes", []):
                if "configMap" in volume:
                    assert ("ConfigMap", volume["configMap"]["name"]) in have
                if "persistentVolumeClaim" in volume:
                    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in have
            for source in pod["containers"][0].get("envFrom", []):
                if "configMapRef" in source:
                    assert ("ConfigMap", source["configMapRef"]["name"]) in have
                else:
                    assert source["secretRef"]["optional"] is True
