"""OpenAI's dialect: bodies, answers and streams of its routes, with vLLM's extra fields."""
