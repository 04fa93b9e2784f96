"""Write grafana-dashboard.json: python deploy/monitoring/dashboard.py.

A dashboard by code, so that a panel is one line and a review reads queries instead of 600 lines of JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SELECT = '{ray_io_cluster=~"$cluster"}'

# title, unit, [(legend, query)]; $c is the cluster selector
ROWS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]]]]]] = [
    (
        "Is it getting on?",
        [
            ("Tokens a second", "short",
             [("{{ray_io_cluster}}", "sum by (ray_io_cluster) (rate(ray_teachercache_tokens_total$c[15m]))")]),
            ("Shards left", "short", [("left", "max by (ray_io_cluster) (ray_teachercache_job_shards_left$c)"),
                                      ("quarantined", "max by (ray_io_cluster) (ray_teachercache_job_shards_quarantined$c)")]),
            ("Actors", "short", [("ready", "max by (ray_io_cluster) (ray_teachercache_job_teachers_ready$c)"),
                                   ("wanted", "max by (ray_io_cluster) (ray_teachercache_job_teachers_wanted$c)"),
                                   ("ended so far", "max by (ray_io_cluster) (ray_teachercache_job_teacher_deaths$c)")]),
            ("Hours left at this rate of shards", "h",
             [("{{ray_io_cluster}}", "max by (ray_io_cluster) (ray_teachercache_job_shards_left$c) / on (ray_io_cluster) "
               "(sum by (ray_io_cluster) (rate(ray_teachercache_shards_total$c[1h])) * 3600)")]),
        ],
    ),
    (
        "Is the engine the bottleneck?",
        [
            ("Engine busy", "percentunit", [("mean", "avg(ray_teachercache_engine_busy_fraction$c)"),
                                            ("worst", "min(ray_teachercache_engine_busy_fraction$c)")]),
            ("Inputs inside and waiting", "short", [("inside", "sum(ray_teachercache_engine_inside$c)"),
                                                    ("waiting", "sum(ray_teachercache_engine_waiting$c)")]),
            ("GPU utilisation", "percent", [("{{SessionName}} {{GpuIndex}}", "ray_node_gpus_utilization$c")]),
            ("GPU memory, MB", "decmbytes", [("{{SessionName}} {{GpuIndex}}", "ray_node_gram_used$c")]),
        ],
    ),
    (
        "What comes out, and what goes wrong?",
        [
            ("Rows and bytes a second", "short", [("rows", "sum(rate(ray_teachercache_rows_total$c[15m]))"),
                                                  ("bytes", "sum(rate(ray_teachercache_bytes_total$c[15m]))")]),
            ("Bytes a row", "short",
             [("{{ray_io_cluster}}", "sum by (ray_io_cluster) (rate(ray_teachercache_bytes_total$c[1h])) / "
               "sum by (ray_io_cluster) (rate(ray_teachercache_rows_total$c[1h]))")]),
            ("Documents dropped an hour, by reason", "short",
             [("{{reason}}", "sum by (reason) (increase(ray_teachercache_dropped_documents_total$c[1h]))"),
              ("kept", "sum(increase(ray_teachercache_documents_total$c[1h]))")]),
            ("Failures and lost races an hour", "short",
             [("failed attempts", "sum(increase(ray_teachercache_failures_total$c[1h]))"),
              ("repeated", "max(delta(ray_teachercache_job_retries$c[1h]))"),
              ("committed by others first", "sum(increase(ray_teachercache_conflicts_total$c[1h]))")]),
            ("Canary drift, share of the limit", "percentunit", [("worst", "max(ray_teachercache_canary_drift_ratio$c)")]),
            ("Node memory used", "bytes", [("{{SessionName}}", "ray_node_mem_used$c")]),
        ],
    ),
]  # fmt: skip


def panel(number: int, title: str, unit: str, targets: list[tuple[str, str]], x: int, y: int) -> dict[str, Any]:
    """Return one time series of the dashboard as JSON."""
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": x, "y": y, "w": 6, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "legendFormat": legend, "expr": query.replace("$c", SELECT)}
            for i, (legend, query) in enumerate(targets)
        ],
    }


def dashboard() -> dict[str, Any]:
    """Return the whole dashboard as JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        )
        y += 1
        for index, (name, unit, targets) in enumerate(row):
            panels.append(panel(len(panels) + 1, name, unit, targets, x=6 * (index % 4), y=y + 8 * (index // 4)))
        y += 8 * -(-len(row) // 4)
    cluster = "label_values(ray_teachercache_job_shards_left, ray_io_cluster)"
    return {
        "uid": "teachercache",
        "title": "teachercache: cache generation",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "cluster",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": cluster,
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "refresh": 2,
                },
            ]
        },
        "panels": panels,
    }


def render() -> str:
    """Return the file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    (HERE / "grafana-dashboard.json").write_text(render(), encoding="utf-8")
