"""Stoker against vLLM, llama.cpp and transformers, in turn on one machine: one file per peer."""
