"""Brings a cluster up on machines that are reached by ssh, from one short file, and ends it."""
