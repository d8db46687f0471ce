"""Why a measurement could not be made; each message says what to change."""


class BenchError(Exception):
    """Nothing was measured, or nothing that could be used."""
