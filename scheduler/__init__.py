"""Decides which tokens each worker group computes next; sees no clock, socket or tensor."""
