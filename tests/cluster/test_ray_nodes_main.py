"""What is said when a node does not come."""

from pathlib import Path

from cluster.ray_nodes_main import MONITOR_LINES, monitor_log


def test_case_114_the_autoscalers_logs_say_why_a_node_is_missing(tmp_path: Path) -> None:
    routine = "2026-11-30 22:44:53,344\tVINFO runner.py:399 -- Running `uptime`\n"
    told = [f"line {number} of pip" for number in range(100)]
    failed = "2026-11-30 22:44:54,000\tERR updater.py:177 -- New status: update-failed\n"
    (tmp_path / "monitor.log").write_text("======== Autoscaler status: 22:45:27 ========\n" * 50)
    (tmp_path / "monitor.out").write_text("\n".join([routine, *told, failed]) + routine)
    (tmp_path / "monitor.err").write_text(
        "ssh: connect to host 10.0.0.2: No route to host\nShared connection to 10.0.0.3 closed.\n"
    )

    said = monitor_log(tmp_path).splitlines()

    assert said == [
        f"The end of {tmp_path / 'monitor.out'}:",
        "Running `uptime`",
        *told[-MONITOR_LINES + 1 :],
        "New status: update-failed",
        f"The end of {tmp_path / 'monitor.err'}:",
        "ssh: connect to host 10.0.0.2: No route to host",
    ]


def test_without_anything_unusual_that_is_said(tmp_path: Path) -> None:
    assert str(tmp_path) in monitor_log(tmp_path)
