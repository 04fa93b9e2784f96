"""Losses of a student against cached top-K teacher rows. See docs/LOSSES.md for the mathematics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.losses.kl import kl_loss
    from trainer.losses.online import online_kl_loss
    from trainer.losses.rows import TeacherRows

__all__ = ["TeacherRows", "kl_loss", "online_kl_loss"]


def __getattr__(name: str) -> Any:
    """Import a loss when it is first asked for: the configuration needs `options` alone, and no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = {"kl_loss": "kl", "online_kl_loss": "online", "TeacherRows": "rows"}[name]
    return getattr(import_module(f"trainer.losses.{module}"), name)
