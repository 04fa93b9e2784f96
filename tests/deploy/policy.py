"""A small evaluator of IAM and bucket policies: an explicit deny wins, then an allow, else denied.

It knows what our policies use, and refuses the rest by name, so that a statement is never half understood.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def load(path: Path) -> list[dict[str, Any]]:
    """Statements of a policy file; unknown keys are refused."""
    document = json.loads(path.read_text())
    assert document["Version"] == "2012-10-17"
    assert document.keys() == {"Version", "Statement"}
    for statement in document["Statement"]:
        extra = statement.keys() - {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
        assert not extra, f"{path.name}: {extra}"
        assert statement["Effect"] in ("Allow", "Deny")
        assert re.fullmatch(r"[A-Za-z0-9]+", statement["Sid"])
    return document["Statement"]


def allowed(
    action: str,
    resource: str,
    *,
    identity: list[dict[str, Any]],
    bucket: list[dict[str, Any]] = (),  # type: ignore[assignment]
    context: Mapping[str, str] | None = None,
) -> bool:
    """Whether a principal with the identity policy may do `action` on `resource` of a bucket with that policy."""
    facts = {
        "aws:SecureTransport": "true",
        "aws:PrincipalArn": "arn:aws:iam::111122223333:role/anyone",
        **(context or {}),
    }
    verdicts = [s["Effect"] for s in identity if _applies(s, action, resource, facts)]
    verdicts += [s["Effect"] for s in bucket if _applies(s, action, resource, facts) and _principal(s, facts)]
    return "Deny" not in verdicts and "Allow" in verdicts


def _applies(statement: Mapping[str, Any], action: str, resource: str, facts: Mapping[str, str]) -> bool:
    return (
        any(_match(pattern.lower(), action.lower()) for pattern in _list(statement["Action"]))
        and any(_match(pattern, resource) for pattern in _list(statement["Resource"]))
        and all(_condition(operator, block, facts) for operator, block in statement.get("Condition", {}).items())
    )


def _principal(statement: Mapping[str, Any], facts: Mapping[str, str]) -> bool:
    principal = statement["Principal"]
    if principal == "*":
        return True
    account = facts["aws:PrincipalArn"].split(":")[4]
    return any(arn == f"arn:aws:iam::{account}:root" for arn in _list(principal["AWS"]))


def _condition(operator: str, block: Mapping[str, Any], facts: Mapping[str, str]) -> bool:
    for key, wanted in block.items():
        value = facts.get(key)
        if operator == "Null":
            holds = (value is None) == (wanted == "true")
        elif operator == "Bool":
            holds = value is not None and value == wanted
        elif operator == "ArnNotLike":
            holds = value is None or not any(_match(pattern, value) for pattern in _list(wanted))
        else:
            raise AssertionError(f"the evaluator does not know {operator}")
        if not holds:
            return False
    return True


def _match(pattern: str, value: str) -> bool:
    """IAM's wildcards: * and ? cross every character, slashes too; brackets are plain."""
    return fnmatch.fnmatchcase(value, pattern.replace("[", "[[]"))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
