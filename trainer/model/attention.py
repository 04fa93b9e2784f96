"""Attention over a packed sequence whose documents must not see one another.

transformers' models call whatever is registered under `config._attn_implementation`; ours is NAME. The documents of
the sequence arrive as the keyword `documents` (a DocumentLayout), which the models hand through to every layer.
Because NAME has no mask function, transformers builds no mask: a [T, T] mask is never materialised.

Kinds (`documents.kind`):
  plain      one explicit masked softmax per document: the naive twin, and what the other kinds are tested against
  documents  one causal SDPA call per document (cuDNN on Hopper, flash elsewhere); equal lengths share a call
  varlen     all documents in one call of flash attention's variable-length kernel (CUDA only)
  flex       FlexAttention over the whole sequence with a block mask of the documents (CUDA only)
  mixed      documents of at least `long_document` tokens through SDPA, the shorter ones together through varlen
  auto       chosen per batch: `documents` where all are equal, `mixed` where long documents hold half of the attention's
             work or more, else `flex`

Measured on one H200, 32,768 tokens, 24/8 heads of 128, TFLOP/s of forward and backward together
(benchmarks/attention_h200.py) and of a whole 3.2 B step (benchmarks/step_h200.py):

                     documents   varlen   flex   mixed   |  step: mixed   varlen   flex
  one document             548      323    393     545   |          517
  8 of 4,096               464      260    325     453   |          531      497    500
  6 of 15,360 to 512       465      298            434   |
  64 of 512                201       95    122      96   |          527      534    539
  49 log-normal             42      165    199     151   |

A plain causal cuDNN call takes the one document at 553 (FlexAttention and the steps were measured on another day).
FlexAttention compiles once per length of a sequence, so sequences come padded to one length on CUDA.

cuDNN plans a kernel for each new shape, which takes tens of milliseconds, so lengths are rounded up to sixteen values
an octave: under a causal mask, rows that follow a document cannot change it, and what they compute is thrown away.

Sliding windows, soft caps and sinks go through FlexAttention on CUDA and through `plain` on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "teachercache_documents"
KINDS = ("auto", "plain", "documents", "varlen", "flex", "mixed")
HALF = (torch.bfloat16, torch.float16)
LONG_DOCUMENT = 2048
"""Tokens from which `mixed` gives a document an SDPA call of its own."""


@dataclass
class DocumentLayout:
    """Which tokens of a flat sequence belong together, and how attention is computed over them.

    lengths  tokens of each document, in order, longest first but for a last entry of padding; they add up to T
    kind     one of KINDS
    """

    lengths: tuple[int, ...]
    kind: str
    device: torch.device
    long_document: int = LONG_DOCUMENT
    calls: int = 0
    """How often attention was computed over this layout."""
    _masks: dict[int | None, BlockMask] = field(default_factory=dict)
    _offsets: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"attention kind {self.kind!r} is not one of {', '.join(KINDS)}")

    @property
    def num_long(self) -> int:
        """How many documents lead the sequence that get calls of their own under `mixed`."""
        count = 0
        for length in self.lengths:
            if length < self.long_document:
                break
            count += 1
        return count

    def path(self, dtype: torch.dtype) -> str:
        """The kind that `auto` means for this batch; any other kind is itself."""
        if self.kind != "auto":
            return self.kind
        if self.device.type != "cuda" or dtype not in HALF or len(set(self.lengths)) == 1:
            return "documents"
        work = [float(length) ** 2 for length in self.lengths]
        return "mixed" if 2 * sum(work[: self.num_long]) >= sum(work) else "flex"

    def block_mask(self, window: int | None) -> BlockMask:
        """FlexAttention's mask of the documents, built once per batch and shared by all layers with this window."""
        if window not in self._masks:
            self._masks[window] = _block_mask(self.lengths, window, self.device)
        return self._masks[window]

    def offsets(self, first: int) -> torch.Tensor:
        """int32 [documents - first + 1]: where documents[first:] begin, counted from the first of them, and the end."""
        if first not in self._offsets:
            ends = list(itertools.accumulate(self.lengths[first:], initial=0))
            self._offsets[first] = torch.tensor(ends, dtype=torch.int32, device=self.device)
        return self._offsets[first]


