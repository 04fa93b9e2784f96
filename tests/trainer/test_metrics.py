"""Where numbers go: Weights & Biases gets one page for a run, however often it is resumed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from teachercache.errors import UsageError
from tests.trainer import runs
from trainer.metrics import Meter, Screen


class FakeWandb(SimpleNamespace):
    """The three calls that are used of the package, recorded."""

    def __init__(self) -> None:
        super().__init__(started=[], logged=[], finished=0)

    def init(self, **options: Any) -> FakeWandb:
        self.started.append(options)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


def test_a_resumed_run_continues_its_page(
    cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    config = runs.write_config(
        tmp_path / "train.yaml", cache=cache_url, student=str(student), output=str(tmp_path / "run"),
        data={"seq_len": 128}, train={"threads": 1}, log={"tensorboard": False, "wandb": True},
    )  # fmt: skip
    runs.fit_here(config, "train.max_steps=3")
    runs.fit_here(config, "train.max_steps=5")
    first, second = wandb.started
    assert first["id"] == second["id"]
    assert first["name"] == "run"
    assert first["config"]["train"]["max_steps"] == 3
    assert [step for step, _ in wandb.logged] == [1, 2, 3, 4, 5]
    assert wandb.logged[0][1]["train/loss"] == runs.metrics(tmp_path / "run")[0]["loss"]
    assert wandb.finished == 2
    assert not {"project", "entity", "tags"} & first.keys()  # what is not set is left to wandb's own settings


def test_without_the_package_it_is_refused_by_name(
    cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    config = runs.write_config(
        tmp_path / "train.yaml", cache=cache_url, student=str(student), output=str(tmp_path / "run"),
        log={"tensorboard": False, "wandb": True},
    )  # fmt: skip
    with pytest.raises(UsageError, match="needs the package wandb"):
        runs.fit_here(config)


def config_with(log: dict[str, Any], cache_url: str, student: Path, tmp_path: Path) -> Path:
    return runs.write_config(
        tmp_path / "train.yaml", cache=cache_url, student=str(student), output=str(tmp_path / "run"),
        data={"seq_len": 128}, train={"threads": 1}, log={"tensorboard": False, **log},
    )  # fmt: skip


WHERE = {"project": "students", "entity": "team", "tags": ["a", "b"]}


def test_project_entity_and_tags_reach_the_page(
    cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    runs.fit_here(config_with({"wandb": WHERE}, cache_url, student, tmp_path), "train.max_steps=1")
    (started,) = wandb.started
    assert {key: started[key] for key in WHERE} == WHERE


def test_an_id_that_someone_planted_is_refused(
    cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())  # type: ignore[arg-type]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/wandb_id").write_text("../../x")
    with pytest.raises(UsageError, match="wandb_id names"):
        runs.fit_here(config_with({"wandb": True}, cache_url, student, tmp_path), "train.max_steps=1")


def test_the_environment_of_wandb_and_mlflow_is_not_overridden(
    mlflow: FakeMlflow, cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    monkeypatch.setenv("WANDB_NAME", "named")
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-environment")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "elsewhere")
    runs.fit_here(config_with({"wandb": True, "mlflow": True}, cache_url, student, tmp_path), "train.max_steps=1")
    (started,) = wandb.started
    assert "name" not in started
    assert started["id"] == (tmp_path / "run/wandb_id").read_text() == "of-the-environment"
    assert list(mlflow.experiments) == ["elsewhere"]


def test_wandb_itself_takes_the_settings_offline(
    cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs the package wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = config_with({"wandb": WHERE}, cache_url, student, tmp_path)
    runs.fit_here(config, "train.max_steps=1")
    runs.fit_here(config, "train.max_steps=2")
    run_id = (tmp_path / "run/wandb_id").read_text()
    assert len(list((tmp_path / "run/wandb").glob(f"offline-run-*-{run_id}"))) >= 1


class FakeMlflow:
    """The published interface of mlflow.tracking.MlflowClient, as far as it is used, recorded."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, SimpleNamespace] = {}
        self.uris: list[str | None] = []
        self.away = False

    def __call__(self, tracking_uri: str | None = None) -> FakeMlflow:
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = str(len(self.experiments))
        return self.experiments[name]

    def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = SimpleNamespace(
            name=run_name, experiment=experiment_id, status="RUNNING", metrics=[], params={}
        )
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id].status = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if self.away:
            raise ConnectionError("no route")
        assert len(params) <= 100
        self.runs[run_id].metrics += [(metric.key, metric.value, metric.step) for metric in metrics]
        self.runs[run_id].params |= {param.key: param.value for param in params}

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id].status = "FINISHED"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    fake = FakeMlflow()

    def metric(key: str, value: float, timestamp: int, step: int) -> SimpleNamespace:
        return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)

    def param(key: str, value: str) -> SimpleNamespace:
        return SimpleNamespace(key=key, value=value)

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())  # type: ignore[arg-type]
    entities = SimpleNamespace(Metric=metric, Param=param)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=fake))  # type: ignore[arg-type]
    return fake


