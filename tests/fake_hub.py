"""A Hugging Face Hub on a loopback port, for the Hub's real client: the requests of huggingface_hub 2, answered from memory.

Repositories with commits and branches; preupload, LFS batch and uploads in one or several parts, commits with
`parentCommit` (412 where it is stale), revisions, trees, paths-info, `resolve` with ranges. No Xet. `on_request` is
called before each request is answered, and may raise `Refuse`, or kill whoever asks.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SIGNATURE = "signature-of-an-upload-url"
HARNESSES = "/api/agent-harnesses"  # asked now and then, for the client's own statistics; not counted
PAGE = 25  # entries of a listing
PART = 50_000  # bytes of a part of a large upload
_REPO = r"(?P<repo>[^/]+/[^/]+)"
_KIND = r"(?P<kind>models|datasets)"
_API = rf"/api/{_KIND}/{_REPO}"


class Refuse(Exception):
    """An answer with this status instead of the right one."""

    def __init__(self, status: int, headers: dict[str, str] | None = None, **body: str) -> None:
        self.status, self.headers, self.body = status, headers or {}, {"error": "refused", **body}


@dataclass
class Commit:
    sha: str
    files: dict[str, tuple[bytes, bool]]  # path -> content, and whether it is an LFS file


@dataclass
class Repository:
    private: bool
    commits: list[Commit] = field(default_factory=list)

    def add(self, files: dict[str, tuple[bytes, bool]]) -> Commit:
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits.append(Commit(sha, files))
        return self.commits[-1]

    def at(self, revision: str) -> Commit:
        if revision == "main":
            return self.commits[-1]
        found = [commit for commit in self.commits if commit.sha == revision]
        if not found:
            raise Refuse(404, {"X-Error-Code": "RevisionNotFound"})
        return found[0]


class FakeHub:
    """The state of the Hub. `tokens` are the tokens that may do everything."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.blobs: dict[str, bytes] = {}  # sha256 -> content of what was uploaded
        self.parts: dict[tuple[str, int], bytes] = {}
        self.tokens = {"hf_write"}
        self.requests: list[str] = []  # "METHOD /path"
        self.on_request: Callable[[str], None] = lambda request: None
        self.lock = threading.RLock()
        self.endpoint = ""

    def publish(self, kind: str, name: str, files: dict[str, bytes], *, private: bool = False) -> str:
        """Make or change a repository without HTTP, whatever the names of its files; returns the commit."""
        with self.lock:
            repository = self.repositories.setdefault((kind, name), Repository(private))
            return repository.add({path: (data, len(data) > 10_000) for path, data in files.items()}).sha

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """The content of a data set, by path."""
        return {path: data for path, (data, _) in self.repositories["datasets", name].at(revision).files.items()}

    # ---- requests ----------------------------------------------------------------------------------------------

    def repository(self, handler: Handler, kind: str, name: str) -> Repository:
        authorized = handler.authorized()
        found = self.repositories.get((kind, name))
        if found is None or (found.private and not authorized):
            raise Refuse(404 if authorized else 401, {"X-Error-Code": "RepoNotFound"})
        return found

    def create(self, handler: Handler) -> Any:
        asked = json.loads(handler.body)
        if not handler.authorized():
            raise Refuse(401)
        if asked["organization"] == "others":
            raise Refuse(403)
        key = (f"{asked.get('type', 'model')}s", f"{asked['organization']}/{asked['name']}")
        with self.lock:
            url = f"{self.endpoint}/{key[0]}/{key[1]}"
            if key in self.repositories:
                raise Refuse(409, url=url)
            self.repositories[key] = Repository(asked.get("visibility") == "private")
            self.repositories[key].add({".gitattributes": (b"*.parquet filter=lfs diff=lfs merge=lfs -text\n", False)})
        return {"url": url}

    def validate(self, handler: Handler) -> Any:
        return {"warnings": [], "errors": []}

    def preupload(self, handler: Handler, kind: str, repo: str, revision: str) -> Any:
        commit = self.repository(handler, kind, repo).at(revision)
        answer = []
        for asked in json.loads(handler.body)["files"]:
            lfs = asked["path"].endswith(".parquet") or asked["size"] > 10_000_000
            there = commit.files.get(asked["path"])
            oid = None if there is None else hashlib.sha256(there[0]).hexdigest() if there[1] else blob_id(there[0])
            answer.append(
                {"path": asked["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}
            )
        return {"files": answer}

    def batch(self, handler: Handler, kind: str, repo: str) -> Any:
        if not handler.authorized():
            raise Refuse(401)
        self.repository(handler, kind, repo)
        objects: list[dict[str, Any]] = []
        for asked in json.loads(handler.body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            objects.append({"oid": oid, "size": size})
            if oid in self.blobs:
                continue
            at = f"{self.endpoint}/lfs/{oid}?X-Amz-Signature={SIGNATURE}"
            upload: dict[str, Any] = {"href": at}
            if size > PART:
                count = -(-size // PART)
                upload = {"href": f"{self.endpoint}/lfs-complete/{oid}", "header": {"chunk_size": str(PART)}}
                upload["header"] |= {str(n): f"{at}&part={n}" for n in range(1, count + 1)}
            objects[-1]["actions"] = {"upload": upload, "verify": {"href": f"{self.endpoint}/lfs-verify"}}
        return {"transfer": "basic", "objects": objects}

    def put(self, handler: Handler, oid: str) -> Any:
        if part := handler.query.get("part"):
            self.parts[oid, int(part)] = handler.body
            handler.extra["ETag"] = f'"{part}"'
        else:
            self.blobs[oid] = handler.body
        return {}

    def complete(self, handler: Handler, oid: str) -> Any:
        numbers = [part["partNumber"] for part in json.loads(handler.body)["parts"]]
        self.blobs[oid] = b"".join(self.parts.pop((oid, number)) for number in numbers)
        return {}

    def verify(self, handler: Handler) -> Any:
        asked = json.loads(handler.body)
        data = self.blobs.get(asked["oid"], b"")
        if hashlib.sha256(data).hexdigest() != asked["oid"] or len(data) != asked["size"]:
            raise Refuse(422)
        return {}

    def commit(self, handler: Handler, kind: str, repo: str, revision: str) -> Any:
        if not handler.authorized():
            raise Refuse(401)
        repository = self.repository(handler, kind, repo)
        lines = [json.loads(line) for line in handler.body.splitlines()]
        with self.lock:
            head = repository.at(revision)
            if lines[0]["value"].get("parentCommit", head.sha) != head.sha:
                raise Refuse(412)
            files = dict(head.files)
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = (base64.b64decode(value["content"]), False)
                elif line["key"] == "lfsFile":
                    if value["oid"] not in self.blobs:
                        raise Refuse(422)
                    files[value["path"]] = (self.blobs[value["oid"]], True)
                else:
                    raise Refuse(400)
            sha = repository.add(files).sha
        return {"commitUrl": f"{self.endpoint}/{repo}/commit/{sha}", "commitOid": sha}

    def info(self, handler: Handler, kind: str, repo: str, revision: str = "main") -> Any:
        repository = self.repository(handler, kind, repo)
        commit = repository.at(revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        return {"id": repo, "sha": commit.sha, "private": repository.private, "siblings": siblings}

    def tree(self, handler: Handler, kind: str, repo: str, revision: str, path: str = "") -> Any:
        commit = self.repository(handler, kind, repo).at(revision)
        entries = list(tree_entries(commit, unquote(path)))
        if path and not entries:
            raise Refuse(404, {"X-Error-Code": "EntryNotFound"})
        if handler.query.get("recursive", "").lower() != "true":
            below = f"{unquote(path)}/" if path else ""
            entries = [entry for entry in entries if "/" not in entry["path"].removeprefix(below)]
        begin = int(handler.query.get("cursor", 0))
        if begin + PAGE < len(entries):
            query = "&".join(f"{k}={v}" for k, v in (handler.query | {"cursor": str(begin + PAGE)}).items())
            handler.extra["Link"] = f'<{self.endpoint}{handler.path.split("?")[0]}?{query}>; rel="next"'
        return entries[begin : begin + PAGE]

    def paths_info(self, handler: Handler, kind: str, repo: str, revision: str) -> Any:
        commit = self.repository(handler, kind, repo).at(revision)
        text = handler.body.decode()
        asked = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
        return [entry for entry in tree_entries(commit, "") if entry["path"] in asked]

    def refs(self, handler: Handler, kind: str, repo: str) -> Any:
        head = self.repository(handler, kind, repo).commits[-1].sha
        return {
            "branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": head}],
            "converts": [],
            "tags": [],
        }

    def resolve(self, handler: Handler, repo: str, revision: str, path: str, kind: str = "models") -> Any:
        commit = self.repository(handler, kind.rstrip("/") or "models", repo).at(revision)
        if unquote(path) not in commit.files:
            raise Refuse(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit.sha})
        data, lfs = commit.files[unquote(path)]
        etag = hashlib.sha256(data).hexdigest() if lfs else blob_id(data)
        handler.extra |= {"ETag": f'"{etag}"', "X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
        if lfs:
            handler.extra |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        return data


def tree_entries(commit: Commit, below: str) -> Iterator[dict[str, Any]]:
    """Files and folders of a commit below a path, sorted."""
    folders: set[str] = set()
    for path, (data, lfs) in sorted(commit.files.items()):
        if below and not path.startswith(f"{below}/"):
            continue
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            if folder not in folders and len(folder) > len(below):
                folders.add(folder)
                yield {"type": "directory", "path": folder, "size": 0, "oid": hashlib.sha1(folder.encode()).hexdigest()}
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob_id(data)}
        if lfs:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        yield entry


def blob_id(data: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


ROUTES = [
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", rf"{_API}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"{_API}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"{_API}/paths-info/(?P<revision>[^/]+)", "paths_info"),
    ("GET", rf"{_API}/revision/(?P<revision>[^/]+)", "info"),
    ("GET", rf"{_API}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
    ("GET", rf"{_API}/refs", "refs"),
    ("GET", _API, "info"),
    ("POST", rf"/(?P<kind>datasets)/{_REPO}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "put"),
    ("POST", r"/lfs-complete/(?P<oid>[0-9a-f]{64})", "complete"),
    ("POST", r"/lfs-verify", "verify"),
    ("HEAD|GET", rf"/(?P<kind>datasets/)?{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body of an answer in one packet
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def authorized(self) -> bool:
        given = self.headers.get("Authorization", "")
        if given and given.removeprefix("Bearer ") not in self.hub.tokens:
            raise Refuse(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        return bool(given)

    def answer(self) -> None:
        parts = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.body = self.read_body()
        self.extra: dict[str, str] = {}
        request = f"{self.command} {parts.path}"
        status, content = 200, b""
        try:
            if parts.path != HARNESSES:
                self.hub.requests.append(request)
                self.hub.on_request(request)
            result = self.routed(parts.path)
            content = result if isinstance(result, bytes) else json.dumps(result).encode()
            if isinstance(result, bytes) and (
                span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            ):
                first, last = int(span[1]), int(span[2] or len(content) - 1)
                if first >= len(content):
                    raise Refuse(416, {"Content-Range": f"bytes */{len(content)}"})
                self.extra["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
                status, content = 206, content[first : last + 1]
        except Refuse as refused:
            status, content, self.extra = refused.status, json.dumps(refused.body).encode(), dict(refused.headers)
        self.send_response(status)
        for name, value in {**self.extra, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        size = int(self.headers.get("Content-Length") or 0)
        if len(data := self.rfile.read(size)) < size:
            raise ConnectionResetError  # of a client that was killed
        return data

    def routed(self, path: str) -> Any:
        for methods, pattern, name in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in methods.split("|"):
                found = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                return getattr(self.hub, name)(self, **found)
        raise Refuse(404)

    def handle(self) -> None:
        with suppress(ConnectionError):  # of a client that was killed
            super().handle()

    do_GET = do_HEAD = do_POST = do_PUT = answer


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A Hub that answers until the context ends; `endpoint` is what HF_ENDPOINT is set to."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
