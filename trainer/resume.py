"""What a run continues from: how far it is, what its checkpoints hold, what must be as before and what may differ."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, Field, ValidationError

from teachercache import Cache, fingerprint_config, fingerprint_tokenizer, fingerprint_weights
from teachercache.errors import TeacherCacheError, UsageError
from trainer import shards
from trainer.checkpoint import FINAL, CheckpointFolder, discard, resolve_model_folder
from trainer.config import TrainConfig, TrainerConfig
from trainer.data.mixed import MixedCaches
from trainer.model import Model, lora, parallel, student
from trainer.optim import make_state

STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"
STEPS_BEFORE_SPIKES = 20
"""Steps in which the running mean of the loss settles before train.spike_factor counts."""
PROGRESS = ("step", "rows", "tokens", "mean_loss", "data")
"""What a checkpoint holds of the progress."""
MUST_MATCH = ("split", "seed", "loss", "lora")
NOT_A_CHANGE = ("output", "take_over", "student", "teacher")
"""Top-level keys that do not change what is computed; models are compared by what they hold."""


class Saved(NamedTuple):
    """A run's newest checkpoint, in a local folder."""

    folder: Path
    state: dict[str, Any]


class _SavedCache(BaseModel):
    manifest: int
    spec_digest: str


class _State(BaseModel):
    """What trainer_state.json must hold, whoever wrote it; more is allowed."""

    step: int = Field(ge=0)
    rows: int = Field(ge=0)
    tokens: int = Field(ge=0)
    mean_loss: float | None
    data: dict[str, Any]
    caches: list[_SavedCache] = Field(min_length=1)
    config: dict[str, Any]
    models: dict[str, dict[str, str]] = {}


def newest(run: CheckpointFolder) -> Saved | None:
    """Return a run's newest checkpoint, downloaded where it is remote, or None before the first.

    Raises TeacherCacheError where its state is damaged.
    """
    latest = run.index().latest
    if latest is None:
        return None
    folder = run.fetch(latest)
    try:
        state = _State.model_validate(json.loads((folder / STATE).read_bytes())).model_dump()
        if state["step"] != latest.step:
            raise ValueError(f"step {state['step']} instead of {latest.step}")
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(f"{run.url}/{latest.folder}/{STATE}", error) from error
    return Saved(folder, state)


def _damaged(name: str, error: Exception) -> TeacherCacheError:
    said = f"{len(error.errors())} wrong fields" if isinstance(error, ValidationError) else " ".join(str(error).split())
    return TeacherCacheError(
        f"{name} is damaged ({type(error).__name__}: {ascii(said)[1:-1][:120]}): restore it, or remove this checkpoint from "
        "checkpoints.json to use an older one"
    )


@dataclass
class Progress:
    """How far a run is, and where it ends."""

    epochs: int | None
    max_steps: int | None
    total_tokens: int = 0
    """Tokens of one epoch."""
    step: int = 0
    rows: int = 0
    tokens: int = 0
    mean_loss: float | None = None
    """Running mean of the steps' losses, nats."""
    data: dict[str, Any] = field(default_factory=dict)
    """The dataset's state after the last step."""

    @classmethod
    def start(cls, train: TrainConfig, saved: dict[str, Any] | None) -> Progress:
        """Return the progress of a new run, or of one that continues from a checkpoint's state."""
        epochs = train.epochs or (None if train.max_steps else 1)
        kept = {key: saved[key] for key in PROGRESS} if saved else {}
        return cls(epochs, train.max_steps, **kept)

    @property
    def done(self) -> bool:
        """Whether the last of `max_steps` was taken; the end of the data is not seen here."""
        return self.max_steps is not None and self.step >= self.max_steps

    def share(self, tokens_done: int, step: float | None = None) -> float:
        """Return the share of the run in [0, 1]: by tokens where the data ends it, by steps where max_steps is first.

        step  default: the last one taken, which a thread that reads ahead must not ask for
        """
        by_steps = (self.step if step is None else step) / self.max_steps if self.max_steps else 0.0
        by_tokens = tokens_done / max(1, self.epochs * self.total_tokens) if self.epochs else 0.0
        return min(1.0, max(by_steps, by_tokens))

    def loss_limit(self, spike_factor: float | None) -> float | None:
        """Return the largest loss that the next step may have; None is any."""
        if spike_factor is None or self.mean_loss is None or self.step < STEPS_BEFORE_SPIKES:
            return None
        return spike_factor * self.mean_loss

    def count(self, *, loss: float, rows: int, tokens: int) -> None:
        """Add one step."""
        self.step += 1
        self.rows += rows
        self.tokens += tokens
        self.mean_loss = loss if self.mean_loss is None else 0.95 * self.mean_loss + 0.05 * loss


