"""Write prometheusrule.yaml (for prometheus-operator) from rules.yaml: python deploy/monitoring/prometheusrule.py."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
HEAD = """\
# Made from rules.yaml by prometheusrule.py; edit that file.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: teachercache
  labels: {app.kubernetes.io/part-of: teachercache}
spec:
"""


def render() -> str:
    """Return the file's text."""
    rules = (HERE / "rules.yaml").read_text(encoding="utf-8")
    body = rules[rules.index("groups:") :]
    return HEAD + "".join(f"  {line}\n" for line in body.splitlines())


if __name__ == "__main__":
    (HERE / "prometheusrule.yaml").write_text(render(), encoding="utf-8")
