"""Counts as shares, with an interval that holds for few trials and for shares near 0 or 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z = 1.959963984540054  # of the normal distribution, two-sided 95%


@dataclass(frozen=True)
class Share:
    """`count` of `of` trials."""

    count: int
    of: int

    @property
    def rate(self) -> float:
        return self.count / self.of

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's score interval, 95% (Wilson 1927, JASA 22, 209-212)."""
        p, n = self.rate, self.of
        centre, scale = p + Z * Z / (2 * n), 1 + Z * Z / n
        half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)

    def to_dict(self) -> dict[str, float]:
        low, high = self.interval
        return {"rate": self.rate, "low": low, "high": high, "count": self.count, "of": self.of}
