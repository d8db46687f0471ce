"""New processes for a cluster that serves: in their order, and with no stream the worse for it."""

from cluster.upgrade import Upgrade


def begun() -> Upgrade:
    upgrade = Upgrade(protocol=7)
    assert upgrade.begin() == ["prepare"]
    return upgrade


def test_the_core_is_replaced_first_then_the_groups_then_the_servers() -> None:
    upgrade = begun()
    assert upgrade.stands(7, "2.0") == ["hand_over"]
    assert upgrade.hands_over
    upgrade.engine_ended()
    assert upgrade.serves() == ["renew"]
    assert upgrade.renewed("") == ["replace_servers"]
    upgrade.replaced()
    assert (upgrade.is_running, upgrade.failure) == (False, "")


def test_a_core_of_another_protocol_leaves_everything_as_it_is() -> None:
    upgrade = begun()

    assert upgrade.stands(8, "3.0") == []
    assert not upgrade.is_running
    assert upgrade.failure.startswith("version 3.0 speaks protocol 8, what runs speaks 7")


def test_one_runs_at_a_time() -> None:
    assert begun().begin() == []


def test_a_core_that_dies_while_groups_come_back_has_them_come_back_again() -> None:
    upgrade = begun()
    upgrade.stands(7, "2.0")
    upgrade.engine_ended()
    upgrade.serves()
    upgrade.engine_ended()

    assert not upgrade.hands_over
    assert upgrade.serves() == ["renew"]


def test_a_group_that_cannot_come_back_ends_it_and_says_why() -> None:
    upgrade = begun()
    upgrade.stands(7, "2.0")
    upgrade.engine_ended()
    upgrade.serves()

    assert upgrade.renewed("group 1: no such module") == []
    assert (upgrade.is_running, upgrade.failure) == (False, "group 1: no such module")


def test_news_out_of_their_time_change_nothing() -> None:
    upgrade = Upgrade(protocol=7)
    upgrade.engine_ended()
    upgrade.replaced("x")

    assert upgrade.stands(7, "2.0") == upgrade.serves() == upgrade.renewed("x") == []
    assert (upgrade.phase, upgrade.failure) == ("idle", "")
    assert upgrade.begin() == ["prepare"]
    assert upgrade.serves() == upgrade.renewed("") == []
    assert upgrade.phase == "prepare"
