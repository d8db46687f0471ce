"""The model families we run, each read from its `config.json`."""
