"""`python -m trainer fit | eval | init-student | bench-loss | bench-step`.

Exit status: 0 done, 1 something was found wrong (or the run was stopped and saved), 2 misused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from teachercache.errors import TeacherCacheError, UsageError
from trainer.bench.cli import bench_loss, bench_step
from trainer.config import load_config

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train a student from a teacher cache. A run is one YAML file plus key=value overrides.",
)

ConfigFile = Annotated[Path, typer.Argument(help="The run's YAML file; see `trainer/config.py` for every key.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value overrides, for example optim.lr=1e-3")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


@app.command()
def fit(config_file: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train, or continue: the same command resumes exactly from the newest checkpoint of `output`.

    Example: python -m trainer fit train.yaml cache=s3://bucket/cache student=build/student output=build/run
    """
    config = load_config(config_file, overrides or [])
    _quiet()
    from trainer.fit import fit as run_fit

    _print(run_fit(config), as_json, "fit")


@app.command("eval")
def evaluate(
    config_file: ConfigFile,
    overrides: Overrides = None,
    as_json: Json = False,
    text: Annotated[Path | None, typer.Option(help="Evaluate perplexity on a text file instead of the cache.")] = None,
) -> None:
    """Held-out KL, top-1 agreement with the teacher, perplexity and calibration of a student.

    KL is over K+1 outcomes; with teacher=FOLDER also over the full vocabulary. `split=` chooses the split
    (default: eval.split).

    Example: python -m trainer eval train.yaml student=build/run cache=s3://bucket/cache split=heldout --json
    """
    overrides = overrides or []
    config = load_config(config_file, overrides)
    split = config.split if any(item.startswith("split=") for item in overrides) else config.eval.split
    _quiet()
    from trainer.evaluation import evaluate_cache, evaluate_text

    _print(evaluate_text(config, text) if text else evaluate_cache(config, split), as_json, "eval")


@app.command("init-student")
def init_student(
    teacher: Annotated[str, typer.Option(help="The teacher's Hugging Face folder, or its id on the hub.")],
    out: Annotated[Path, typer.Option(help="Where the student goes; must not exist or be empty.")],
    layers: Annotated[str, typer.Option(help="every-2, first-8 or a list such as 0,3-5,9.")] = "every-2",
    mlp: Annotated[int | None, typer.Option(help="Keep so many units of each MLP, the strongest.")] = None,
    as_json: Json = False,
) -> None:
    """Cut a student from its teacher by keeping layers (and MLP units); everything else is copied.

    Example: python -m trainer init-student --teacher build/models/smollm2-135m --layers every-2 --out build/student
    """
    _quiet()
    from trainer.hub import model_folder
    from trainer.model.student import init_student as cut

    _print(cut(model_folder(teacher), out, layers=layers, mlp=mlp), as_json, "init-student")


app.command("bench-loss")(bench_loss)
app.command("bench-step")(bench_step)


def _print(result: dict[str, Any], as_json: bool, title: str) -> None:
    if as_json:
        print(json.dumps(result))
        return
    table = Table("", title, show_lines=False)
    for key, value in result.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {number}" for name, number in value.items())
        table.add_row(key, f"{value:.5g}" if isinstance(value, float) else str(value))
    Console().print(table)


def _quiet() -> None:
    """transformers shows a bar for every file that it loads; this command has its own progress."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; expected errors become one line and an exit status."""
    try:
        app(arguments, standalone_mode=False)
    except TeacherCacheError as error:
        print(f"error: {error} [{error.code}]", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(1)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # click's own errors: unknown option, missing argument
        if usage is None:
            raise
        print(f"error: {usage()} See --help.", file=sys.stderr)
        sys.exit(UsageError.exit_code)
