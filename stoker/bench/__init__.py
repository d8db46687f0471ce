"""Measuring: servers that speak OpenAI's dialect, and models without one."""
