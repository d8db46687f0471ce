"""How far attention looks back, as one number per layer. Needs no torch, so that planning can."""

NO_WINDOW = 0
"""As a `window` in tokens: every earlier token is visible."""