MLFLOW = {"tracking_uri": "http://127.0.0.1:1", "experiment": "students"}


def test_a_resumed_run_continues_its_run_in_mlflow(
    mlflow: FakeMlflow, cache_url: str, student: Path, tmp_path: Path
) -> None:
    config = config_with({"mlflow": MLFLOW}, cache_url, student, tmp_path)
    runs.fit_here(config, "train.max_steps=2")
    runs.fit_here(config, "train.max_steps=3")
    assert set(mlflow.uris) == {MLFLOW["tracking_uri"]}
    (run,) = mlflow.runs.values()
    assert (run.name, run.experiment, run.status) == ("run", mlflow.experiments["students"], "FINISHED")
    assert [step for key, _, step in run.metrics if key == "train/loss"] == [1, 2, 3]
    assert run.params["optim.lr"] == "0.0005"
    logged = [value for key, value, _ in run.metrics if key == "train/loss"]
    assert logged == [entry["loss"] for entry in runs.metrics(tmp_path / "run")]


def test_a_server_that_is_away_costs_a_line_and_no_step(
    mlflow: FakeMlflow, cache_url: str, student: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_with({"mlflow": MLFLOW}, cache_url, student, tmp_path)
    runs.fit_here(config, "train.max_steps=1")
    mlflow.away = True
    capfd.readouterr()
    assert runs.fit_here(config, "train.max_steps=4")["steps"] == 4
    assert capfd.readouterr().err.count("MLflow took no figures at step 2 (ConnectionError)") == 1
    assert len(runs.metrics(tmp_path / "run")) == 4


def test_mlflow_itself_takes_the_figures(
    cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="needs the package mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for it
    uri = (tmp_path / "mlruns").as_uri()
    config = config_with({"mlflow": {"tracking_uri": uri, "experiment": "students"}}, cache_url, student, tmp_path)
    runs.fit_here(config, "train.max_steps=1")
    runs.fit_here(config, "train.max_steps=2")
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("students").experiment_id])
    assert run.info.status == "FINISHED"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2]
    assert run.data.params["data.seq_len"] == "128"


def test_without_mlflow_it_is_refused_by_name(
    cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlflow", "mlflow.entities", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"log\.mlflow needs the package mlflow"):
        runs.fit_here(config_with({"mlflow": True}, cache_url, student, tmp_path), "train.max_steps=1")


def test_the_last_step_of_a_piped_run_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    screen = Screen(every_s=1000)
    for step in (1, 2, 1200):
        screen.update(step, step / 1200, f"loss {step}", remaining_s=4000)
    screen.close()
    screen.close()
    assert capfd.readouterr().err.splitlines() == [
        "step 1 (0%, 1 h 6 min left): loss 1",
        "step 1,200 (100%): loss 1200",
    ]


def test_a_rate_has_a_unit_that_says_something() -> None:
    meter = object.__new__(Meter)
    values = {"loss": 1.0, "tokens_per_s": 12345.6}
    assert meter.line(values | {"tflops": 0.004}) == "loss 1.0000, 12,346 tokens/s"
    assert meter.line(values | {"tflops": 503.4}) == "loss 1.0000, 12,346 tokens/s, 503 TFLOP/s"
