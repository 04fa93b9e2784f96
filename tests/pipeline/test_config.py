"""The job file: every key is documented, and one that does not exist is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from pipeline.cli import main
from pipeline.config import GIVEN_TO_TEMPLATE, SET_BY, JobConfig, TeacherConfig, parse_job
from pipeline.teachers.base import RowsWanted
from pipeline.teachers.vllm_teacher import engine_arguments
from teachercache.configfile import ANY_ENTRY, describe
from teachercache.errors import UsageError
from teachercache.format.spec import TopKRows
from tests.pipeline.conftest import ROOT, environment, pipeline

KEYS = {key.key: key for key in describe(JobConfig)}
# options of earlier versions: constants now, or filters that a corpus is given before
GONE = (
    *("teacher.cpus_per_actor", "teacher.worker_top_k", "teacher.canary_reference_parameters"),
    *("teacher.max_inflight_tokens", "recipe.windows.stride", "recipe.windows.truncate_side"),
    *("recipe.filters.min_chars", "recipe.filters.max_chars", "recipe.filters.sample", "recipe.filters.sample_seed"),
    *("recipe.filters.blank", "recipe.filters.invalid_utf8", "recipe.filters.control_characters"),
    *("run.min_actors", "run.publish", "run.lease_s", "run.refresh_s"),
)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_documented(key):
    assert KEYS[key].description
    assert not KEYS[key].description.endswith("."), (
        "a description is a phrase: a page and a YAML comment put it in place"
    )


@pytest.mark.parametrize("key", GONE)
def test_an_option_that_is_gone_is_an_unknown_key(key):
    section, *rest = key.split(".")
    tree: dict = {"cache": "c", "teacher": {"model": "m"}, "corpora": [{"files": ["x"]}]}
    node = tree.setdefault(section, {})
    for part in rest[:-1]:
        node = node.setdefault(part, {})
    node[rest[-1]] = 1
    with pytest.raises(UsageError, match=f"unknown key {key} in job; did you mean"):
        parse_job(tree)


def test_the_command_prints_every_key():
    result = pipeline("config")
    assert result.returncode == 0, result.stderr
    tree = yaml.safe_load(result.stdout)

    def keys(node, prefix=""):
        for name, value in node.items():
            yield prefix + name
            if isinstance(value, list) and value and isinstance(value[0], dict):
                yield from keys(value[0], f"{prefix}{name}.{ANY_ENTRY}.")
            elif isinstance(value, dict):
                yield from keys(value, f"{prefix}{name}.")

    assert set(keys(tree)) == set(KEYS)


def test_help_needs_no_heavy_package():
    heavy = ("ray", "vllm", "torch", "transformers", "triton")
    code = f"import sys, pipeline.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment(), check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({}, {"kind": "top_k", "entries": 100}),
        ({"entries": 20}, {"kind": "top_k", "entries": 20}),
        ({"kind": "sampled"}, {"kind": "sampled", "entries": 24, "exact": 6, "seed": 0}),
        ({"kind": "sampled", "entries": 3}, {"kind": "sampled", "entries": 3, "exact": 1, "seed": 0}),
        (
            {"kind": "sampled", "entries": 12, "exact": 5, "seed": 7},
            {"kind": "sampled", "entries": 12, "exact": 5, "seed": 7},
        ),
    ],
)
def test_rows_of_both_kinds(rows, expected):
    assert parse_job(JOB | {"rows": rows}).rows.spec.model_dump(exclude_none=True) == expected


JOB: dict = {"cache": "c", "teacher": {"model": "m"}, "corpora": [{"files": ["x"]}]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"teacher": {"model": "m", "top_k": 9}}, r"unknown key teacher.top_k in job; did you mean rows.entries\?"),
        ({"rows": {"exact": 2}}, "exact and seed are of rows of kind sampled"),
        ({"rows": {"kind": "sampled", "entries": 4, "exact": 4}}, "exact < entries, found exact 4 of 4"),
        ({"rows": {"kind": "sampled", "entries": 1}}, "exact < entries"),
        ({"rows": {"kind": "sampled"}, "teacher": {"model": "m", "fast_path": "off"}}, "set teacher.fast_path to auto"),
    ],
)
def test_rows_that_cannot_be_made_are_refused(change, said):
    with pytest.raises(UsageError, match=said):
        parse_job(JOB | change)


@pytest.mark.parametrize("engine", SET_BY)
def test_an_engine_argument_that_would_be_ignored_is_refused_with_the_key_that_sets_it(engine):
    for name, key in SET_BY[engine].items():
        argument, _, part = name.partition(".")
        arguments = {argument: {part: 1} if part else 1, "enforce_eager": True}
        with pytest.raises(UsageError) as caught:
            parse_job(JOB | {"teacher": {"model": "m", "engine": engine, "engine_args": arguments}})
        assert f"{name} ({f'set {key} instead' if key else 'leave it out'}" in str(caught.value)
        assert key == "" or key in KEYS


def test_a_job_with_ignored_engine_arguments_ends_before_anything_is_written(job_file, tmp_path, capsys):
    teacher = {"engine": "vllm", "engine_args": {"dtype": "float16", "max_model_len": 4096, "seed": 3}}
    with pytest.raises(SystemExit) as ended:
        main(["run", str(job_file(tmp_path / "cache", [tmp_path / "a.jsonl"], teacher=teacher))])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "dtype (set teacher.dtype instead), max_model_len (set teacher.max_model_len instead)" in said
    assert "seed" not in said
    assert not (tmp_path / "cache").exists()


def test_what_is_refused_of_vllm_is_what_is_set():
    config = TeacherConfig(model="m", tensor_parallel=2)
    ours = engine_arguments(config, "m", 20)
    theirs = dict.fromkeys(ours, "theirs") | {"hf_overrides": dict.fromkeys(ours["hf_overrides"], "theirs")}
    made = engine_arguments(config.model_copy(update={"engine_args": theirs}), "m", 20)
    flat = made | {f"hf_overrides.{name}": value for name, value in made.pop("hf_overrides").items()}
    local = {"revision", "tokenizer", "tokenizer_revision"}  # vLLM is given a folder, and needs no tokenizer
    assert {name for name, value in flat.items() if value != "theirs"} == SET_BY["vllm"].keys() - local


def test_what_is_refused_of_transformers_is_what_is_set(monkeypatch):
    import transformers

    from pipeline.teachers.hf import HfTeacher

    def from_pretrained(pretrained_model_name_or_path, **arguments):
        raise ValueError(f"{sorted(['pretrained_model_name_or_path', *arguments])}")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    local = {"revision", "torch_dtype"}  # of a folder; the older name of dtype
    with pytest.raises(UsageError) as caught:
        HfTeacher(TeacherConfig(model="m", engine="hf"), "m", RowsWanted(TopKRows(entries=5), 10))
    assert str(caught.value).endswith(str(sorted(SET_BY["hf"].keys() - local)))


CHAT = [{"files": ["x"], "fields": {"messages": "m"}}]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"recipe": {"generate": {"temperature": 0.5}}}, "recipe.generate.temperature has no effect: recipe.mode is score"),
        (
            {"recipe": {"mode": "generate", "generate": {"temperature": 0, "top_p": 0.9}}, "corpora": CHAT},
            "recipe.generate.top_p has no effect: recipe.generate.temperature is 0, which draws nothing",
        ),
        (
            {"recipe": {"chat": {"system": "s", "template_args": {"a": 1}}}},
            "recipe.chat.template_args, recipe.chat.system have no effect: no corpus has fields.messages",
        ),
        (
            {"recipe": {"windows": {"policy": "truncate", "min_context": 5}}},
            "recipe.windows.min_context has no effect: recipe.windows.policy is truncate",
        ),
        (
            {"run": {"executor": "inline", "actors": 8}},
            "run.actors has no effect: run.executor is inline: one teacher in this process, and no watchdog",
        ),
        (
            {"teacher": {"model": "m", "engine": "hf", "tensor_parallel": 2, "fast_path": "require"}},
            "teacher.tensor_parallel, teacher.fast_path have no effect: teacher.engine is hf, which has one device and one path",
        ),
        (
            {"corpora": [{"files": ["x"], "split": "val", "splits": {"a": 0.5, "b": 0.5}}]},
            "corpora.0.split has no effect: corpora.0.splits decides",
        ),
        (
            {"corpora": [{"files": ["x"]}, {"files": ["x"], "fields": {"loss_mask": "l"}, "id_scope": "file"}]},
            "corpora.1.id_scope has no effect: corpora.1.fields.id is not set\n"
            "corpora.1.fields.loss_mask has no effect: corpora.1 has no fields.input_ids",
        ),
        ({"corpora": CHAT, "recipe": {"chat": {"system": "s"}}, "run": {"actors": 8}}, ""),
        ({"recipe": {"chat": {"rows": "masked"}, "generate": {"temperature": 1.0}}}, ""),
    ],
)  # fmt: skip
def test_keys_that_others_leave_without_effect_are_named(change, said):
    assert "\n".join(parse_job(JOB | change).without_effect) == said


def test_every_key_at_its_default_is_no_warning():
    job = parse_job(JOB)
    assert parse_job(job.model_dump()).without_effect == []


@pytest.mark.parametrize("name", GIVEN_TO_TEMPLATE)
def test_an_argument_of_a_template_that_the_pipeline_gives_is_refused(name):
    with pytest.raises(UsageError, match=f"recipe.chat.template_args: the pipeline itself gives {name} to a template"):
        parse_job(JOB | {"recipe": {"chat": {"template_args": {name: 1}}}})


@pytest.mark.parametrize("command", ["status", "quarantine", "doctor"])
def test_overrides_without_a_job_file_are_refused(command, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, str(tmp_path), "run.actors=4"])
    assert ended.value.code == 2
    assert "run.actors=4: overrides go with a job file, found the URL of a cache" in capsys.readouterr().err


SECRETS = [
    "s3://key:hidden@bucket/x.jsonl",
    "https://user:hidden@host/x.jsonl",
    "https://host/x.jsonl?X-Amz-Signature=hidden",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("place", ["cache", "corpora.0.files", "corpus_root", "teacher.model", "recipe.chat.template"])
def test_a_job_with_credentials_in_a_url_ends_before_anything_is_opened(
    job_file, tmp_path, monkeypatch, capsys, place, secret
):
    job = job_file(tmp_path / "cache", [tmp_path / "a.jsonl"])
    for command in ("plan", "run"):
        with pytest.raises(SystemExit) as ended:
            main([command, str(job), f"{place}={secret}"])
        said = "".join(capsys.readouterr())
        assert ended.value.code == 2
        assert "holds no credentials" in said
        assert "hidden" not in said
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("place", ["cache", "corpus_root", "model", "files"])
def test_credentials_in_a_url_are_refused_and_not_repeated(place):
    secret = "s3://key:hidden@bucket/x"
    corpus = {"source": "s", "files": [secret if place == "files" else "s3://corpus/part-?.jsonl"]}
    tree: dict = {"cache": "c", "teacher": {"model": "m"}, "corpora": [corpus]}
    if place != "files":
        (tree["teacher"] if place == "model" else tree)[place] = secret
    with pytest.raises(UsageError) as caught:
        parse_job(tree)
    assert "hidden" not in str(caught.value)
    assert "credentials" in str(caught.value)
