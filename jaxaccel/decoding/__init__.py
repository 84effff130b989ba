"""Turning a model's logits into tokens: sampling and generation over hybrid caches."""
