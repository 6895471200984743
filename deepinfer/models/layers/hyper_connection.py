"""mHC residual streams with the lazy post-mix (spec: model, section 4).

A sub-layer's output is not mixed into the streams at once: it travels as `HCLazyPostData` to the next sub-layer, where
one kernel does the post-mix and the next pre-mix together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels import ops


@dataclass(frozen=True)
class HyperConnection:
    """Weights of the mixing in front of one sub-layer, with the norm of its input."""

    fn: Tensor  # [hc * (2 + hc), hc * D]
    base: Tensor  # [hc * (2 + hc)]
    scale: Tensor  # [3]
    norm: Tensor  # [D]


@dataclass(frozen=True)
class HCLazyPostData:
    """Streams h [N, hc, D] with a sub-layer output y [N, D] that is still to be mixed in (y None: nothing pending)."""

    h: Tensor
    y: Tensor | None = None
    post: Tensor | None = None  # [N, hc]
    comb: Tensor | None = None  # [N, hc source, hc destination]

    def materialize(self) -> Tensor:
        """The streams after the pending post-mix."""
        return self.h if self.y is None else ops.hc_post(self.h, self.y, self.post, self.comb)

    def rows(self, index: Tensor) -> HCLazyPostData:
        """Only some rows."""
        pending = (None if part is None else part[index] for part in (self.y, self.post, self.comb))
        return HCLazyPostData(self.h[index], *pending)

    def with_output(self, y: Tensor) -> HCLazyPostData:
        """The same streams and coefficients with the sub-layer's output."""
        return HCLazyPostData(self.h, y, self.post, self.comb)


def hc_enter(
    lazy: HCLazyPostData, p_prev: Tensor, weights: HyperConnection, config: ModelConfig
) -> tuple[Tensor, Tensor, HCLazyPostData]:
    """Finish the pending post-mix and enter the next sub-layer.

    Returns the sub-layer's normed input x [N, D], its `pre` [N, hc] for the sub-layer after it, and the streams that
    wait for its output (`with_output`).
    """
    constants = (config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
    coefficients = (weights.fn, weights.scale, weights.base, weights.norm)
    if lazy.y is None:
        h = lazy.h
        x, pre, post, comb = ops.hc_pre(h, p_prev, *coefficients, *constants)
    else:
        h, x, pre, post, comb = ops.hc_post_pre(lazy.h, lazy.y, lazy.post, lazy.comb, p_prev, *coefficients, *constants)
    return x, pre, HCLazyPostData(h, None, post, comb)
