"""Other weights while a cluster serves: group by group, and back again if they cannot be loaded."""

import itertools
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.errors import ModelError
from cluster.group_instructions import Lose, Retire, Start
from cluster.groups import RestartPolicy, WorkerGroup
from cluster.messages.changes import ModelReloaded, ReloadModel
from cluster.messages.supervisor import GroupStopped, RetireGroup, StartGroup, UseModel
from cluster.messages.workers import RankCapacity, WorkerHello
from cluster.reload import Order, Reload, UseWeights
from cluster.served_model import Checkpoints, read_served_model
from tests.cluster.cluster_rig import Rig, TestClient, group_of, wait_for_status
from tests.cluster.scripted import Script, tokens_after

OLD, NEW = Path("/old"), Path("/new")


def make_group(number: int, max_restarts: int = 0) -> WorkerGroup:
    policy = RestartPolicy(max_restarts=max_restarts)
    return WorkerGroup(number, 1, start_timeout_s=60.0, policy=policy, now=0.0)


def bring_up(group: WorkerGroup) -> None:
    capacity = RankCapacity(num_blocks=10, block_bytes=1, vocab_size=9, max_model_len=64)
    hello = WorkerHello(
        protocol=1,
        engine_id="e",
        key="k",
        group=group.group,
        epoch=group.epoch,
        rank=0,
        capacity=capacity,
    )
    group.hello(b"w", hello, now=0.0)
    group.ready(b"w", now=0.0)
    assert group.state == "ready"


def make_reload(num_groups: int, max_restarts: int = 0) -> tuple[Reload, list[WorkerGroup]]:
    groups = [make_group(number, max_restarts) for number in range(num_groups)]
    for group in groups:
        bring_up(group)
    return Reload(dict(enumerate(groups)), OLD), groups


def fail(group: WorkerGroup, reload: Reload, message: str = "no such tensor") -> Sequence[Order]:
    (lost,) = group.failed(group.epoch, 0, message, now=1.0)
    assert isinstance(lost, Lose)
    return [lost, *reload.lost(lost)]


def test_groups_go_and_come_back_one_after_the_other() -> None:
    reload, (first, second) = make_reload(2)

    assert reload.begin(NEW, now=1.0) == [UseWeights(NEW), Retire(0, 1, comes_back=True)]
    assert reload.keep_time(now=1.5) == []
    assert first.stopped(1, now=2.0) == [Start(0, 2)]
    assert reload.keep_time(now=2.0) == []
    bring_up(first)
    assert reload.keep_time(now=3.0) == [Retire(1, 1, comes_back=True)]
    assert (reload.num_done, reload.num_groups, reload.is_running) == (1, 2, True)
    assert second.stopped(1, now=4.0) == [Start(1, 2)]
    bring_up(second)
    assert reload.keep_time(now=5.0) == []
    assert (reload.num_done, reload.is_running, reload.model_dir) == (2, False, NEW)


def test_an_only_group_has_hope_all_the_way() -> None:
    reload, (only,) = make_reload(1)
    reload.begin(NEW, now=1.0)

    assert only.has_hope
    only.stopped(1, now=2.0)
    assert only.has_hope


def test_no_group_goes_while_the_one_that_could_take_over_is_coming() -> None:
    reload, (first, second) = make_reload(2, max_restarts=3)
    second.failed(1, 0, "boom", now=0.5)

    assert reload.begin(NEW, now=1.0) == [UseWeights(NEW)]
    second.stopped(1, now=1.0)
    assert reload.keep_time(now=1.5) == []
    assert second.tick(3.0) == [Start(1, 2)]
    bring_up(second)
    assert reload.keep_time(now=4.0) == [Retire(0, 1, comes_back=True)]
    assert first.state == "retiring"


def test_weights_that_cannot_be_loaded_are_taken_back_before_the_next_start() -> None:
    reload, (first, second) = make_reload(2)
    reload.begin(NEW, now=1.0)
    first.stopped(1, now=2.0)

    lost, *orders = fail(first, reload)
    assert isinstance(lost, Lose)
    assert lost.restarts
    assert orders == [UseWeights(OLD)]
    assert first.stopped(2, now=3.0) == [Start(0, 3)]
    bring_up(first)
    assert reload.keep_time(now=4.0) == []
    assert not reload.is_running
    assert "no such tensor" in reload.failure
    assert second.epoch == 1


def test_groups_that_have_the_new_weights_go_back_too() -> None:
    reload, (first, second) = make_reload(2)
    reload.begin(NEW, now=1.0)
    first.stopped(1, now=2.0)
    bring_up(first)
    reload.keep_time(now=3.0)
    second.stopped(1, now=3.0)
    assert fail(second, reload)[1:] == [UseWeights(OLD)]
    assert second.stopped(2, now=4.0) == [Start(1, 3)]
    bring_up(second)

    assert reload.keep_time(now=5.0) == [Retire(0, 2, comes_back=True)]
    assert first.stopped(2, now=6.0) == [Start(0, 3)]
    bring_up(first)
    assert reload.keep_time(now=7.0) == []
    assert not reload.is_running


def test_a_group_that_also_fails_with_the_old_weights_ends_as_its_policy_says() -> None:
    reload, (only,) = make_reload(1)
    reload.begin(NEW, now=1.0)
    only.stopped(1, now=2.0)
    fail(only, reload)
    only.stopped(2, now=3.0)
    lost, *orders = fail(only, reload, "disk is gone")

    assert isinstance(lost, Lose)
    assert not lost.restarts
    assert orders == []
    assert only.stopped(3, now=4.0) == []
    assert only.state == "stopped"
    assert reload.keep_time(now=5.0) == []
    assert not reload.is_running


