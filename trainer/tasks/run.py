"""`trainer eval --tasks`: lm-evaluation-harness over a student's folder, its own tasks and ours."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from teachercache.errors import UsageError
from trainer import setup
from trainer.checkpoint import resolve_model_folder
from trainer.config import TrainerConfig

FOLDER = Path(__file__).parent
OURS = {path.stem for path in FOLDER.glob("*.yaml")}


def evaluate_tasks(config: TrainerConfig, tasks: list[str], *, limit: int | None = None) -> dict[str, Any]:
    """Return the harness's figures of `config.student` on tasks by name, such as teachercache_choice.acc.

    limit  questions of each task; None = all. Only tasks of this package need no network.

    Raises UsageError for a task that the harness does not know, ModuleNotFoundError without lm-eval.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # Its 15,000 task files take seconds to read.
    manager = TaskManager(include_path=str(FOLDER), include_defaults=not set(tasks) <= OURS)
    if unknown := sorted(set(tasks) - set(manager.all_tasks)):
        raise UsageError(
            f"lm-eval {lm_eval.__version__} knows no task {', '.join(unknown)}; expected {', '.join(sorted(OURS))} or one that "
            "`lm_eval ls tasks` lists"
        )
    compute = setup.choose_compute(config.train)
    setup.configure_torch(config.train)
    folder = resolve_model_folder(config.student)
    model = HFLM(
        pretrained=str(folder),
        device=str(compute.device),
        dtype=str(compute.dtype).removeprefix("torch."),
        trust_remote_code=config.trust_remote_code,
        batch_size=8,
    )
    found = lm_eval.simple_evaluate(model, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False)
    assert found is not None  # on ranks other than the first it is None
    figures: dict[str, float] = {f"{task}.questions": count["effective"] for task, count in found["n-samples"].items()}
    figures |= {
        f"{task}.{key.removesuffix(',none')}": value
        for task, results in found["results"].items()
        for key, value in results.items()
        if isinstance(value, float)
    }
    return {"student": str(folder), "tasks": figures}
