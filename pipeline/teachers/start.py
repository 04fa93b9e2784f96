"""From the job file to a running teacher: the one place that knows every engine."""

from __future__ import annotations

from pipeline.config import TeacherConfig
from pipeline.teachers.base import RowsWanted, Teacher


def start_teacher(config: TeacherConfig, model_path: str, wanted: RowsWanted) -> Teacher:
    """Start the teacher that the job file names. `model_path` is a local folder."""
    if config.engine == "vllm":
        from pipeline.teachers.vllm_teacher import VllmTeacher

        return VllmTeacher(config, model_path, wanted)
    if config.engine == "hf":
        from pipeline.teachers.hf import HfTeacher

        return HfTeacher(config, model_path, wanted)
    from pipeline.teachers.noop import NoopTeacher

    return NoopTeacher(config, wanted)
