"""The RayJob's entry point, run unchanged: a Ray head that was started where job.yaml is mounted, S3, a small job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import teachercache
from tests.deploy.manifests import DEPLOY, ROOT, objects
from tests.deploy.small import job_tree, make_corpus, make_tokenizer, write_job
from tests.waiting import wait_for

sys.path.insert(0, str(ROOT / "scripts"))
from demo_services import BIN, ray_head


def submit(
    address: str, entrypoint: str, runtime_env: str, env: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """What KubeRay's submitter does: `ray job submit --address … --runtime-env-json … -- <entrypoint>`."""
    command = [str(BIN / "ray"), "job", "submit", "--address", address]
    command += ["--runtime-env-json", json.dumps(yaml.safe_load(runtime_env)), "--", *entrypoint.split()]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=240)


def scraped(temporary: Path) -> dict[str, float]:
    """Our metrics, summed over labels, from every address that Ray tells Prometheus."""
    found: dict[str, float] = {}
    (discovery,) = temporary.glob("tc-ray-*/prom_metrics_service_discovery.json")
    for group in json.loads(discovery.read_text()):
        for target in group["targets"]:
            try:
                page = urllib.request.urlopen(f"http://{target}/metrics", timeout=10).read().decode()
            except urllib.error.URLError:  # a process of Ray that starts, or is gone: Prometheus would ask again
                continue
            for name, value in re.findall(r"^(ray_teachercache_\w+)(?:\{.*\})? (\S+)$", page, re.M):
                found[name] = found.get(name, 0.0) + float(value)
    return found


@pytest.fixture
def short_temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder for Ray with a short name: the paths of its Unix sockets may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_entrypoint_completes_a_job_and_run_again_does_nothing(
    s3_url: str, tmp_path: Path, short_temporary: Path, monkeypatch
) -> None:
    (manifest,) = objects((DEPLOY / "kuberay/base/rayjob.yaml").read_text())
    spec = manifest["spec"]
    mounted = tmp_path / "mounted"  # what the ConfigMap is in the pod: the head's working directory
    mounted.mkdir()
    cache = f"{s3_url}/small"
    tree = job_tree(cache, make_tokenizer(tmp_path / "model"), make_corpus(tmp_path / "corpus.jsonl"))
    write_job(mounted / "job.yaml", tree)

    env = dict(os.environ, PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", RAY_DEDUP_LOGS="0")
    for name in ("RAY_ADDRESS", "PYTHONPATH"):
        env.pop(name, None)
    monkeypatch.chdir(mounted)
    elsewhere = tmp_path / "submitter"
    elsewhere.mkdir()
    with ray_head(env, tmp_path / "ray.log", num_cpus=2) as address:
        first = submit(address, spec["entrypoint"], spec["runtimeEnvYAML"], env, elsewhere)
        assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
        pinned = teachercache.open(cache).manifest
        assert pinned.complete
        assert pinned.documents == 12
        expected = {"ray_teachercache_documents_total": 12.0, "ray_teachercache_job_shards_left": 0.0}  # of the rules
        wait_for(lambda: expected.items() <= scraped(short_temporary).items(), what=f"metrics that are {expected}")
        before = sorted(o.path for o in teachercache.Store.open(cache).list(""))

        again = submit(address, spec["entrypoint"], spec["runtimeEnvYAML"], env, elsewhere)
        assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert "0 shards committed" in again.stdout
    after = teachercache.Store.open(cache)
    assert sorted(o.path for o in after.list("") if not o.path.startswith("probes/")) == [
        path for path in before if not path.startswith("probes/")
    ]
    assert teachercache.open(cache).manifest.digest == pinned.digest
