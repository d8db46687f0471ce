from cluster.engine_recovery import EngineRecovery
from cluster.restarts import RestartLimits, Restarts

LIMITS = RestartLimits(max_restarts=4, second_pause_s=0.5, longest_pause_s=1.0, stable_s=60.0)


def test_the_first_restart_comes_at_once_the_pauses_grow_and_then_it_is_over() -> None:
    restarts = Restarts(LIMITS)
    restarts.began(0.0)
    pauses = []
    for now in range(5):
        pauses.append(restarts.pause_s(float(now)))
        restarts.began(float(now))
    assert pauses == [0.0, 0.5, 1.0, 1.0, None]


def test_service_makes_earlier_ends_forgotten() -> None:
    restarts = Restarts(LIMITS)
    restarts.began(0.0)
    for _ in range(4):
        restarts.pause_s(1.0)
        restarts.began(1.0)
    assert restarts.pause_s(61.0) == 0.0


def test_without_restarts_there_is_none_however_long_it_served() -> None:
    restarts = Restarts(RestartLimits(max_restarts=0))
    restarts.began(0.0)
    assert restarts.pause_s(1e6) is None


def test_the_phases_of_a_recovery_add_up_to_it() -> None:
    recovery = EngineRecovery("killed", 2, ended=10.0, begins=10.5)
    recovery.listens(11.5)
    assert recovery.serves(12.0) == {
        "reason": "killed",
        "restarts": 2,
        "paused_s": 0.5,
        "started_s": 1.0,
        "taken_over_s": 0.5,
        "seconds": 2.0,
    }
