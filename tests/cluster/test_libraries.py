"""A start without a library that workers need ends with its name, before anything is started."""

import pytest

from cluster.config import config_from
from cluster.libraries import check_libraries, libraries_of
from scheduler.errors import ConfigError


def test_workers_need_torch_and_actors_need_ray() -> None:
    assert libraries_of(config_from({"backend": "local"})) == ("torch",)
    assert libraries_of(config_from({"backend": "ray"})) == ("torch", "ray")
    check_libraries(("torch", "ray"))


def test_a_library_that_is_not_installed_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"^torsh cannot be imported by .*pip install torsh$"):
        check_libraries(("msgspec", "torsh"))
