"""The student as a model: loading, attention over packed documents, recomputation, fused layers, adapters."""

from __future__ import annotations

from typing import Any, TypeAlias

Model: TypeAlias = Any
"""A transformers causal language model (a torch.nn.Module). Its parts (`model.layers`, `lm_head`, `config`) are found
by name, which torch's own types declare as `Tensor | Module`: nothing that a type checker could follow."""
