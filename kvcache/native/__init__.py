"""The native part: keys of blocks."""
