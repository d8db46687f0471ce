"""A cluster under load and under faults: what its streams say, against what they should."""
