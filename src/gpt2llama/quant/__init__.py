"""Weights in 8 or 4 bits: what a quantised model is, and how one is made."""