def choose_kind(device: torch.device, requested: str = "auto") -> str:
    """`auto` is left to each batch on CUDA; on a CPU it is a document at a time: varlen and FlexAttention's backward
    pass do not exist there."""
    if requested != "auto":
        if device.type != "cuda" and requested in ("varlen", "flex", "mixed"):
            raise ValueError(f"train.attention={requested} needs a CUDA device; use documents or plain")
        return requested
    return "auto" if device.type == "cuda" else "documents"


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    documents: DocumentLayout | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer.

    query [1, H, T, D], key and value [1, H_kv, T, D]; returns ([1, T, H, D], None).
    sliding_window, softcap and s_aux (gpt-oss's sinks, [H]) are honoured by every kind.
    Without `documents` each row of the batch is one document (generation, evaluation of a plain text).
    """
    if dropout:
        raise ValueError(f"attention dropout {dropout} is not supported over packed documents; set it to 0")
    if attention_mask is not None:
        raise ValueError("expected no attention mask: documents say what may be attended to")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    options = _Options(scale, sliding_window, softcap, s_aux)
    if documents is None:
        if query.shape[2] != key.shape[2]:  # generation: keys of earlier tokens come from a cache
            return plain_attention(query, key, value, options).transpose(1, 2), None
        documents = DocumentLayout((query.shape[2],), "documents", query.device)
    documents.calls += 1
    path = documents.path(query.dtype)
    if path == "flex" or (options.special and query.is_cuda and path != "plain"):
        out = _flex(query, key, value, documents, options)
    elif path == "plain" or options.special:
        out = _per_document(query, key, value, documents.lengths, lambda q, k, v: plain_attention(q, k, v, options))
    else:
        # The varlen kernel takes half precision alone: in float32 every document gets a call of its own.
        short_together = query.dtype in HALF
        first_short = len(documents.lengths)
        if short_together and path == "varlen":
            first_short = 0
        elif short_together and path == "mixed":
            first_short = documents.num_long
        out = _long_then_short(query, key, value, documents, first_short, scale)
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(NAME, document_attention)


@dataclass(frozen=True)
class _Options:
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def special(self) -> bool:
        return self.window is not None or self.softcap is not None or self.sinks is not None


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: _Options) -> torch.Tensor:
    """Causal attention of one document, spelled out: [1, H, n, D] x [1, H_kv, m, D] -> [1, H, n, D]. O(n·m) memory.

    The queries are those of the last n of m tokens; n = m but for generation.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(2, 3)).float() * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    n, m = q.shape[2], k.shape[2]
    behind = torch.arange(m - n, m, device=q.device)[:, None] - torch.arange(m, device=q.device)  # [n, m]
    seen = behind >= 0
    if options.window is not None:
        seen &= behind < options.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if options.sinks is not None:
        sink = options.sinks.float().view(1, -1, 1, 1).expand(q.shape[0], -1, n, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return weights.to(v.dtype) @ v


def _per_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], attend: Callable[..., Any]
) -> torch.Tensor:
    # split, not slices: the backward pass of a split is one concatenation, that of n slices is n full-size additions.
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([attend(q, k, v) for q, k, v in parts], dim=2)


def _long_then_short(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: DocumentLayout,
    first_short: int,
    scale: float,
) -> torch.Tensor:
    """documents[:first_short] through SDPA, the rest through varlen; the sequence has the long ones first."""
    lengths = documents.lengths
    if first_short == 0:
        return _varlen(query, key, value, documents, 0, scale)
    if first_short == len(lengths):
        return causal_documents(query, key, value, lengths, scale)
    border = sum(lengths[:first_short])
    (q, q_short), (k, k_short), (v, v_short) = (
        tensor.split([border, tensor.shape[2] - border], dim=2) for tensor in (query, key, value)
    )
    long = causal_documents(q, k, v, lengths[:first_short], scale)
    short = _varlen(q_short, k_short, v_short, documents, first_short, scale)
    return torch.cat([long, short], dim=2)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: DocumentLayout,
    first: int,
    scale: float,
) -> torch.Tensor:
    """documents[first:] in one call of flash attention's variable-length kernel: no padding, any lengths."""
    offsets, longest = documents.offsets(first), max(documents.lengths[first:])
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, H, D]
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, offsets, offsets, longest, longest, 0.0, True, False, scale=scale
    )[0]
    return out.transpose(0, 1)[None]


