"""`doctor` is right on this machine, with a broken S3, and with a vLLM that lacks the fast path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.watching.doctor import (
    check_ray,
    check_torch,
    check_vllm,
    child,
)
from teachercache import doctor
from teachercache.doctor import (
    FAIL,
    OK,
    WARN,
    Finding,
)
from tests.deploy.manifests import ROOT


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


@pytest.mark.slow
def test_this_machine_is_fit_and_says_what_it_is(s3_url: str) -> None:
    command = [sys.executable, "-m", "pipeline", "doctor", f"{s3_url}/cache", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    found = {finding["check"]: finding for finding in report["findings"]}
    assert report["ok"]
    assert found["python"]["found"].startswith(".".join(map(str, sys.version_info[:3])))
    assert found["gpu"]["status"] == (OK if shutil.which("nvidia-smi") else WARN)
    assert found["store: conditional writes"]["status"] == OK
    assert found["torch"]["status"] == found["ray"]["status"] == found["vllm"]["status"] == OK
    assert found["vllm: fast path"]["status"] == OK


def test_a_store_that_ignores_conditions_fails_with_its_code(unsafe_s3_url: str) -> None:
    findings = by_name(doctor.check_store(f"{unsafe_s3_url}/cache"))
    assert findings["store: reading"].status == OK
    unsafe = findings["store: conditional writes"]
    assert unsafe.status == FAIL
    assert "TC-E202" in unsafe.found
    assert doctor.print_findings(findings.values()) == 1


@pytest.mark.slow
def test_a_store_that_does_not_answer_fails_and_names_the_endpoint(monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "doctor-test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "doctor-test-secret")
    monkeypatch.setattr("teachercache.store.store.TRIES", 1)  # patience is tested elsewhere
    (finding,) = doctor.check_store("s3://bucket/cache")
    assert finding.status == FAIL
    assert "127.0.0.1:9" in finding.found
    assert "TC-E109" in finding.found
    assert "doctor-test" not in finding.found + finding.do


def test_wrong_credentials_fail_and_are_not_printed(monkeypatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    (finding,) = doctor.check_store("s3://bucket/cache")
    assert finding.status == FAIL
    assert "TC-E203" in finding.found


def fake_vllm(folder: Path, engine: str, envs: str = "") -> None:
    package = folder / "vllm" / "v1" / "engine"
    package.mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text('__version__ = "9.9.9"\n')
    (folder / "vllm/envs.py").write_text(envs)
    (folder / "vllm/v1/__init__.py").write_text("")
    (package / "__init__.py").write_text("class EngineCoreOutput:\n    __struct_fields__ = ()\n")
    (package / "logprobs.py").write_text(engine)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("class LogprobsProcessor:\n    pass\n", "LogprobsProcessor.from_new_request is gone"),
        ("", "vllm.v1.engine has changed"),
    ],
)
def test_a_vllm_without_the_fast_path_is_a_warning_that_says_what_it_costs(tmp_path, monkeypatch, engine, why) -> None:
    fake_vllm(tmp_path, engine)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    found = by_name(check_vllm())
    assert found["vllm"].found == "9.9.9"
    assert found["vllm: fast path"].status == WARN
    assert why in found["vllm: fast path"].found
    assert "82 %" in found["vllm: fast path"].do


def test_a_runner_that_was_switched_back_is_a_warning(tmp_path, monkeypatch) -> None:
    fake_vllm(tmp_path, "", "VLLM_USE_V2_MODEL_RUNNER = False\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    assert by_name(check_vllm())["vllm: runner"].status == WARN


@pytest.mark.parametrize(
    ("name", "check"), [("torch", check_torch), ("ray", check_ray), ("vllm", lambda: check_vllm()[0])]
)
def test_a_package_that_crashes_at_import_is_a_finding(tmp_path, monkeypatch, name, check) -> None:
    (tmp_path / f"{name}.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    finding = check()
    assert finding.status == FAIL
    assert "libcuda.so.1" in finding.found


def test_a_child_that_dies_silently_is_a_finding() -> None:
    assert child("import os; os._exit(3)") == (None, "ended with status 3")


def test_an_old_python_and_a_full_disk_fail(monkeypatch) -> None:
    assert doctor.check_python((3, 9, 1)).status == FAIL
    usage = type("Usage", (), {"free": 10 * 2**20})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert doctor.check_scratch().status == FAIL
    assert doctor.check_shared_memory().status == WARN


def test_old_packages_are_named(monkeypatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2024.1.0" if name == "s3fs" else "2999.1")
    found = by_name(doctor.check_packages())
    assert found["s3fs"].status == FAIL
    assert found["pyarrow"].status == OK
    assert doctor.release("2025.3.2.post1") == (2025, 3, 2)


def test_a_driver_that_hangs_is_a_finding(tmp_path, monkeypatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("teachercache.doctor.GPU_SECONDS", 0.2)
    assert doctor.check_gpu().status == "fail"
