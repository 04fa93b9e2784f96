"""The reference teacher: transformers, one input at a time, log-softmax in float32. Slow and obviously right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.config import GenerateConfig, TeacherConfig
from pipeline.teachers.base import Columns, Generated, PendingInput, Prompt, RowsWanted, Scored, Teacher, end_tokens
from teachercache.errors import UsageError
from teachercache.format.record import key_uniforms


class HfTeacher(Teacher):
    """A model of transformers, on a GPU where there is one. Raises UsageError where the folder holds no such model."""

    def __init__(self, config: TeacherConfig, model_path: str, wanted: RowsWanted) -> None:
        import torch
        import transformers

        self.torch = torch
        self.wanted = wanted
        dtype = getattr(torch, config.dtype)
        self.head_dtype = getattr(torch, config.head_dtype)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if config.threads:
            torch.set_num_threads(config.threads)
        transformers.utils.logging.disable_progress_bar()  # one bar for each file would break the lines of progress
        try:
            auto: Any = transformers.AutoModelForCausalLM
            self.model: Any = auto.from_pretrained(
                model_path, dtype=dtype, trust_remote_code=config.trust_remote_code, **config.engine_args
            )
        except (OSError, ValueError, TypeError) as error:  # TypeError: an engine_args that the model does not know
            raise UsageError(f"{model_path}: expected a causal language model, {str(error).splitlines()[0]}") from error
        self.model.to(device).eval()
        # of the model's settings, where an answer ends alone: the job file says how it is sampled, as under vLLM
        ends = self.model.generation_config.eos_token_id
        self.model.generation_config = transformers.GenerationConfig(eos_token_id=ends)
        self.provenance = {
            "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "path": "hf",
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        }
        self._queue: list[PendingInput] = []

    def submit(self, key: int, input_ids: np.ndarray, row_pos: np.ndarray) -> None:
        """Queue an input; `collect` scores it."""
        self._queue.append(PendingInput(key, input_ids, row_pos))

    def collect(self) -> list[Scored]:
        """Score the oldest queued input."""
        if not self._queue:
            return []
        item = self._queue.pop(0)
        return [self.scored(item, lambda: self.columns(item.input_ids, item.row_pos))]

    def columns(self, input_ids: np.ndarray, row_pos: np.ndarray | None = None) -> Columns:
        """Return the rows of every position, 256 rows of logits at a time. row_pos int32 [r] keys the draws: all by default."""
        torch = self.torch
        every = np.arange(len(input_ids), dtype=np.int32)
        key = self.wanted.key(input_ids, every if row_pos is None else row_pos)
        with torch.inference_mode():
            ids = torch.as_tensor(input_ids, dtype=torch.long, device=self.model.device)
            output = self.model.base_model(ids[None], use_cache=False)
            hidden = output.last_hidden_state[0]
            following = torch.cat([ids[1:], ids.new_zeros(1)])
            head = self.model.get_output_embeddings()
            cap = getattr(self.model.config, "final_logit_softcapping", None)
            scale = getattr(self.model.config, "logit_scale", None)
            parts = []
            for start in range(0, len(ids), 256):
                part = hidden[start : start + 256].to(self.head_dtype)
                logits = torch.nn.functional.linear(part, head.weight.to(self.head_dtype)).float()
                if getattr(head, "bias", None) is not None:
                    logits = logits + head.bias.float()
                if scale is not None:
                    logits = logits * scale
                if cap:
                    logits = torch.tanh(logits / cap) * cap
                u = key_uniforms(key, np.arange(start, start + len(logits)))
                parts.append(rows_of_logits(logits, following[start : start + 256], self.wanted, u))
        joined: list[Any] = [None if p[0] is None else np.concatenate(p) for p in zip(*parts, strict=True)]
        return Columns(*joined)

    def generate(
        self, prompts: Sequence[Prompt], config: GenerateConfig, stop_ids: Sequence[int] = ()
    ) -> list[Generated]:
        """Return continuations, one prompt at a time, each sampled from its seed."""
        torch, made = self.torch, []
        ends = end_tokens(self.model.generation_config.eos_token_id, stop_ids)
        for prompt in prompts:
            torch.manual_seed(prompt.seed)
            ids = torch.as_tensor(prompt.ids, dtype=torch.long, device=self.model.device)[None]
            sampling: dict[str, Any] = {"do_sample": config.temperature > 0}
            if config.temperature > 0:
                sampling |= {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
            output = self.model.generate(
                ids, max_new_tokens=prompt.most, pad_token_id=0, eos_token_id=ends or None, **sampling
            )
            new = output[0, ids.shape[1] :].to(torch.int32).cpu().numpy()
            made.append(Generated(new, "stop" if len(new) and int(new[-1]) in ends else "length"))
        return made


def rows_of_logits(logits: Any, following: Any, wanted: RowsWanted, u: np.ndarray) -> Columns:
    """Return the rows of logits float32 [N, V] and following tokens [N], by the plain twins; u float64 [N] is for draws.

    Columns of a padded head, beyond the tokenizer: their mass is in the tail of a top-K row; a sampled row is one of the
    distribution over the tokenizer's ids alone.
    """
    import torch

    from pipeline.teachers.sampled_rows import reference_sampled_rows
    from pipeline.teachers.topk import reference_row_top_k

    rows = wanted.rows
    if rows.kind == "sampled":
        inside, at = logits[:, : wanted.vocab_size], torch.from_numpy(u).to(logits.device)
        drawn = reference_sampled_rows(inside, rows, following, at)
        ids, logprobs, exact, tail, entropy = (column.cpu().numpy() for column in drawn)
        return Columns(ids, logprobs, entropy, exact, tail)
    return Columns(*(c.cpu().numpy() for c in reference_row_top_k(logits, rows.entries, following, wanted.vocab_size)))
