"""Counts KV blocks: which are idle, which are held, and which hold a prefix worth reusing."""
