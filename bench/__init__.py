"""Measuring: each module is a command, `python -m bench.NAME`; the product imports none."""
