"""What the three programs share at a terminal: one main, consoles, a progress bar, JSON, signals."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from teachercache.errors import TeacherCacheError, UsageError
from teachercache.urls import hide_credentials, refuse_credentials

LOG_COLUMNS = 160  # without a terminal: a log is no 80-column screen
INTERRUPTED = 130
# The extra of this distribution that brings a module; a module that is not named is asked for by its name.
EXTRAS = {
    "ray": "pipeline", "psutil": "pipeline", "torch": "trainer", "triton": "trainer", "transformers": "trainer",
    "safetensors": "trainer", "accelerate": "trainer", "vllm": "vllm", "liger_kernel": "fast", "torchao": "fast",
    "huggingface_hub": "hub", "peft": "lora", "lm_eval": "harness",
}  # fmt: skip
# What a terminal obeys or what changes the order of letters: C0 but the line feed, DEL, C1, bidirectional marks, line
# separators; and halves of surrogate pairs, which no stream can encode.
_BYTES = (*range(0x0A), *range(0x0B, 0x20), *range(0x7F, 0xA0))
_WIDE = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))
_ESCAPES = {code: f"\\x{code:02x}" for code in _BYTES} | {code: f"\\u{code:04x}" for code in _WIDE}
_JSON_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *_WIDE)}


def printable(text: str) -> str:
    """Return text of which no character controls a terminal: those that would become `\\x1b` or `\\u202e`.

    Line feeds stay. Everything that a cache, a corpus, a model's folder or a server wrote passes through this on its
    way to a person; `text_console`, `say`, `note` and the errors of `run_cli` do it by themselves.
    """
    return text.translate(_ESCAPES)


class _SafeConsole(Console):
    """A console that prints every text as `printable` does, and that reads no markup and no emoji codes in it."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def run_cli(app: typer.Typer, arguments: Sequence[str] | None = None, *, name: str | None = None) -> NoReturn:
    """Run a command line (default: this process's) and exit: 0 fine, 1 something is wrong, 2 misused, 130 Ctrl-C.

    An error that a user can understand becomes one line on standard error: an error with a code, a wrong option, a
    local file that cannot be read, a package that is not installed. Any other is a bug and keeps its traceback.
    """
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")  # of a Latin-1 terminal; standard error escapes what it cannot encode
    try:
        status = app(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except TeacherCacheError as error:
        _fail(f"{error} [{error.code}]", error.exit_code)
    except BrokenPipeError:  # of `teachercache ls | head`; what is left unwritten must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ModuleNotFoundError as error:  # a command imports what it needs, so that --help needs nothing
        _fail(missing_module(error), UsageError.exit_code)
    except OSError as error:  # of local files; what a store answers has become an error of ours
        named = "" if error.filename is None else f"{error.filename}: "
        _fail(f"{named}{error.strerror or error}; check the path and its rights.", 1)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", INTERRUPTED)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # click's own errors: an unknown option, a missing argument
        if usage is None:
            raise
        if said := usage():
            context = getattr(error, "ctx", None)
            see = f"; see {context.command_path} --help" if context else ""
            say(f"error: {hide_credentials(said).rstrip('.')}{see}")
        sys.exit(UsageError.exit_code)
    if status == INTERRUPTED:
        _fail("interrupted", INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def local_path(text: str | Path) -> Path:
    """Return an argument that must be a local path; raise UsageError for a URL, unquoted: it may hold a secret."""
    refuse_credentials(str(text))
    if "://" in str(text):
        raise UsageError("a URL is given where a local path is expected")
    return Path(text)


def _fail(said: str, status: int) -> NoReturn:
    say(f"error: {' '.join(hide_credentials(said).split())}")
    sys.exit(status)


def missing_module(error: ModuleNotFoundError, *, needs: str = "this command needs") -> str:
    """Return one sentence that says what to install."""
    module = (error.name or "").split(".")[0]
    extra = EXTRAS.get(module)
    how = f"in a clone of teachercache, pip install '.[{extra}]'" if extra else f"pip install {module}"
    return f"{needs} the package {module}, which is not installed: {how}"


def text_console(*, stderr: bool = False) -> Console:
    """Return a console for people's lines; without a terminal it is 160 columns wide. It prints text as `printable`."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else LOG_COLUMNS
    return _SafeConsole(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def print_unfolded(renderable: RenderableType) -> None:
    """Print a table on standard output, each row on one line however narrow the terminal is."""
    console = text_console()
    console.width = 10_000
    console.print(renderable, soft_wrap=True)


def say(text: str, *, stderr: bool = True) -> None:
    """Print a line for people, unwrapped."""
    print(printable(text), file=sys.stderr if stderr else sys.stdout, flush=True)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print one JSON value on standard output; `indent` None puts it on one line.

    What `printable` escapes is escaped as JSON does it, as is everything beyond ASCII where the stream is not UTF-8.
    """
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, indent=indent, ensure_ascii=not unicode).translate(_JSON_ESCAPES), flush=True)


def note(text: str, kind: str = "warning") -> None:
    """Print one line on standard error that begins with `kind`."""
    text_console(stderr=True).print(Text(f"{kind}:", style="yellow") + Text(printable(f" {text}")), soft_wrap=True)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give a callable (done, total) that draws a bar on a terminal, and prints a line every tenth elsewhere."""
    console = text_console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    last = -1

    def line(done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // max(total, 1)
        if tenth > last and total >= 10:
            last = tenth
            console.print(f"{what}: {done} of {total}")

    yield line


@contextmanager
def stop_on_signals(stop: threading.Event, on_signal: Callable[[str], None] | None = None) -> Iterator[None]:
    """Set `stop` at SIGTERM or Ctrl-C, after `on_signal(name)`; a second signal ends the process as usual.

    Does nothing outside the main thread, where Python lets no one change handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def handler(number: int, frame: types.FrameType | None) -> None:
        if on_signal is not None:
            on_signal(signal.Signals(number).name)
        stop.set()
        for known, old in before.items():
            signal.signal(known, old)

    for number in (int(signal.SIGTERM), int(signal.SIGINT)):
        before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