class Checkpointer:
    """Write a run's checkpoints and its final model; restore what a checkpoint holds next to the weights.

    source  the folder that the model came from: its tokenizer goes along
    models  what the run began from, as `begun_from` returned it
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        source: Path,
        model: Model,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        caches: Sequence[Cache],
        config: TrainerConfig,
        models: dict[str, dict[str, str]],
    ) -> None:
        self.folder, self.model, self.optimizer, self.progress = folder, model, optimizer, progress
        self._tokenizer, self._adapters = student.tokenizer_files(source), config.lora is not None
        self._keep_last, self._seed = config.checkpoint.keep_last, config.seed
        self._student, self._trust = config.student, config.trust_remote_code
        read = [{"manifest": cache.manifest.number, "spec_digest": cache.spec.digest} for cache in caches]
        self._run = {"caches": read, "models": models, "config": config.model_dump(mode="json")}
        self.evaluated: tuple[int, float, dict[str, float]] | None = None
        """Step and held-out KL of the last evaluation in this process, and of several caches that of each by its name."""

    def restore(self, source: Path) -> None:
        """Load the optimiser's and the random generators' state of a checkpoint.

        What the configuration says of the optimiser (betas, eps, weight decay) holds, not what the checkpoint says.
        Raises TeacherCacheError where the file is damaged or holds more than tensors and numbers.
        """
        settings = [
            {key: group[key] for key in ("betas", "eps", "weight_decay")} for group in self.optimizer.param_groups
        ]
        try:
            with zipfile.ZipFile(source / OPTIMIZER) as archive:
                if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
                    raise ValueError("a compressed entry")  # torch.save compresses nothing, and a bomb needs it
            state = torch.load(source / OPTIMIZER, map_location="cpu", weights_only=True)
            self._check_shapes(state["optimizer"]["state"])
            if parallel.count() > 1 or any(source.glob(f"*{shards.SUFFIX}")):
                make_state(self.optimizer)
                shards.load(self.optimizer, source, state["optimizer"])
            else:
                self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
            if state["cuda_rng"] is not None and torch.cuda.is_initialized():
                torch.cuda.set_rng_state(state["cuda_rng"])
        except torch.OutOfMemoryError:
            raise
        except pickle.UnpicklingError as error:  # its message recommends weights_only=False: not repeated
            raise _damaged(
                str(source / OPTIMIZER), ValueError("more than tensors and numbers; nothing of it was run")
            ) from error
        except Exception as error:
            raise _damaged(str(source / OPTIMIZER), error) from error
        for group, chosen in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(chosen)
        self._reseed()

    def _check_shapes(self, state: dict[int, dict[str, Any]]) -> None:
        """Raise ValueError for a moment of another shape than its parameter: an expanded tensor is as large as it says."""
        shares = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        parameters = [getattr(share, "sharded", share) for share in shares]
        for index, held in state.items():
            for key, value in held.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != parameters[index].shape:
                    raise ValueError(f"{key} of parameter {index} has shape {tuple(value.shape)}")

    def heldout_kl(self) -> tuple[float | None, dict[str, float]]:
        """Return what this step's evaluation found, in this process or in the one that saved its checkpoint.

        Of several caches, the second part has that of each by its name.
        """
        step = self.progress.step
        if self.evaluated and self.evaluated[0] == step:
            return self.evaluated[1:]
        saved = [entry for entry in self.folder.index().checkpoints if entry.step == step]
        return (saved[0].heldout_kl, saved[0].heldout_kl_of) if saved else (None, {})

    def save(self) -> None:
        """Write this step's checkpoint, unless it exists; all ranks call it."""

        def save(write: Callable[[Path], None]) -> None:
            whole, each = self.heldout_kl()
            self.folder.save(self.progress.step, write, heldout_kl=whole, keep_last=self._keep_last, heldout_kl_of=each)

        parallel.with_all(save, self._write)
        self._reseed()

    def _reseed(self) -> None:
        """Give several ranks different random numbers, which depend on the step alone: a resumed run has the same."""
        if parallel.count() > 1:
            torch.manual_seed((self._seed * 1_000_003 + self.progress.step) * 1_009 + parallel.rank())

    def finish(self) -> dict[str, Any]:
        """Write the final model, with adapters merged, and mark the run finished; return its summary.

        All ranks call it; of several, rank 0 returns the summary and the others an empty one.
        """
        summary: dict[str, Any] = {}

        def finish(write: Callable[[Path], None]) -> None:
            summary.update(self._summary())
            # The summary first: a finished run prints it.
            self.folder.put("summary.json", json.dumps(summary, indent=1).encode())
            self.folder.finish(write)

        parallel.with_all(finish, self._write_final)
        return summary

    def _summary(self) -> dict[str, Any]:
        index, progress, url = self.folder.index(), self.progress, self.folder.url
        latest, best = index.latest, index.best
        measured: dict[str, Any] = {"heldout_kl": latest.heldout_kl} if latest and best else {}
        if latest:
            measured |= {f"heldout_kl/{name}": kl for name, kl in latest.heldout_kl_of.items()}
        if best:
            measured["best"] = f"step {best.step}: {best.heldout_kl:.4f} nats, {url}/{best.folder}"
        return {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "steps": progress.step,
            "rows": progress.rows,
            "tokens": progress.tokens,
            "loss_mean": progress.mean_loss,
            **measured,
            "checkpoint": f"{url}/{latest.folder}" if latest else None,
            "model": f"{url}/{FINAL}",
            "data": vars(MixedCaches.counts_of(progress.data)),
        }

    def _write_final(self, folder: Path) -> None:
        if self._adapters:
            parallel.first(lambda: self._merged().save_pretrained(folder))
        else:
            self._save_model(folder)
        if parallel.rank() == 0:
            student.write_files(self._tokenizer, folder)

    def _merged(self) -> Model:
        """Return the model with its adapters merged; of several ranks, from what was written last, in CPU memory."""
        if parallel.count() == 1:
            return lora.merged(self.model)
        latest = self.folder.index().latest
        assert latest is not None
        base, dtype = resolve_model_folder(self._student), next(student.decoder(self.model).parameters()).dtype
        adapters = self.folder.fetch(latest)
        model = lora.merge_saved(student.load_whole(base, dtype=dtype, trust_remote_code=self._trust), adapters)
        discard(base)
        discard(adapters)
        return model

    def _save_model(self, folder: Path) -> None:
        """Write the model, of adapters these alone; rank 0 does, from tensors that all ranks gather."""
        if parallel.count() == 1:
            self.model.save_pretrained(folder)
            return
        tensors = parallel.whole_tensors(self.model, trained_alone=self._adapters)
        if parallel.rank() == 0:
            self.model.save_pretrained(folder, state_dict=tensors)

    def _write(self, folder: Path) -> None:
        self._save_model(folder)
        if parallel.count() > 1:
            shards.save(self.optimizer, folder)
        if parallel.rank():
            return
        if self._adapters:  # they alone were saved: what they adapt is in the configuration
            student.base(self.model).config.save_pretrained(folder)
        student.write_files(self._tokenizer, folder)
        cuda_rng = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        numbers = self.optimizer.state_dict() if parallel.count() == 1 else shards.numbers_of(self.optimizer)
        held = {"optimizer": numbers, "rng": torch.get_rng_state(), "cuda_rng": cuda_rng}
        torch.save(held, folder / OPTIMIZER)
        state = {**{key: getattr(self.progress, key) for key in PROGRESS}, **self._run}
        (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def check_resumable(saved: dict[str, Any], config: TrainerConfig, caches: Sequence[Cache]) -> None:
    """Raise UsageError, naming what differs, where a configuration would continue a run as something else."""
    if len(saved["caches"]) != len(caches):
        raise UsageError(
            f"{config.output} was trained from {len(saved['caches'])} caches, the configuration names {len(caches)}: choose "
            "another output"
        )
    for then, entry, cache in zip(saved["caches"], config.caches, caches, strict=True):
        if then["spec_digest"] != cache.spec.digest:
            raise UsageError(
                f"{config.output} was trained from another cache (identity {then['spec_digest'][:12]}, {cache.url} has "
                f"{cache.spec.digest[:12]}): choose another output"
            )
        if entry.manifest not in (None, then["manifest"]):
            raise UsageError(
                f"{config.output} is pinned to manifest {then['manifest']} of {cache.url}, the configuration asks for "
                f"{entry.manifest}: choose another output, or leave manifest out"
            )
    try:
        then = _what_must_match(saved["config"])
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(f"the configuration in {STATE} of {config.output}", error) from error
    now = _what_must_match(config.model_dump(mode="json"))
    for key, found in now.items():
        if key in then and then[key] != found:
            raise UsageError(f"cannot resume {config.output}: it was started with {key} = {then[key]}, found {found}")


def begun_from(config: TrainerConfig, source: Path, saved: Saved | None) -> dict[str, dict[str, str]]:
    """Return the digests of the student, and of a live teacher, that a run begins from; they are kept in its state.

    Of a resumed run, compare them with what the configuration names now: UsageError where the run would be another. A
    folder that is gone, or a URL that is the same as before, is taken by its name. Cost: reads the weights once.
    """
    names = {"student": config.student}
    if config.loss.method == "online" and config.teacher is not None:
        names["teacher"] = config.teacher
    if saved is None:
        return {
            what: {"name": name, **_digests(source if what == "student" else resolve_model_folder(name), what)}
            for what, name in names.items()
        }
    kept: dict[str, dict[str, str]] = saved.state["models"]
    for what, name in names.items():
        then = kept.get(what)
        by_name = name == then.get("name") and not Path(name).expanduser().is_dir() if then else True
        if then is None or (by_name and not config.lora):  # adapters need the base that they were trained on
            continue
        folder = resolve_model_folder(name)
        now = _digests(folder, what)
        discard(folder)
        if differing := [part for part, digest in now.items() if then.get(part) != digest]:
            raise UsageError(
                f"cannot resume {config.output}: it began from another {what}, {then.get('name')} (the "
                f"{' and the '.join(differing)} of {name} {'differ' if len(differing) > 1 else 'differs'}): choose another "
                f"output, or set {what} back"
            )
        kept[what] = then | {"name": name}
    return kept


def _digests(folder: Path, what: str) -> dict[str, str]:
    found = {"configuration": fingerprint_config(folder), "weights": fingerprint_weights(folder)}
    return found | ({"tokenizer": fingerprint_tokenizer(folder).digest} if what == "student" else {})


def changed_settings(saved: dict[str, Any], config: TrainerConfig) -> str:
    """Return one line that says which settings differ from those that a checkpoint was made with; "" where none does."""
    then, now = _flat(saved["config"]), _flat(config.model_dump(mode="json"))
    changes = [
        f"{key} from {then[key]} to {value}"
        for key, value in now.items()
        if key in then and then[key] != value and key not in NOT_A_CHANGE
    ]
    return f"changed since step {saved['step']:,}: {', '.join(changes)}" if changes else ""


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _what_must_match(config: dict[str, Any]) -> dict[str, Any]:
    flat = {key: config[key] for key in MUST_MATCH}
    flat |= {f"data.{key}": value for key, value in config["data"].items() if key != "caches"}
    for number, cache in enumerate(config["data"].get("caches", [])):  # where they lie may change
        flat |= {f"data.caches.{number}.{key}": cache[key] for key in ("weight", "split", "name")}
    state = config["optim"]["state"]
    # Offloaded moments are the same numbers, kept in another place.
    flat |= {"optim.state": "float32" if state == "offload" else state, "optim.master": config["optim"]["master"]}
    return flat | {"train.dtype": config["train"]["dtype"]}


def ends_alike(saved: dict[str, Any], train: TrainConfig) -> bool:
    """Return whether a checkpoint's run was to end where this configuration ends."""
    then = saved["config"].get("train") or {}
    return (then.get("epochs"), then.get("max_steps")) == (train.epochs, train.max_steps)
