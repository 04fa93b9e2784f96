"""Attention over a packed sequence whose documents must not see one another.

transformers' models call whatever is registered under `config._attn_implementation`; ours is NAME. The documents of
the sequence arrive as the keyword `layout` (a DocumentLayout), which the models pass through to every layer.
Because NAME has no mask function, transformers builds no mask: a [T, T] mask is never materialised.

Kinds (`layout.kind`):
  plain      one explicit masked softmax per document: the naive twin, and what the other kinds are tested against
  documents  one causal SDPA call per document (cuDNN where it wins, see `sdpa_backends`); equal lengths share a call
  varlen     all documents in one call of flash attention's variable-length kernel (CUDA only)
  flex       FlexAttention over the whole sequence with a block mask of the documents (CUDA only)
  mixed      documents of at least `long_document` tokens through SDPA, the shorter ones together through varlen
  auto       chosen per batch: `documents` where all are equal, `mixed` where long documents hold half of the attention's
             work or more, else `flex`

Rates on an H200, forward and backward: one document of 32,768 tokens at 548 TFLOP/s through SDPA, 323 through varlen,
393 through FlexAttention; 64 of 512 at 201, 95 and 122 (benchmarks/attention_h200.py). FlexAttention compiles once per
length of a sequence, so sequences come padded to one length on CUDA.

cuDNN plans its kernels for each new shape, about 0.12 s a length on an H200, so lengths are rounded up to sixteen values
an octave, and all of them are planned at once (`plan_lengths`). Under a causal mask, rows that follow a document cannot
change it, and what they compute is thrown away.

Sliding windows, soft caps and sinks go through FlexAttention on CUDA and through `plain` on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "teachercache_documents"
KINDS = ("auto", "plain", "documents", "varlen", "flex", "mixed")
HALF = (torch.bfloat16, torch.float16)
CUDNN_WINS = (9, 10)
"""Major compute capabilities on which cuDNN's attention is faster than flash: Hopper (H100, H200), Blackwell (B200)."""
BLOCK = 128
"""Tokens of a block of FlexAttention's mask, along queries and keys: torch's default."""
BLOCK_LISTS = tuple(
    f"{full}{axis}_{of}" for axis in ("kv", "q") for full in ("", "full_") for of in ("num_blocks", "indices")
)
"""A BlockMask's arguments: for each row of blocks how many it needs, and which, needed ones first."""
MAX_PLANNED = 32_768
"""Tokens of the longest document that `plan_lengths` plans for."""
LONG_DOCUMENT = 2048
"""Tokens from which `mixed` gives a document a separate SDPA call."""


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
    _offsets: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"attention kind {self.kind!r} is not one of {', '.join(KINDS)}")

    @property
    def num_long(self) -> int:
        """How many leading documents get separate calls under `mixed`."""
        return len(list(itertools.takewhile(lambda length: length >= self.long_document, self.lengths)))

    def path(self, dtype: torch.dtype) -> str:
        """Return the kind that `auto` means for this batch; any other kind is itself."""
        if self.kind != "auto":
            return self.kind
        if self.device.type != "cuda" or dtype not in HALF or len(set(self.lengths)) == 1:
            return "documents"
        work = [float(length) ** 2 for length in self.lengths]
        return "mixed" if 2 * sum(work[: self.num_long]) >= sum(work) else "flex"

    def plan(self, text: Any, dtype: torch.dtype) -> None:
        """Let cuDNN plan its kernels before a step whose documents differ in length; `text` is the model's configuration.

        Not in the layer that needs them first: checkpointing would take what is computed here for the layer's work.
        """
        alone = {"documents": self.lengths, "mixed": self.lengths[: self.num_long]}.get(self.path(dtype), ())
        if len(set(alone)) < 2 or dtype not in HALF or SDPBackend.CUDNN_ATTENTION not in sdpa_backends(self.device):
            return
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        plan_lengths(self.device, dtype, heads, kv_heads, head_dim, sum(self.lengths))

    def block_mask(self, window: int | None) -> BlockMask:
        """Return FlexAttention's mask of the documents: built once per batch, shared by all layers with this window."""
        if window not in self._masks:
            self._masks[window] = document_block_mask(self.lengths, window, self.device)
        return self._masks[window]

    def offsets(self, first: int) -> Tensor:
        """Return int32 [documents - first + 1]: where documents[first:] begin, counted from the first, and the end."""
        if first not in self._offsets:
            ends = list(itertools.accumulate(self.lengths[first:], initial=0))
            self._offsets[first] = torch.tensor(ends, dtype=torch.int32, device=self.device)
        return self._offsets[first]


