"""The model: one Transformer, one config. Imports nothing else of ours but `errors`."""
