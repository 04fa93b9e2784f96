"""What a loss is made of, and which combinations are accepted: the only place that spells the options' names."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field

Tail = Literal["auto", "bucket", "none", "renormalize", "sampled"]
Divergence = Literal["forward", "reverse", "jsd"]
Method = Literal["fused", "forward_chunked", "dense"]
TAILS: tuple[str, ...] = get_args(Tail)[1:]  # `auto` becomes one of them when the rows are known
DIVERGENCES: tuple[str, ...] = get_args(Divergence)
METHODS: tuple[str, ...] = get_args(Method)


@dataclass(frozen=True)
class Objective:
    """One row's loss, `(1 - ce_weight) * KD + ce_weight * CE + z_loss * logsumexp(z)^2`: what a run chooses.

    | tail        | divergence            | temperature | cross-entropy, z-loss |
    |-------------|-----------------------|-------------|-----------------------|
    | bucket      | forward, reverse, jsd | any > 0     | yes                   |
    | none        | forward               | 1           | yes                   |
    | renormalize | forward               | 1           | yes                   |
    | renormalize | forward               | any > 0     | no                    |
    | sampled     | forward               | 1           | yes                   |
    | None        | forward, reverse, jsd | any > 0     | no                    |

    Soft-cap, bias, vocabulary mask and invalid rows go with every line. All else raises ValueError. `tail=None` is the
    full vocabulary, which needs a live teacher: `online_kl_loss` takes it, `kl_loss` refuses it. `auto` is `sampled` for
    sampled rows and `bucket` for top-K rows; each kind refuses the other's tails.
    """

    tail: Annotated[
        Tail | None,
        Field(
            description="Where the mass outside the cached K goes: into one more outcome (`bucket`), nowhere (`none`), or "
            "to the K (`renormalize`). Sampled rows have no outside: their weights estimate the full vocabulary "
            "(`sampled`). `auto` is `sampled` on a sampled cache, else `bucket`. With loss.method=online, null is the "
            "full vocabulary."
        ),
    ] = "auto"
    divergence: Annotated[
        Divergence,
        Field(description="`forward` is KL(teacher || student), `reverse` KL(student || teacher), `jsd` between them."),
    ] = "forward"
    jsd_beta: Annotated[
        float, Field(description="The teacher's weight in the mixture of `jsd`; 0 and 1 are forward and reverse KL.")
    ] = 0.5
    temperature: Annotated[
        float, Field(description="Tempers teacher and student; the KD term is multiplied by temperature².")
    ] = 1.0
    ce_weight: Annotated[
        float, Field(description="Loss = (1 - ce_weight) · KD + ce_weight · cross-entropy on the real next token.")
    ] = 0.0
    z_loss: Annotated[float, Field(description="Weight of logsumexp(logits)², which keeps logits from drifting.")] = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range or a combination that is not in the table."""
        if self.tail not in ("auto", *TAILS, None):
            raise ValueError(f"tail must be one of auto, {', '.join(TAILS)}, or None online, found {self.tail!r}")
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence must be one of {', '.join(DIVERGENCES)}, found {self.divergence!r}")
        if not 0.0 <= self.jsd_beta <= 1.0:
            raise ValueError(f"jsd_beta must lie in [0, 1], found {self.jsd_beta}")
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be positive and finite, found {self.temperature}")
        if not 0.0 <= self.ce_weight <= 1.0:
            raise ValueError(f"ce_weight must lie in [0, 1], found {self.ce_weight}")
        if not 0.0 <= self.z_loss < float("inf"):
            raise ValueError(f"z_loss must be non-negative and finite, found {self.z_loss}")
        if self.tail == "sampled" and (self.divergence != "forward" or self.temperature != 1.0):
            raise ValueError(
                f"sampled rows estimate forward KL at temperature 1 alone, found divergence={self.divergence!r} at "
                f"temperature {self.temperature}; set data.top_k (rows.truncate) to at most the rows' least number of "
                "exact entries, which are then top-K rows with tail='bucket', or take a top-K cache"
            )
        if self.divergence != "forward" and self.tail not in ("auto", "bucket", None):
            raise ValueError(
                f"divergence={self.divergence!r} needs tail='bucket' (on a sub-mass it has no useful minimum), "
                f"found tail={self.tail!r}"
            )
        if self.tail == "none" and self.temperature != 1.0:
            raise ValueError(
                f"tail='none' is defined at temperature 1 only, found {self.temperature}; use tail='bucket'"
            )
        mixed = self.ce_weight or self.z_loss
        if self.tail is None and mixed:
            raise ValueError(
                f"tail=None is the divergence over the full vocabulary alone: ce_weight and z_loss must be 0, "
                f"found {self.ce_weight} and {self.z_loss}"
            )
        if self.tail == "renormalize" and self.temperature != 1.0 and mixed:
            raise ValueError(
                f"tail='renormalize' at temperature {self.temperature} tempers the whole softmax and cannot be mixed "
                f"with cross-entropy or z-loss, found ce_weight={self.ce_weight}, z_loss={self.z_loss}; "
                f"use tail='bucket' or temperature=1"
            )

    @property
    def kd_weight(self) -> float:
        """Return the weight of the distillation term, 1 - ce_weight."""
        return 1.0 - self.ce_weight

    @property
    def logit_scale(self) -> float:
        """Return what the logits are multiplied by before anything else: 1/T where T acts on the whole softmax."""
        return 1.0 / self.temperature if self.tail == "renormalize" else 1.0

    @property
    def effective_divergence(self) -> str:
        """Return the divergence with JSD's two ends resolved."""
        if self.divergence == "jsd" and self.jsd_beta in (0.0, 1.0):
            return "forward" if self.jsd_beta == 0.0 else "reverse"
        return self.divergence

    def for_rows(self, sampled: bool) -> Self:
        """Return these options with `auto` resolved for rows of a kind; ValueError for a tail of the other kind."""
        if self.tail == "auto":
            return replace(self, tail="sampled" if sampled else "bucket")
        if sampled != (self.tail == "sampled"):
            raise ValueError(
                f"tail={self.tail!r} does not go with sampled rows: their drawn entries are no top K; use tail='sampled', "
                "or rows.truncate (data.top_k) of at most the least number of exact entries"
                if sampled
                else "tail='sampled' needs the unbiased rows of a sampled cache, found top-K rows, which say nothing of "
                "what is outside the K; use tail='bucket', or make a cache with rows: {kind: sampled}"
            )
        return self

    def for_head(self, softcap: float | None) -> LossOptions:
        """Return the options of this objective on a head with that soft-cap."""
        return LossOptions(**{f.name: getattr(self, f.name) for f in fields(Objective)}, softcap=softcap)


@dataclass(frozen=True)
class LossOptions(Objective):
    """An objective, and the soft-cap of the student's head: `z = softcap * tanh(z / softcap)`, after the bias."""

    softcap: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range or a combination that is not in `Objective`'s table."""
        super().__post_init__()
        if self.softcap is not None and not 0.0 < self.softcap < float("inf"):
            raise ValueError(f"softcap must be positive and finite or None, found {self.softcap}")

    def to_scalars(self) -> tuple[Any, ...]:
        """Return the values in the order of SCALARS; `LossOptions(*scalars)` is the way back."""
        return tuple(getattr(self, name) for name in OPTION_NAMES)


OPTION_NAMES = tuple(f.name for f in fields(LossOptions))
# The options in the schema of a torch operator, which takes flat scalars only.
SCALARS = ", ".join(f"{'str' if isinstance(f.default, str) else 'float?'} {f.name}" for f in fields(LossOptions))
