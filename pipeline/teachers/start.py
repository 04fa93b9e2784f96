"""From the job file to a running teacher: the one place that knows every engine."""

from __future__ import annotations

from pipeline.config import TeacherConfig
from pipeline.teachers.base import Teacher


def start_teacher(config: TeacherConfig, model_path: str, vocab_size: int) -> Teacher:
    """Start the teacher that the job file names. `model_path` is a local folder, `vocab_size` the tokenizer's."""
    if config.engine == "vllm":
        from pipeline.teachers.vllm_teacher import VllmTeacher

        return VllmTeacher(config, model_path, vocab_size)
    if config.engine == "hf":
        from pipeline.teachers.hf import HfTeacher

        return HfTeacher(config, model_path, vocab_size)
    from pipeline.teachers.noop import NoopTeacher

    return NoopTeacher(config, vocab_size)
