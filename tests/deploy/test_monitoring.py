"""Rules pass promtool and their unit tests; every metric that a rule or panel names is one that is exported."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from pipeline.teachers.canary import LIMITS, WARN_RATIO, drift_ratio
from pipeline.watching.metrics import COUNTERS, GAUGES, JOB_GAUGES
from tests.deploy.manifests import DEPLOY, ROOT

MONITORING = DEPLOY / "monitoring"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def promtool() -> str:
    try:
        return str(module(ROOT / "scripts/fetch_promtool.py").promtool())
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_rules_pass_promtool(promtool: str) -> None:
    done = subprocess.run([promtool, "check", "rules", "rules.yaml"], cwd=MONITORING, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scrape_configuration_passes_promtool(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "config", "prometheus.yaml"], cwd=MONITORING, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_pass_their_unit_tests(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "test", "rules", "rules.test.yaml"], cwd=MONITORING, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_unit_test_in_which_it_fires() -> None:
    tests = yaml.safe_load((MONITORING / "rules.test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", []) if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}


def test_rules_are_tested_with_values_that_the_code_can_emit() -> None:
    """A fraction or ratio has its values in [0, 1]; counts are whole and never negative. See pipeline/watching/metrics.py."""
    tests = yaml.safe_load((MONITORING / "rules.test.yaml").read_text())["tests"]
    series = [line for test in tests for line in test["input_series"]]
    assert series
    for line in series:
        name = line["series"].partition("{")[0]
        assert name in exported(), name
        if name.endswith(("_fraction", "_ratio")):
            starts = [float(re.split("[+-]", part)[0]) for part in line["values"].split()]
            assert all(0 <= start <= 1 for start in starts), line
        else:
            assert all(float(number).is_integer() for number in re.findall(r"\d+(?:\.\d+)?", line["values"])), line


def test_the_canarys_alert_fires_below_the_largest_drift_that_lets_an_actor_start() -> None:
    """Above its limit an actor refuses to start and exports nothing, so the largest value that is ever seen is 1."""
    (rule,) = (rule for rule in rules() if rule.get("alert") == "TeachercacheCanaryDrift")
    threshold = float(rule["expr"].rsplit(">", 1)[1])
    assert threshold == WARN_RATIO
    for dtype in ("float32", "float16", "bfloat16"):
        reachable = drift_ratio({pair: limits[dtype] for pair, limits in LIMITS.items()}, dtype)
        assert threshold < reachable == 1
    page = (ROOT / "docs/OPERATIONS.md").read_text()
    section = page[page.index("### TeachercacheCanaryDrift") :].split("\n### ")[0]
    assert f"{WARN_RATIO:.0%}".replace("%", " %") in section
    for limits in LIMITS.values():
        assert f"{limits['bfloat16']} nat" in section


def test_operators_rules_are_the_plain_ones() -> None:
    assert (MONITORING / "prometheusrule.yaml").read_text() == module(MONITORING / "prometheusrule.py").render()
    operator = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())
    assert operator["spec"] == yaml.safe_load((MONITORING / "rules.yaml").read_text())


def test_dashboard_is_the_one_that_its_program_writes() -> None:
    assert (MONITORING / "grafana-dashboard.json").read_text() == module(MONITORING / "dashboard.py").render()


def rules() -> list[dict]:
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    variables = [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    return panels + variables + [rule["expr"] for rule in rules()]


def exported() -> set[str]:
    """Names as Prometheus sees them: Ray puts `ray_` before, and `_total` after counters."""
    return {f"ray_{name}_total" for name in COUNTERS} | {f"ray_{name}" for name in (*GAUGES, *JOB_GAUGES)}


def rays_own(name: str) -> bool:
    """Whether Ray's reporter exports a node metric of that name."""
    source = importlib.util.find_spec("ray.dashboard.modules.reporter.reporter_agent")
    assert source is not None
    assert source.origin is not None
    return f'"{name.removeprefix("ray_")}"' in Path(source.origin).read_text()


def test_every_metric_that_is_named_is_exported() -> None:
    named = {name for expression in expressions() for name in re.findall(r"\bray_(?!io_cluster)\w+", expression)}
    assert named
    ours = {name for name in named if name.startswith("ray_teachercache_")}
    assert ours <= exported(), ours - exported()
    assert all(rays_own(name) for name in named - ours)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for expression in expressions() for name in re.findall(r"\bteachercache:[\w:]+", expression)}
    assert used <= recorded


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    assert {name for name in exported() if not any(name in expression for expression in expressions())} == set()


def test_dashboard_panels_do_not_overlap_and_have_queries() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        assert grid["x"] + grid["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or all(target["expr"] for target in panel["targets"])


def test_runbooks_are_pages() -> None:
    page = (ROOT / "docs/OPERATIONS.md").read_text()
    for rule in rules():
        if "alert" in rule:
            file, _, fragment = rule["annotations"]["runbook"].partition("#")
            assert (ROOT / file).exists()
            assert fragment == rule["alert"].lower()
            assert f"### {rule['alert']}\n" in page


def test_prometheus_finds_pods_by_the_port_that_the_manifests_name() -> None:
    monitor = yaml.safe_load((MONITORING / "podmonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    text = (DEPLOY / "kuberay/base/rayjob.yaml").read_text()
    assert text.count(f"{{name: {endpoint['port']}, containerPort: 8080}}") == 2  # head and workers
    assert text.count('metrics-export-port: "8080"') == 2
