"""Connects the parts: processes, sockets, configuration, models on disk, and lifecycle."""
