"""Losses of a student against cached top-K teacher rows. See docs/LOSSES.md for the mathematics."""

from trainer.losses.kl import kl_loss
from trainer.losses.online import online_kl_loss
from trainer.losses.rows import TeacherRows

__all__ = ["TeacherRows", "kl_loss", "online_kl_loss"]
