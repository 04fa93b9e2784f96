"""`python -m pipeline doctor [JOB or URL]`: teachercache's checks, and those of torch, Ray and vLLM.

Heavy packages are looked at in a child process: a build that crashes at import must be a finding, not a crash.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from teachercache.doctor import FAIL, OK, WARN, Finding, examine

TIMEOUT_S = 180

TORCH = """
import json, torch
n = torch.cuda.device_count()
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": n,
                  "capability": torch.cuda.get_device_capability(0) if n else None}))
"""
RAY = """
import json, os, sys, ray
found = {"version": ray.__version__}
if os.environ.get("RAY_ADDRESS"):
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    found["resources"] = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
    found["nodes"] = sum(node["Alive"] for node in ray.nodes())
print(json.dumps(found))
"""
VLLM = """
import json, vllm
from pipeline.teachers import raw_tensors
import vllm.envs as envs
print(json.dumps({"version": vllm.__version__, "fast_path_missing": raw_tensors.unsupported(),
                  "v2_runner": getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", "unknown")}))
"""


def examine_pipeline(url: str | None = None, *, write: bool = True) -> list[Finding]:
    """Check everything that `python -m pipeline run` needs on this machine."""
    return [*examine(url, write=write), check_torch(), check_ray(), *check_vllm()]


def child(code: str) -> tuple[dict[str, Any] | None, str]:
    """Run Python code that prints one JSON line last; return (its value, "") or (None, why not)."""
    env = dict(os.environ, RAY_DEDUP_LOGS="0", VLLM_LOGGING_LEVEL="ERROR")
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {TIMEOUT_S} s"
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line), ""
    last = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
    return None, last[:300]


def check_torch() -> Finding:
    """Look at torch and its GPUs."""
    found, why = child(TORCH)
    if found is None:
        return Finding("torch", FAIL, why, "install what constraints/cpu.txt or constraints/cuda.txt pins")
    if found["gpus"]:
        capability = ".".join(map(str, found["capability"]))
        return Finding("torch", OK, f"{found['version']}, CUDA {found['cuda']}, {found['gpus']} GPUs (sm {capability})")
    if found["cuda"]:
        return Finding(
            "torch", WARN, f"{found['version']} is built for CUDA, no GPU is visible", "check CUDA_VISIBLE_DEVICES"
        )
    return Finding("torch", OK, f"{found['version']}, CPU")


def check_ray() -> Finding:
    """Look at Ray, and at the cluster that RAY_ADDRESS names."""
    found, why = child(RAY)
    if found is None:
        return Finding("ray", FAIL, why, "pip install 'ray[default]'; if RAY_ADDRESS is set, check that it answers")
    if "resources" not in found:
        return Finding("ray", OK, f"{found['version']}; RAY_ADDRESS is not set, so a run starts a local Ray")
    resources = ", ".join(f"{value:g} {name}" for name, value in sorted(found["resources"].items()))
    return Finding("ray", OK, f"{found['version']}; cluster of {found['nodes']} nodes: {resources}")


def check_vllm() -> list[Finding]:
    """Look at vLLM, its fast path and its runner."""
    found, why = child(VLLM)
    if found is None:
        return [Finding("vllm", FAIL, why, "install what the constraints pin; teacher.engine=hf works without, slowly")]
    findings = [Finding("vllm", OK, found["version"])]
    if missing := found["fast_path_missing"]:
        do = (
            "rows come by the public path, at 82 % of plain prefill on an H200 instead of 90 %; take a tested version "
            "(constraints/), or set teacher.fast_path=off to say that this is meant"
        )
        findings.append(Finding("vllm: fast path", WARN, missing, do))
    else:
        findings.append(Finding("vllm: fast path", OK, "the engine's tensors can be taken before objects are built"))
    if found["v2_runner"] is False:
        do = (
            "the V1 runner holds a float32 log-softmax of a whole prefill chunk outside its memory profile: unset the "
            "variable, or lower gpu_memory_utilization and max_num_batched_tokens"
        )
        return [*findings, Finding("vllm: runner", WARN, "V1, by VLLM_USE_V2_MODEL_RUNNER=0", do)]
    shown = {True: "V2, by VLLM_USE_V2_MODEL_RUNNER", None: "vLLM's choice", "unknown": "this vLLM has no switch"}
    return [*findings, Finding("vllm: runner", OK, shown[found["v2_runner"]])]
