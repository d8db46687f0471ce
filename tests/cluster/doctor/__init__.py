"""Tests of cluster.doctor."""
