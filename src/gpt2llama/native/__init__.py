"""The CPU decode kernel: C source, its build on first use, and what binds it to a model."""

from .binding import NativeDecoder, decoder, read_bandwidth

__all__ = ["NativeDecoder", "decoder", "read_bandwidth"]
