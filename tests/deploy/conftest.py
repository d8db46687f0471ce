"""No setting of whoever runs the tests is mixed into those of deploy/."""

import pytest


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STOKER_CONFIG", "STOKER_API_KEY", "STOKER_MODELS_DIR", "STOKER_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
