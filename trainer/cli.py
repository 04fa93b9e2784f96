"""`python -m trainer fit | eval | plan | init-student | bench-loss | bench-step | config`.

All but `plan` and `config` also as `teachercache fit` and so on: `teachercache plan` is the pipeline's.

Exit status: 0 done, 1 something was found wrong (or the run was stopped and saved), 2 misused. Nothing in here imports
torch before a command needs it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from teachercache.configfile import commented_yaml
from teachercache.console import local_path, print_json, run_cli, text_console
from trainer.bench.cli import bench_loss, bench_step
from trainer.config import TrainerConfig, load_config

# What torch reads when it is imported. Libraries report optional parts that they could not load; a user of these
# commands can do nothing with that.
for noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(noisy).setLevel(logging.ERROR)
# Packed sequences bring new shapes all the time; growing segments keep the memory between them usable.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train a student from a teacher cache. A run is one YAML file plus key=value overrides.",
)

ConfigFile = Annotated[Path, typer.Argument(help="The run's YAML file; `python -m trainer config` prints every key.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value overrides, for example optim.lr=1e-3")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


@app.command()
def fit(
    config_file: ConfigFile,
    overrides: Overrides = None,
    as_json: Json = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Continue a run whose machine is gone, after two minutes of silence.")
    ] = False,
) -> None:
    """Train, or continue: the same command resumes exactly from the newest checkpoint of `output`.

    Example: teachercache fit train.yaml cache=s3://bucket/cache student=build/student output=build/run
    """
    config = load_config(config_file, [*(overrides or []), *(["take_over=true"] if take_over else [])])
    _quiet()
    from trainer.fit import fit as run_fit

    if summary := run_fit(config):  # of several ranks, the first has one
        _print(summary, as_json, "fit")


@app.command("eval")
def evaluate(
    config_file: ConfigFile,
    overrides: Overrides = None,
    as_json: Json = False,
    text: Annotated[Path | None, typer.Option(help="Evaluate perplexity on a text file instead of the cache.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval instead of the cache, by commas; teachercache_choice is here.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Questions of each of the tasks.")] = None,
) -> None:
    """Measure a student: held-out KL, top-1 agreement with the teacher, perplexity and calibration.

    KL is over K+1 outcomes; with teacher=FOLDER also over the full vocabulary. `split=` chooses the split
    (default: eval.split).

    Example: teachercache eval train.yaml student=build/run cache=s3://bucket/cache split=heldout --json
    """
    overrides = overrides or []
    config = load_config(config_file, overrides)
    split = config.split if any(item.startswith("split=") for item in overrides) else config.eval.split
    if tasks is not None and text is not None:
        raise typer.BadParameter("--tasks and --text are two evaluations: give one of them")
    if limit is not None and (tasks is None or limit < 1):
        raise typer.BadParameter("--limit goes with --tasks and is 1 or more")
    _quiet()
    if tasks is not None:
        from trainer.tasks.run import evaluate_tasks

        _print(evaluate_tasks(config, [name.strip() for name in tasks.split(",")], limit=limit), as_json, "eval")
        return
    from trainer.evaluate import evaluate_cache, evaluate_text
    from trainer.limits import evaluation_explained

    with evaluation_explained(config):
        result = evaluate_text(config, text) if text else evaluate_cache(config, split)
    _print(result, as_json, "eval")


@app.command("plan")
def show_plan(
    config_file: ConfigFile,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="GPUs that share weights, gradients and states (torchrun).")] = 1,
    gpu_gib: Annotated[float, typer.Option(help="Memory of a GPU in GiB; the default is an H200's.")] = 139.7,
    as_json: Json = False,
) -> None:
    """Print the bytes of a training step on each GPU, before anything is loaded. Exit status 1: it does not fit.

    Reads the student's config.json alone; needs no GPU, no weights and no cache.

    Example: python -m trainer plan train.yaml data.seq_len=32768 --gpus 4
    """
    config = load_config(config_file, overrides or [])
    _quiet()
    from trainer.memory import plan

    found = plan(config, gpus, gpu_gib)
    _print(found, as_json, "plan")
    if not found["fits"]:
        raise typer.Exit(1)


@app.command("init-student")
def init_student(
    teacher: Annotated[str, typer.Option(help="The teacher's Hugging Face folder, or its id on the hub.")],
    out: Annotated[
        Path,
        typer.Option(help="Where the student goes; must not exist or be empty.", parser=local_path, metavar="path"),
    ],
    layers: Annotated[str, typer.Option(help="every-2, first-8 or a list such as 0,3-5,9.")] = "every-2",
    mlp: Annotated[int | None, typer.Option(help="Keep this many units of each MLP, the strongest.")] = None,
    as_json: Json = False,
) -> None:
    """Cut a student from its teacher by keeping layers (and MLP units); everything else is copied.

    Example: teachercache init-student --teacher build/models/smollm2-135m --layers every-2 --out build/student
    """
    _quiet()
    from trainer.model import init_student as cut

    made = cut.init_student(cut.teacher_folder(teacher), out, layers=layers, mlp=mlp)
    _print(made, as_json, "init-student")


@app.command("config")
def show_config() -> None:
    """Print every key of a run's YAML file with its default and what it does.

    Example: python -m trainer config > train.yaml
    """
    print(commented_yaml(TrainerConfig), end="")


app.command("bench-loss")(bench_loss)
app.command("bench-step")(bench_step)


def _print(result: dict[str, Any], as_json: bool, title: str) -> None:
    if as_json:
        print_json(result, indent=None)
        return
    table = Table("", title, show_lines=False)
    for key, value in result.items():
        for name, part in value.items() if isinstance(value, dict) else [("", value)]:
            table.add_row(f"{key}.{name}".strip("."), _number(part))
    text_console().print(table)


def _number(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,.5g}" if isinstance(value, float) else str(value)


def _quiet() -> None:
    """Spare the user transformers' bar for every file that it loads."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    run_cli(app, arguments, name="python -m trainer")
