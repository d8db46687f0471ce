"""HTTP: the OpenAI routes and those around them, over one connection to the engine."""
