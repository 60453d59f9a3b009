"""Published claims about GPT and Llama, each decided by arithmetic, computation or training.

A check imports torch only if it needs it, so that the arithmetic ones answer at once.
"""

from __future__ import annotations

from . import attention, hardware, mlp, norms, positions, published, trained, vocabulary
from .claim import IN_CHINESE, Claim, Finding, Verdict

_MODULES = (norms, positions, attention, mlp, vocabulary, hardware, published)
_CHECKED = [value for m in _MODULES for value in vars(m).values() if isinstance(value, Claim)]
CLAIMS = tuple(sorted([*_CHECKED, *trained.CLAIMS], key=lambda claim: claim.number))

__all__ = ["CLAIMS", "IN_CHINESE", "Claim", "Finding", "Verdict"]
