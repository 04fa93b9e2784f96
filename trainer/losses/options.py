"""What a loss is made of, and which combinations are accepted."""

from __future__ import annotations

from dataclasses import dataclass

TAILS = ("bucket", "none", "renormalize")
DIVERGENCES = ("forward", "reverse", "jsd")
METHODS = ("fused", "forward_chunked", "dense")


@dataclass(frozen=True)
class LossOptions:
    """One row's loss, `(1 - ce_weight) * KD + ce_weight * CE + z_loss * logsumexp(z)^2`.

    | tail        | divergence            | temperature | cross-entropy, z-loss |
    |-------------|-----------------------|-------------|-----------------------|
    | bucket      | forward, reverse, jsd | any > 0     | yes                   |
    | none        | forward               | 1           | yes                   |
    | renormalize | forward               | 1           | yes                   |
    | renormalize | forward               | any > 0     | no                    |

    Soft-cap, bias, vocabulary mask and invalid rows go with every line. All else raises ValueError.
    """

    tail: str = "bucket"
    divergence: str = "forward"
    jsd_beta: float = 0.5
    temperature: float = 1.0
    ce_weight: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            raise ValueError(f"tail must be one of {', '.join(TAILS)}, found {self.tail!r}")
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
        if self.softcap is not None and not 0.0 < self.softcap < float("inf"):
            raise ValueError(f"softcap must be positive and finite or None, found {self.softcap}")
        if self.divergence != "forward" and self.tail != "bucket":
            raise ValueError(
                f"divergence={self.divergence!r} needs tail='bucket' (on a sub-mass it has no useful minimum), "
                f"found tail={self.tail!r}"
            )
        if self.tail == "none" and self.temperature != 1.0:
            raise ValueError(
                f"tail='none' is defined at temperature 1 only, found {self.temperature}; use tail='bucket'"
            )
        if self.tail == "renormalize" and self.temperature != 1.0 and (self.ce_weight or self.z_loss):
            raise ValueError(
                f"tail='renormalize' at temperature {self.temperature} tempers the whole softmax and cannot be mixed "
                f"with cross-entropy or z-loss, found ce_weight={self.ce_weight}, z_loss={self.z_loss}; "
                f"use tail='bucket' or temperature=1"
            )

    @property
    def kd_weight(self) -> float:
        return 1.0 - self.ce_weight

    @property
    def logit_scale(self) -> float:
        """What the logits are multiplied by before anything else: 1/T where T acts on the whole softmax."""
        return 1.0 / self.temperature if self.tail == "renormalize" else 1.0

    @property
    def effective_divergence(self) -> str:
        """The divergence with JSD's two ends resolved."""
        if self.divergence == "jsd" and self.jsd_beta in (0.0, 1.0):
            return "forward" if self.jsd_beta == 0.0 else "reverse"
        return self.divergence