def causal_documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], scale: float
) -> torch.Tensor:
    """Causal SDPA of documents that follow one another, longest first: runs of equal length share one call.

    query [1, H, T, D], key and value [1, H_kv, T, D]; lengths add up to T, or leave one entry of padding at the end.
    """
    if len(lengths) == 1:
        return sdpa_causal(query, key, value, scale)
    runs: list[tuple[int, int]] = []  # (documents, length)
    for length in lengths:
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    if len(runs) == 1:  # one call takes all: no split, and no copies of its gradient
        batched = (_unflatten(tensor, *runs[0]) for tensor in (query, key, value))
        return _flatten(_rounded_causal(*batched, scale=scale))
    sizes = [count * length for count, length in runs]
    parts = zip(runs, *(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    outs = []
    for (count, length), q, k, v in parts:
        batched = (_unflatten(tensor, count, length) for tensor in (q, k, v))
        outs.append(_flatten(_rounded_causal(*batched, scale=scale)))
    return torch.cat(outs, dim=2)


def _unflatten(tensor: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """[1, H, count·length, D] -> [count, H, length, D] without a copy."""
    return tensor.squeeze(0).unflatten(1, (count, length)).transpose(0, 1)


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """[count, H, length, D] -> [1, H, count·length, D]."""
    return tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def rounded_length(length: int) -> int:
    """The next of sixteen lengths an octave, at least a multiple of 128: what SDPA calls on CUDA are padded to."""
    step = max(128, 1 << max(0, length.bit_length() - 5))
    return -(-length // step) * step


def _rounded_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """On CUDA, pad the end so that a few kernel plans serve all lengths."""
    extra = rounded_length(q.shape[2]) - q.shape[2] if q.is_cuda else 0
    if not extra:
        return sdpa_causal(q, k, v, scale)
    q, k, v = (F.pad(tensor, (0, 0, 0, extra)) for tensor in (q, k, v))
    return sdpa_causal(q, k, v, scale)[:, :, :-extra]


def sdpa_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One causal call over a batch of documents of one length, through the fastest kernel that takes it."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and q.dtype not in HALF:
        # The one float32 kernel on CUDA that is linear in memory takes no grouped heads.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    with sdpa_kernel(_backends(q.device.type), set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@cache
def _backends(device_type: str) -> list[SDPBackend]:
    if device_type == "cuda":
        return [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def _block_mask(lengths: tuple[int, ...], window: int | None, device: torch.device) -> BlockMask:
    total = sum(lengths)
    document = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device), output_size=total
    )

    def seen(_batch: Any, _head: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        allowed = (document[q] == document[kv]) & (q >= kv)
        return allowed & (q - kv < window) if window is not None else allowed

    build = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return build(seen, B=None, H=None, Q_LEN=total, KV_LEN=total, device=device)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """FlexAttention is only fast, and only has a memory-saving backward pass, when compiled; shapes are static."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(function, dynamic=False)


def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: DocumentLayout, options: _Options
) -> torch.Tensor:
    attend: Any = _compiled(flex_attention) if query.is_cuda else flex_attention
    softcap = options.softcap

    def capped(score: torch.Tensor, _b: Any, _h: Any, _q: Any, _kv: Any) -> torch.Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    result: Any = attend(
        query,
        key,
        value,
        score_mod=capped if softcap is not None else None,
        block_mask=documents.block_mask(options.window),
        scale=options.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_lse=options.sinks is not None,
    )
    if options.sinks is None:
        return result
    # A sink adds exp(sink) to the denominator: out · e^lse / (e^lse + e^sink) = out · sigmoid(lse - sink).
    out, lse = result
    return out * torch.sigmoid(lse - options.sinks.float().view(1, -1, 1))[..., None].to(out.dtype)
