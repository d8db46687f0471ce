"""Computes one shard of the model: weights, K/V tensors, kernels and sampling."""
