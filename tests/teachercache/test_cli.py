"""The command line: what it prints, in which form, with which exit status."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import teachercache
import teachercache.cli
from teachercache.cli import main
from teachercache.format.objects import Plan, PlanShard
from teachercache.format.sealed import seal, utc_now
from teachercache.format.spec import SampledRows
from teachercache.testing import synthetic_records, synthetic_spec

SPEC = synthetic_spec()


@pytest.fixture
def cache(tmp_path):
    writer = teachercache.create(tmp_path / "team" / "cache", SPEC)
    writer.commit("a", synthetic_records(SPEC, 6, seed=1, prefix="a"), drops={"empty": 2})
    writer.commit("b", synthetic_records(SPEC, 3, seed=2, prefix="b", split="heldout", source="web"))
    writer.publish()
    return tmp_path / "team" / "cache"


@pytest.fixture
def run(capsys, monkeypatch):
    """run("ls", url) -> (exit status, stdout, stderr)"""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["teachercache", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


def test_ls_finds_caches_below_a_prefix(cache, run, tmp_path):
    code, out, _ = run("ls", tmp_path, "--json")
    assert code == 0
    (found,) = json.loads(out)
    assert (found["teacher"], found["manifest"], found["state"]) == ("synthetic", 1, "complete")
    assert found["url"].endswith("/team/cache")
    assert "synthetic" in run("ls", cache)[1]


def test_ls_lists_the_others_next_to_a_cache_of_a_newer_format(cache, run, tmp_path):
    theirs = seal(SPEC)[:-1].split(b',"seal"')[0].replace(b'"format_version":1', b'"format_version":2') + b"}"
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "spec.json").write_bytes(
        theirs[:-1] + b',"seal":"' + hashlib.sha256(theirs).hexdigest().encode() + b'"}\n'
    )
    code, out, err = run("ls", tmp_path, "--json")
    assert code == 1
    assert [item["state"] for item in json.loads(out)] == ["unreadable", "complete"]
    assert "format version 2" in err
    assert "complete" in run("ls", tmp_path)[1]


def test_report_and_export_say_in_json_what_they_wrote(cache, run, tmp_path):
    code, out, _ = run("report", cache, "--to", tmp_path / "page.html", "--json")
    assert (code, json.loads(out)) == (0, {"report": str(tmp_path / "page.html"), "manifest": 1})
    code, out, _ = run("export", cache, "--to", tmp_path / "folder", "--json")
    assert code == 0
    assert all(Path(path).is_file() for path in json.loads(out)["files"])
    assert "No such file" in run("report", cache, "--to", tmp_path / "nowhere" / "page.html")[2]


def test_ls_files_prints_paths_that_exist(cache, run):
    code, out, _ = run("ls", cache, "--files", "--split", "heldout")
    assert code == 0
    (line,) = out.splitlines()
    assert Path(line).read_bytes()[:4] == b"PAR1"


def test_show_says_who_the_teacher_is_and_what_there_is(cache, run):
    code, out, _ = run("show", cache, "--json")
    data = json.loads(out)
    assert code == 0
    assert (data["records"], data["drops"], data["complete"]) == (9, {"empty": 2}, True)
    assert [(p["split"], p["source"], p["records"]) for p in data["parts"]] == [
        ("heldout", "web", 3),
        ("train", "default", 6),
    ]
    assert "synthetic" in run("show", cache)[1]


def test_head_shows_the_teachers_best_tokens(cache, run):
    code, out, _ = run("head", cache, "--json", "-n", 2, "-p", 3, "--split", "train")
    shown = json.loads(out)
    assert code == 0
    assert [r["doc_id"] for r in shown] == ["a-00000", "a-00001"]
    best = [b["probability"] for b in shown[0]["rows"][0]["best"]]
    assert len(best) == 5
    assert best == sorted(best, reverse=True)
    assert run("head", cache)[0] == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("show", "{tmp}/nowhere"), "not a teacher cache"),
        (("ls", "{tmp}", "--split", "heldout"), "give --files too"),
        (("ls", "{tmp}/nowhere"), "there is no cache"),
        (("show", "{cache}", "--manifest", "9"), "has no manifest 9"),
        (("head", "{cache}", "--split", "dev"), "its splits: heldout, train"),
        (("show", "gopher://x"), "'gopher://' is not supported"),
        (("show", "s3:///x"), "names no bucket"),
        (("optimize", "{cache}", "--codec", "zip"), "codec 'zip' is unknown"),
        (("export", "{cache}", "--to", "s3://b/x"), "a URL is given where a local path"),
        (("report", "{cache}", "--to", "s3://key:topsecret@b/x"), "holds no credentials"),
        (("gc", "{cache}", "--grace-days", "0"), "would collect running uploads"),
    ],
)
def test_misuse_is_one_clear_line_and_exit_status_2(cache, run, tmp_path, args, says):
    code, out, err = run(*(a.format(tmp=tmp_path, cache=cache) for a in args))
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert "topsecret" not in err
    assert out == ""


def test_an_unknown_option_is_misuse(cache, run):
    assert run("show", cache, "--frobnicate")[0] == 2


def test_an_incomplete_cache_says_so_whoever_reads_it(cache, run):
    writer = teachercache.create(cache, SPEC)
    shards = [PlanShard(shard_id=s, source="default", input="x", input_digest="") for s in ("a", "missing")]
    writer.put_plan(Plan(spec_digest=SPEC.digest, created=utc_now(), shards=shards))
    writer.publish(allow_partial=True)
    assert "1 of 2 planned shards" in run("show", cache, "--json")[2]
    assert "1 of 2 planned shards" in run("ls", cache, "--files")[2]
    with pytest.warns(UserWarning, match="is incomplete"):
        teachercache.open(cache)


def test_optimize_gc_report_and_export_work_from_the_command_line(cache, run, tmp_path):
    code, out, _ = run("optimize", cache, "--json", "--without", "a-00001")
    assert code == 0
    assert json.loads(out)["removed"] == 1
    code, out, _ = run("gc", cache, "--keep-manifests", 1)
    assert code == 0
    assert "would delete" in out
    code, out, _ = run("gc", cache, "--keep-manifests", 1, "--delete", "--json")
    assert json.loads(out)["manifests"] == ["manifests/00000001.json"]
    assert run("report", cache, "--to", tmp_path / "r.html")[0] == 0
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert run("export", cache, "--to", tmp_path / "out")[0] == 0
    assert run("verify", cache)[0] == 0


def test_every_command_teaches_with_help(run):
    for command in ("ls", "show", "head", "verify", "report", "export", "optimize", "gc"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert len(out) > 400


def commands_from(monkeypatch, **values: str) -> None:
    """Pretend that these entry points are installed."""
    entries = [EntryPoint(name, value, "teachercache.commands") for name, value in values.items()]
    monkeypatch.setattr("teachercache.cli.entry_points", lambda group: entries)
    teachercache.cli.added_commands.cache_clear()


@pytest.fixture(autouse=True)
def forget_commands():
    yield
    teachercache.cli.added_commands.cache_clear()


def test_commands_of_other_packages_are_listed_and_called(run, monkeypatch, tmp_path):
    commands_from(monkeypatch, greet="added_app:app")
    (tmp_path / "added_app.py").write_text(
        "import typer\napp = typer.Typer()\n@app.command()\ndef greet(name: str) -> None:\n"
        '    """Greet someone."""\n    print(\'hello\', name)\n@app.command()\ndef other() -> None:\n    pass\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "Greet someone" in run("--help")[1]
    assert run("greet", "you")[:2] == (0, "hello you\n")
    assert run("other")[0] == 2


def test_a_command_that_lacks_its_extra_says_what_to_install(run, monkeypatch, tmp_path):
    commands_from(monkeypatch, fit="lacking_app:app")
    (tmp_path / "lacking_app.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "ls " in run("--help")[1]
    code, out, err = run("fit", "train.yaml", "--json")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "pip install '.[trainer]'" in err


def test_a_command_that_is_not_installed_is_misuse(run, monkeypatch):
    commands_from(monkeypatch)
    code, _, err = run("fit", "train.yaml")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "No such command 'fit'" in err


def test_help_lists_every_command_and_imports_no_engine():
    code = (
        "import sys\nfrom importlib.metadata import EntryPoint\nimport teachercache.cli as cli\n"
        "entries = [EntryPoint('run', 'pipeline.cli:app', cli.ADDED), EntryPoint('fit', 'trainer.cli:app', cli.ADDED)]\n"
        "cli.entry_points = lambda group: entries\nsys.argv = ['teachercache', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'triton'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Commands of pipeline" in done.stdout
    assert "Commands of trainer" in done.stdout


def test_ls_keeps_every_cache_on_one_line_of_a_narrow_terminal(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    root = tmp_path / ("a-long-name-of-a-team" * 4)
    writer = teachercache.create(root, SPEC)
    writer.commit("a", synthetic_records(SPEC, 2, seed=1))
    writer.publish()
    code, out, _ = run("ls", tmp_path)
    assert code == 0
    assert any(str(root) in line and "complete" in line for line in out.splitlines())


def test_a_url_above_one_cache_names_it(cache, run):
    code, _, err = run("show", cache.parent)
    assert code == 2
    assert f"there is one below it: {cache}" in err.replace("file://", "")


def test_a_cache_of_the_engine_noop_says_that_its_rows_are_made_up(run, tmp_path):
    spec = SPEC.model_copy(update={"teacher": SPEC.teacher.model_copy(update={"engine": "noop"})})
    writer = teachercache.create(tmp_path / "noop", spec)
    writer.commit("a", synthetic_records(spec, 2, seed=1))
    writer.publish()
    for command in ("show", "head", "report"):
        code, _, err = run(command, tmp_path / "noop", *(["--to", tmp_path / "r.html"] if command == "report" else []))
        assert code == 0
        assert "made-up rows" in err
    assert "made-up" not in run("show", tmp_path / "noop", "--json")[1]


def test_a_digest_in_a_refusal_is_short(tmp_path):
    other = SPEC.model_copy(update={"teacher": SPEC.teacher.model_copy(update={"weights_digest": "a" * 64})})
    teachercache.create(tmp_path, SPEC)
    with pytest.raises(
        teachercache.errors.SpecMismatch, match=r"weights_digest: ours a{12}, the cache's [0-9a-f]{12}\)"
    ):
        teachercache.create(tmp_path, other)


def test_thin_prints_what_it_wrote_and_refuses_a_top_k_cache(cache, run, tmp_path):
    spec = synthetic_spec(rows=SampledRows(entries=24))
    writer = teachercache.create(tmp_path / "sampled", spec)
    writer.commit("a", synthetic_records(spec, 3, seed=1))
    writer.publish()
    code, out, _ = run("thin", tmp_path / "sampled", tmp_path / "small", "--entries", "12")
    assert code == 0
    assert "rows of 12 entries" in out
    code, out, _ = run("ls", tmp_path)
    kinds = {line.split()[0].rsplit("/", 1)[1]: " sampled " in line for line in out.splitlines()[1:]}
    assert (code, kinds) == (0, {"cache": False, "sampled": True, "small": True})
    assert "  12 sampled  " in out
    found = {
        item["url"].rsplit("/", 1)[1]: item["rows_kind"]["kind"]
        for item in json.loads(run("ls", tmp_path, "--json")[1])
    }
    assert found == {"cache": "top_k", "sampled": "sampled", "small": "sampled"}
    code, _, err = run("thin", cache, tmp_path / "other", "--entries", "4")
    assert code == 2
    assert "has top-8 rows" in err
    assert not (tmp_path / "other").exists()
