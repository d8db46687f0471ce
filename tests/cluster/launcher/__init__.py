"""Tests of the launcher that need no machines."""
