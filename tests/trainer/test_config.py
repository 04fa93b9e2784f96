"""The configuration refuses what it does not know and says what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from teachercache import configfile
from teachercache.errors import UsageError
from trainer.cli import main
from trainer.config import TrainerConfig, load_config

MINIMAL = ["cache=s3://bucket/cache", "student=build/student"]


def test_overrides_reach_nested_keys_and_keep_types() -> None:
    config = load_config(None, [*MINIMAL, "optim.lr=1e-3", "data.seq_len=64", "optim.clip_norm=null", "lora.rank=4"])
    assert config.optim.lr == 1e-3
    assert config.data.seq_len == 64
    assert config.optim.clip_norm is None
    assert config.lora is not None
    assert config.lora.rank == 4


def test_yaml_and_overrides_are_one_configuration(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("cache: a\nstudent: b\ndata: {seq_len: 128, batch_tokens: 256}\noptim: {lr: 5e-4}\n")
    config = load_config(path, ["data.batch_tokens=512"])
    assert config.data.sequences_per_step == 4
    assert config.optim.lr == 5e-4


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("optim.learning_rat=1", "optim."),
        ("optim.warmup_step=1", "optim.warmup_steps"),
        ("data.seqlen=1", "data.seq_len"),
        ("seq_len=1", "data.seq_len"),
        ("studnet=x", "student"),
        ("loss.tale=none", "loss.tail"),
    ],
)
def test_an_unknown_key_names_its_nearest_neighbour(override: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {nearest}") as caught:
        load_config(None, [*MINIMAL, override])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_tokens=3000", "multiple of data.seq_len"),
        ("optim.lr=fast", "optim.lr"),
        ("loss.method=online", "set teacher=FOLDER"),
        ("loss.tail=null", "only loss.method=online"),
        ("loss.tail=buckets", "loss.tail"),
        ("loss={method: dense, recompute: true}", "loss.method=fused only"),
        ("no-equals-sign", "expected key=value"),
        ("cache.x=1", "not a section"),
    ],
)
def test_a_wrong_value_is_refused_with_a_sentence(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(None, [*MINIMAL, override])


def test_what_the_full_vocabulary_loss_would_ignore_is_refused() -> None:
    loss = "loss={method: online, tail: null, ce_weight: 0.3}"
    with pytest.raises(UsageError, match=r"ce_weight and z_loss must be 0, found 0\.3 and 0\.0"):
        load_config(None, [*MINIMAL, "teacher=folder", loss])


@pytest.mark.parametrize(("key", "loss"), [("data.top_k=8", "tail: null"), ("seed=1", "tail: null, recompute: true")])
def test_what_cuts_rows_is_refused_where_the_loss_takes_no_rows(key: str, loss: str) -> None:
    named = "data.top_k" if "top_k" in key else "loss.recompute"
    with pytest.raises(UsageError, match=f"{named} is of rows, and loss.tail=null takes"):
        load_config(None, [*MINIMAL, "teacher=folder", key, f"loss={{method: online, {loss}}}"])


CACHES = "data.caches=[{url: a, weight: 1, split: x}, {url: b, weight: 1, split: x}]"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["optim.decay_fraction=0.5"], "optim.decay_fraction has no effect: optim.schedule is cosine"),
        (
            ["optim={schedule: constant, min_lr_ratio: 0.5}"],
            "optim.min_lr_ratio has no effect: optim.schedule is constant",
        ),
        (["loss.jsd_beta=0.2"], "loss.jsd_beta has no effect: loss.divergence is forward"),
        (
            ["loss={method: dense, chunk_size: 64}"],
            "loss.chunk_size has no effect: loss.method=dense forms all logits at once",
        ),
        (["teacher=t"], "teacher has no effect: loss.method=fused reads cached rows; `eval` alone uses it"),
        (["cache=null", CACHES, "split=y"], "split has no effect: every entry of data.caches has its own"),
        (["optim={schedule: wsd, decay_fraction: 0.5, min_lr_ratio: 0}", "loss={divergence: jsd, jsd_beta: 0.2}"], ""),
        (["cache=null", CACHES], ""),
    ],
)
def test_keys_that_others_leave_without_effect_are_named(settings: list[str], said: str) -> None:
    minimal = MINIMAL[1:] if settings[0] == "cache=null" else MINIMAL
    assert "\n".join(load_config(None, [*minimal, *settings]).without_effect) == said


def test_every_key_at_its_default_is_no_note() -> None:
    config = load_config(None, MINIMAL)
    assert configfile.validate(TrainerConfig, config.model_dump(), "dumped").without_effect == []


def test_a_missing_key_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lacks cache"):
        load_config(None, ["student=x"])
    with pytest.raises(UsageError, match="cannot read"):
        load_config(tmp_path / "none.yaml")


def test_every_key_is_documented() -> None:
    keys = configfile.describe(TrainerConfig)
    assert [key.key for key in keys if len(key.description) < 10] == []
    assert len({key.key for key in keys}) == len(keys)


@pytest.mark.parametrize("url", ["s3://AKIAKEY:hushhush@bucket/x", "s3://bucket/run?sig=hushhush"])
@pytest.mark.parametrize("key", ["cache", "student", "output", "teacher"])
def test_credentials_in_a_url_end_a_run_before_anything_is_read(key: str, url: str, tmp_path, capsys) -> None:
    (tmp_path / "train.yaml").write_text("cache: nowhere\nstudent: nowhere\n")
    for command in ("fit", "eval"):
        with pytest.raises(SystemExit) as ended:
            main([command, str(tmp_path / "train.yaml"), f"{key}={url}"])
        said = "".join(capsys.readouterr())
        assert ended.value.code == 2
        assert f"{key}: a URL names a place and holds no credentials" in said
        assert "hushhush" not in said


def test_the_length_curriculum_is_a_staircase() -> None:
    config = load_config(None, [*MINIMAL, "data={seq_len: 512, length_curriculum: [[0.1, 128], [0.5, 512]]}"])
    assert [config.data.length_at(share) for share in (0.0, 0.1, 0.4, 0.5, 1.0)] == [512, 128, 128, 512, 512]
