"""Breaking a test cluster on purpose: what to break, and how it comes back."""