def test_a_group_that_leaves_for_another_reason_meanwhile_is_passed_over() -> None:
    reload, (first, _) = make_reload(2)
    reload.begin(NEW, now=1.0)
    first.drain(0.0, now=1.5)
    assert first.stopped(1, now=2.0) == []

    assert first.state == "retired"
    assert reload.keep_time(now=3.0) == [Retire(1, 1, comes_back=True)]


def test_every_order_of_events_comes_to_an_end_with_one_kind_of_weights() -> None:
    """Two groups; a start may come up, fail, or take long; a serving group may die at any time."""
    for choices in itertools.product("rfdw", repeat=5):
        reload, groups = make_reload(2, max_restarts=9)
        reload.begin(NEW, now=0.0)
        now, weights = 0.0, {0: OLD, 1: OLD}
        pending = iter(choices)
        for _ in range(60):
            now += 40.0
            for group in groups:
                number = group.group
                orders: list[object] = [*group.tick(now)]
                if group.state in ("lost", "retiring"):
                    orders += group.stopped(group.epoch, now)
                elif group.state == "starting":
                    choice = next(pending, "r")
                    if choice == "f" and reload.model_dir == NEW:
                        fail(group, reload)
                    elif choice != "w":
                        bring_up(group)
                elif group.state == "ready" and next(pending, "r") == "d":
                    fail(group, reload, "died")
                if any(isinstance(order, Start) for order in orders):
                    weights[number] = reload.model_dir
            reload.keep_time(now)
        assert not reload.is_running, choices
        assert all(group.state == "ready" for group in groups), choices
        assert set(weights.values()) == {reload.model_dir}, choices


def ask(client: TestClient, model: str = "", *, only_asks: bool = False) -> ModelReloaded:
    client.send(ReloadModel(model=model, only_asks=only_asks))
    return client.next_of(ModelReloaded)


SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def save_checkpoint(folder: Path, **changes: object) -> Path:
    """One of no tensors, which nobody here loads."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | changes))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and one of the same shape."""
    root = tmp_path_factory.mktemp("checkpoints")
    return save_checkpoint(root / "one"), save_checkpoint(root / "other")


def checkpoints_of(folder: Path) -> Checkpoints:
    return Checkpoints(read_served_model(folder), folder.parent, "")


def test_a_checkpoint_of_another_shape_is_refused_with_what_differs(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = folders
    deeper = save_checkpoint(tmp_path / "deeper", num_hidden_layers=3)
    talkative = save_checkpoint(tmp_path / "talkative", eos_token_id=[2, 3])

    assert checkpoints_of(old).find("other", old).model_dir == new.resolve()
    with pytest.raises(ModelError, match="num_layers is 3, not 2"):
        checkpoints_of(old).find(str(deeper), old)
    with pytest.raises(ModelError, match=r"end tokens are \(2, 3\), not \(2,\)"):
        checkpoints_of(old).find(str(talkative), old)
    with pytest.raises(ModelError, match="no checkpoint in a folder nowhere"):
        checkpoints_of(old).find("nowhere", old)


def test_streams_are_whole_while_all_groups_are_reloaded_under_load(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = folders
    with Rig(tmp_path, num_groups=2, checkpoints=checkpoints_of(old), model_dir=old) as rig:
        supervisor = rig.supervisor()
        for group in (0, 1):
            rig.start_worker(Script(step_s=0.002), group=group)
        client, boss = rig.client(), rig.client()
        wait_for_status(boss, lambda status: all(g.state == "ready" for g in status.groups))
        handles = [client.submit(max_tokens=150) for _ in range(8)]
        client.read_until(lambda: client.tokens.keys() >= {*handles})

        assert ask(boss, "other").num_groups == 2
        assert supervisor.next_of(UseModel) == UseModel(str(new.resolve()))
        assert "ask again when all have" in ask(boss, "other").refusal
        for group in (0, 1):
            assert supervisor.next_of(RetireGroup) == RetireGroup(group, 1, comes_back=True)
            supervisor.send(GroupStopped(group, 1))
            assert supervisor.next_of(StartGroup) == StartGroup(group, 2)
            handles += [client.submit(max_tokens=20) for _ in range(2)]
            rig.start_worker(Script(step_s=0.002), group=group, epoch=2)
            wait_for_status(
                boss, lambda status, number=group: group_of(status, number).state == "ready"
            )
        client.finish(*handles)
        done = ask(boss, only_asks=True)

    assert (done.num_done, done.is_running, done.failure) == (2, False, "")
    for at, handle in enumerate(handles):
        assert client.tokens[handle] == tokens_after(4, 150 if at < 8 else 20)


def test_with_one_group_requests_wait_until_it_is_back(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    old, _ = folders
    with Rig(tmp_path, checkpoints=checkpoints_of(old), model_dir=old) as rig:
        supervisor = rig.supervisor()
        rig.start_worker(Script(step_s=0.01))
        client, boss = rig.client(), rig.client()
        running = client.submit(max_tokens=60)
        client.read_until(lambda: running in client.tokens)
        ask(boss)
        waiting = client.submit(max_tokens=5)
        assert boss.status().state != "failed"
        supervisor.next_of(RetireGroup)
        supervisor.send(GroupStopped(0, 1))
        assert supervisor.next_of(StartGroup) == StartGroup(0, 2)
        rig.start_worker(group=0, epoch=2)
        client.finish(running, waiting)

    assert client.rejections == {}
    assert client.tokens == {running: tokens_after(4, 60), waiting: tokens_after(4, 5)}
