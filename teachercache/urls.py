"""What a URL may be: of a known scheme, and without credentials, since every message, log and plan quotes it."""

from __future__ import annotations

import difflib
import re
from urllib.parse import unquote

import fsspec

from teachercache.errors import UsageError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)  # one slash too: a misspelt URL is quoted as well
_USER_AND_PASSWORD = re.compile(r"[^\s/@]+:[^\s/@]*@")  # an endpoint without its scheme
_SECRET_IN_QUERY = re.compile(
    r"[?&#;][^=&/]*(key|secret|token|signature|credential|password|sig)[^=&]*=", re.IGNORECASE
)
_QUERY = re.compile(r"\?[^/?=&]*=")  # not the `?` of a glob
_USER_ALONE = {"abfs", "abfss", "wasb", "wasbs", "ssh", "sftp"}  # a container's or a user's name before the `@`
NO_CREDENTIALS = (
    "a URL names a place and holds no credentials; expected for example s3://bucket/prefix, without a user or password "
    "before the host and without a query ('?…'), and credentials from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile."
)

SCHEMES = {"file", "http", "https", "s3", *fsspec.available_protocols()}
_SCHEME_LIKE = re.compile(r"([^\W\d_][\w+.-]+)(:(?!//)[/\\]*|[;.,]?//+|\\+)")  # s3:/x, s3:x, s3//x, s3\\x
_USUAL = ("s3", "s3a", "gs", "gcs", "http", "https", "file", "hf", "az", "abfs")


def check_url(url: str) -> None:
    """Raise UsageError for a URL that is misspelt or holds credentials. For every URL that a user gives.

    A misspelt scheme would otherwise be a path: `s3:/bucket/x` makes a folder `s3:` here, and the job succeeds.
    """
    if url != url.strip():
        raise UsageError("there are blanks around a URL; remove them.")
    refuse_credentials(url)
    scheme, separator, rest = url.rpartition("::")[2].partition("://")
    if separator:
        if scheme not in SCHEMES:
            near = difflib.get_close_matches(scheme.lower(), [*_USUAL, *sorted(SCHEMES)], 1)
            hint = f"did you mean {near[0]}://?" if near else "expected s3://, file:// or a path"
            raise UsageError(f"{scheme + '://'!a} is not supported; {hint}")
        if scheme in ("s3", "s3a", "gs", "gcs", "http", "https") and not re.match(r"[^/?#\\]", rest):
            what = "host" if scheme.startswith("http") else "bucket"
            raise UsageError(f"a URL names no {what}; expected for example {scheme}://{what}/path.")
        if scheme == "file" and not re.match(r"/|[A-Za-z]:", rest):
            raise UsageError(f"{url!a} is no whole path; expected file:///{rest} or a plain path.")
        return
    found = _SCHEME_LIKE.match(url)
    if found and (near := difflib.get_close_matches(found[1].lower(), _USUAL, 1, cutoff=0.75)):
        raise UsageError(
            f"a URL that begins {found[0]!a} would be a path on this machine; did you mean {near[0]}://? A path with "
            "such a name begins with ./ or /."
        )


def refuse_read_only(url: str) -> None:
    """Raise UsageError for a URL that is read only. For every URL that something is written to."""
    if url.startswith("hf://"):
        raise UsageError(
            f"{url!a} is read only: write the cache to s3:// or a folder, then run "
            "`teachercache push CACHE hf://datasets/ORG/NAME`."
        )


def refuse_credentials(url: str, what: str = "") -> None:
    """Raise UsageError for a URL that holds credentials, without repeating it; `what` is what the message calls it.

    Credentials are user:secret@host, a token before the host, and any query: signed URLs have theirs there. Text that
    is no URL passes. The check is the same for URLs within URLs (`simplecache::s3://…`).
    """
    held = _USER_AND_PASSWORD.match(url) is not None
    for found in _SCHEME.finditer(url):
        if re.search(r"\s", url[: found.start()]):  # a sentence that mentions a URL
            break
        held = held or _in_host(found[1].lower(), url[found.end() :]) or _in_query(found[1].lower(), url[found.end() :])
    if held:
        raise UsageError(f"{what}: {NO_CREDENTIALS}" if what else NO_CREDENTIALS)


def hide_credentials(text: str) -> str:
    """Return a message in which every word that `refuse_credentials` refuses is left out."""

    def shown(word: re.Match[str]) -> str:
        try:
            refuse_credentials(word[0])
        except UsageError:
            return "(a URL with credentials)"
        return word[0]

    return re.sub(r"\S+", shown, text)


def _in_host(scheme: str, rest: str) -> bool:
    host = unquote(re.split(r"[/?#]", rest, maxsplit=1)[0])
    user, at, _ = host.rpartition("@")
    if at:
        return ":" in user or scheme not in _USER_ALONE
    # A secret may hold a slash, which ends the host early: "key:sec/ret@bucket".
    _, colon, port = host.rpartition(":")
    return bool(colon) and not host.startswith(("arn:", "[")) and (scheme in ("s3", "s3a") or not port.isdigit())


def _in_query(scheme: str, rest: str) -> bool:
    return (scheme in ("http", "https") and "?" in rest) or any(p.search(rest) for p in (_SECRET_IN_QUERY, _QUERY))
