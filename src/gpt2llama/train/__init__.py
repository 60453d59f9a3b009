"""Training: one loop for all stages; it receives a model and batches, and knows nothing else."""
