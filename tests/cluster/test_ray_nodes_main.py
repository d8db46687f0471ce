"""What is said when a node does not come."""

from pathlib import Path

from cluster.ray_nodes_main import MONITOR_LINES, monitor_log


def test_the_end_of_the_autoscalers_logs_says_why_a_node_is_missing(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(100)]
    (tmp_path / "monitor.log").write_text("\n".join(lines))
    (tmp_path / "monitor.out").write_text("")
    (tmp_path / "monitor.err").write_text("ssh: connect to host 10.0.0.2: No route to host\n")

    said = monitor_log(tmp_path).splitlines()

    assert said[0] == f"The end of {tmp_path / 'monitor.log'}:"
    assert said[1 : MONITOR_LINES + 1] == lines[-MONITOR_LINES:]
    assert said[-1] == "ssh: connect to host 10.0.0.2: No route to host"


def test_without_a_log_that_is_said(tmp_path: Path) -> None:
    assert str(tmp_path) in monitor_log(tmp_path)
