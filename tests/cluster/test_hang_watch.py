from cluster.hang_watch import LOOKS, HangWatch


def test_one_that_answers_is_asked_for_ever() -> None:
    watch = HangWatch(limit_s=8.0)
    watch.begin(0.0)
    for number in range(1, 20):
        assert watch.next_look == 2.0 * number
        assert watch.look(2.0 * number) == "ask"
        watch.answered()


def test_silence_hangs_after_the_limit_and_is_said_once() -> None:
    watch = HangWatch(limit_s=8.0)
    watch.begin(0.0)
    asked = [watch.look(2.0 * number) for number in range(1, LOOKS + 1)]
    assert asked == ["ask"] * LOOKS
    assert watch.look(9.9) is None
    assert watch.look(10.0) == "hangs"
    assert watch.next_look is None
    assert watch.look(99.0) is None


def test_a_late_answer_is_an_answer() -> None:
    watch = HangWatch(limit_s=8.0)
    watch.begin(0.0)
    for number in range(1, LOOKS + 1):
        watch.look(2.0 * number)
    watch.answered()
    assert watch.look(10.0) == "ask"


def test_who_was_stopped_itself_blames_nobody() -> None:
    watch = HangWatch(limit_s=8.0)
    watch.begin(0.0)
    assert watch.look(2.0) == "ask"
    assert watch.look(3600.0) == "ask"
    assert watch.next_look == 3602.0


def test_without_a_limit_nobody_is_asked_and_after_its_end_no_one() -> None:
    watch = HangWatch(limit_s=0.0)
    watch.begin(0.0)
    assert watch.next_look is None
    watch = HangWatch(limit_s=8.0)
    watch.begin(0.0)
    watch.end()
    assert watch.look(99.0) is None
