"""Tests on several machines, which are namespaces of this one. Mark: `nodes`."""