def document_block_mask(lengths: Sequence[int], window: int | None, device: torch.device) -> BlockMask:
    """Return what `create_block_mask` returns for causal documents, entry by entry, from their lengths alone.

    window  how many tokens, itself included, a token sees; None is all of its document
    A token sees a contiguous range, [first, itself], and `first` never falls along the sequence: so a block of queries
    needs the blocks from its first token's `first` to its own, and sees those whole that lie between its last token's
    `first` and itself. Computed on the host, and copied in one piece without waiting for the device. Cost for T tokens:
    a few sorts of (T / 128)² bytes, 4 ms for T = 32,768, where `create_block_mask` evaluates T² entries.
    """
    total = sum(lengths)
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    first = starts if window is None else np.maximum(starts, np.arange(total) - window + 1)
    query = np.arange(-(-total // BLOCK))[:, None]
    key, own = query.T, np.minimum(query[:, 0] * BLOCK + BLOCK, total) - 1
    needed = (key >= first[::BLOCK, None] // BLOCK) & (key <= query)
    whole = (key * BLOCK >= first[own, None]) & (key < query) & (query * BLOCK + BLOCK <= total)
    parts = [torch.from_numpy(starts.astype(np.int32))]
    for dense in (needed & ~whole, whole, (needed & ~whole).T, whole.T):
        needed_first = np.argsort((~dense).view(np.int8), kind="stable")
        parts += [torch.from_numpy(array.astype(np.int32)) for array in (dense.sum(1), needed_first)]
    flat = torch.cat([part.flatten() for part in parts])
    flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
    start, *blocks = flat.split([part.numel() for part in parts])
    shaped = [block.view(1, 1, *part.shape) for block, part in zip(blocks, parts[1:], strict=True)]
    lists: dict[str, Any] = dict(zip(BLOCK_LISTS, shaped, strict=True))

    def seen(_batch: Any, _head: Any, q: Tensor, kv: Tensor) -> Tensor:
        allowed: Tensor = (start[q] == start[kv]) & (q >= kv)
        return allowed & (q - kv < window) if window is not None else allowed

    return BlockMask((total, total), **lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=seen)


def choose_kind(device: torch.device, requested: str = "auto") -> str:
    """Return the kind for a device: `auto` is left to each batch on CUDA and means a document at a time on a CPU.

    varlen and FlexAttention's backward pass do not exist on a CPU. Raises ValueError where they were requested there.
    """
    if requested != "auto":
        if device.type != "cuda" and requested in ("varlen", "flex", "mixed"):
            raise ValueError(f"train.attention={requested} needs a CUDA device; use documents or plain")
        return requested
    return "auto" if device.type == "cuda" else "documents"


def document_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: DocumentLayout | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention in one layer: the function that transformers calls.

    query [1, H, T, D], key and value [1, H_kv, T, D]; returns ([1, T, H, D], None).
    sliding_window, softcap and s_aux (gpt-oss's sinks, [H]) are honoured by every kind.
    Without `layout` each row of the batch is one document (generation, evaluation of a plain text).
    Raises ValueError for dropout or a mask.
    """
    if dropout:
        raise ValueError(f"attention dropout {dropout} is not supported over packed documents; set it to 0")
    if attention_mask is not None:
        raise ValueError("expected no attention mask: documents say what may be attended to")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    options = _Options(scale, sliding_window, softcap, s_aux)
    if layout is None:
        if query.shape[2] != key.shape[2]:  # generation: keys of earlier tokens come from a cache
            return plain_attention(query, key, value, options).transpose(1, 2), None
        layout = DocumentLayout((query.shape[2],), "documents", query.device)
    layout.calls += 1
    path = layout.path(query.dtype)
    if path == "flex" or (options.special and query.is_cuda and path != "plain"):
        out = _flex(query, key, value, layout, options)
    elif path == "plain" or options.special:
        # split, not slices: its backward pass is one concatenation, that of n slices is n full-size additions.
        parts = zip(*(tensor.split(layout.lengths, dim=2) for tensor in (query, key, value)), strict=True)
        out = torch.cat([plain_attention(q, k, v, options) for q, k, v in parts], dim=2)
    else:
        # The varlen kernel takes half precision alone: in float32 every document gets a separate call.
        first_short = len(layout.lengths)
        if query.dtype in HALF:
            first_short = {"varlen": 0, "mixed": layout.num_long}.get(path, first_short)
        out = _long_then_short(query, key, value, layout, first_short, scale)
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(NAME, document_attention)


@dataclass(frozen=True)
class _Options:
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def special(self) -> bool:
        return self.window is not None or self.softcap is not None or self.sinks is not None


def plain_attention(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor:
    """Compute causal attention of one document: [1, H, n, D] x [1, H_kv, m, D] -> [1, H, n, D] in O(n·m) memory.

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


def _long_then_short(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, first_short: int, scale: float
) -> Tensor:
    """Send the long documents, which come first, through SDPA and those from `first_short` on through varlen."""
    lengths = layout.lengths
    if first_short == 0:
        return _varlen(query, key, value, layout, 0, scale)
    if first_short == len(lengths):
        return causal_documents(query, key, value, lengths, scale)
    border = sum(lengths[:first_short])
    (q, q_short), (k, k_short), (v, v_short) = (
        tensor.split([border, tensor.shape[2] - border], dim=2) for tensor in (query, key, value)
    )
    long = causal_documents(q, k, v, lengths[:first_short], scale)
    return torch.cat([long, _varlen(q_short, k_short, v_short, layout, first_short, scale)], dim=2)


def _varlen(query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, first: int, scale: float) -> Tensor:
    """documents[first:] in one call of flash attention's variable-length kernel: no padding, any lengths."""
    offsets, longest = layout.offsets(first), max(layout.lengths[first:])
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, H, D]
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, offsets, offsets, longest, longest, 0.0, True, False, scale=scale
    )[0]
    return out.transpose(0, 1)[None]


def causal_documents(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    """Run causal SDPA over documents [1, H, T, D] that follow one another; equal neighbours share one call."""
    if len(lengths) == 1:
        return sdpa_causal(query, key, value, scale)
    runs = [(len(list(equal)), length) for length, equal in itertools.groupby(lengths)]
    if len(runs) == 1:  # one call takes all: no split, and no copies of its gradient
        return _causal_run(query, key, value, *runs[0], scale)
    sizes = [count * length for count, length in runs]
    parts = zip(runs, *(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([_causal_run(q, k, v, count, length, scale) for (count, length), q, k, v in parts], dim=2)


def _causal_run(q: Tensor, k: Tensor, v: Tensor, count: int, length: int, scale: float) -> Tensor:
    """`count` documents of one length, [1, H, count·length, D]; for cuDNN the end is padded: few plans serve."""
    # [1, H, count·length, D] -> [count, H, length, D] without a copy
    q, k, v = (tensor.squeeze(0).unflatten(1, (count, length)).transpose(0, 1) for tensor in (q, k, v))
    extra = rounded_length(length) - length if SDPBackend.CUDNN_ATTENTION in sdpa_backends(q.device) else 0
    if extra:
        q, k, v = (F.pad(tensor, (0, 0, 0, extra)) for tensor in (q, k, v))
    out = sdpa_causal(q, k, v, scale)
    out = out[:, :, :-extra] if extra else out
    return out.transpose(0, 1).flatten(1, 2).unsqueeze(0)


@cache
def plan_lengths(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, total: int
) -> None:
    """Let cuDNN plan both passes of all rounded lengths from LONG_DOCUMENT to `total`: about 10 s for 32,768, once.

    Otherwise the step that meets a length first waits for its plan, and of several ranks all wait for one. torch keeps
    the plans of each thread apart: a hook repeats the forward pass in the thread of the backward pass, where
    checkpointing recomputes. Plans of documents above MAX_PLANNED are little of such a step and come when they are met.
    """
    length = LONG_DOCUMENT
    while length <= min(rounded_length(total), MAX_PLANNED):

        @torch.enable_grad()
        def forward(length: int = length - 1) -> Tensor:  # one less: most lengths are padded
            shapes = [(1, count, length, head_dim) for count in (heads, kv_heads, kv_heads)]
            q, k, v = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
            return _causal_run(q, k, v, 1, length, head_dim**-0.5)

        out = forward()
        out.register_hook(lambda _gradient, again=forward: again() * 0)
        out.backward(torch.zeros_like(out))
        length = rounded_length(length + 1)


def rounded_length(length: int) -> int:
    """Return the next of sixteen lengths an octave, a multiple of 128: what SDPA calls of cuDNN are padded to."""
    step = max(128, 1 << max(0, length.bit_length() - 5))
    return -(-length // step) * step


@cache
def sdpa_backends(device: torch.device) -> tuple[SDPBackend, ...]:
    """Return the kernels that SDPA may use, fastest first.

    cuDNN's wins on Hopper (548 against flash's 323 TFLOP/s on an H200) and data-centre Blackwell; by public
    measurements flash is faster on A100, A10G and RTX PRO cards, which get no cuDNN.
    """
    if device.type != "cuda":
        return SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
    others = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    return (
        (SDPBackend.CUDNN_ATTENTION, *others) if torch.cuda.get_device_capability(device)[0] in CUDNN_WINS else others
    )


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Run one causal call over a batch of documents of one length, through the fastest kernel that takes it."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and q.dtype not in HALF:
        # The one float32 kernel on CUDA that is linear in memory takes no grouped heads.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    with sdpa_kernel(list(sdpa_backends(q.device)), set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """FlexAttention is only fast, and only has a memory-saving backward pass, when compiled; shapes are static."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(function, dynamic=False)


def _flex(query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, options: _Options) -> Tensor:
    attend: Any = _compiled(flex_attention) if query.is_cuda else flex_attention
    softcap = options.softcap

    def capped(score: Tensor, _b: Any, _h: Any, _q: Any, _kv: Any) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    result: Any = attend(
        query,
        key,
        value,
        score_mod=capped if softcap is not None else None,
        block_mask=layout.block_mask(options.window),
        scale=options.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_lse=options.sinks is not None,
    )
    if options.sinks is None:
        plain: Tensor = result
        return plain
    # A sink adds exp(sink) to the denominator: out · e^lse / (e^lse + e^sink) = out · sigmoid(lse - sink).
    out: Tensor = result[0]
    keep = torch.sigmoid(result[1] - options.sinks.float().view(1, -1, 1))
    return out * keep[..., None].to(out.dtype)
