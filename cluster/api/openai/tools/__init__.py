"""Tool calls: how a model writes them, and how they are read, shown and forced."""
