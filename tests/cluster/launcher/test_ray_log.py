"""Logs of Ray's launcher, as Ray 2.60 writes it."""

from cluster.launcher.ray_log import last_failure, last_words

STAMP = "2026-12-01 00:02:13,187\t"
FAILED = f"""\
{STAMP}VINFO command_runner.py:399 -- Running `uptime`
 00:02:11 up  1:48,  0 user,  load average: 12.87, 15.68, 21.02
{STAMP}SUCC updater.py:301 -- Success.
{STAMP}INFO updater.py:469 -- [6/7] Running setup commands
{STAMP}VINFO command_runner.py:399 -- Running `pip install ~/.stoker/source`
{STAMP}VVINFO command_runner.py:401 -- Full command is `ssh -tt 'pip install ~/.stoker/source'`
  \x1b[1;31merror\x1b[0m: \x1b[1msubprocess-exited-with-error\x1b[0m

      ERROR: No matching distribution found for setuptools>=77
Shared connection to 10.0.0.1 closed.
{STAMP}ERR updater.py:177 -- New status: update-failed
{STAMP}ERR updater.py:179 -- !!!
{STAMP}ERR updater.py:191 -- Full traceback: Traceback (most recent call last):
  File "updater.py", line 172, in run
    self.do_update()
click.exceptions.ClickException: SSH command failed.

{STAMP}ERR updater.py:193 -- Error message: SSH command failed.
{STAMP}PANIC commands.py:925 -- Failed to setup head node.
"""


def test_the_error_of_ray_up_is_the_command_that_failed_and_what_it_said() -> None:
    assert last_words(FAILED, 25).splitlines() == [
        "Running `pip install ~/.stoker/source`",
        "  error: subprocess-exited-with-error",
        "      ERROR: No matching distribution found for setuptools>=77",
        "Shared connection to 10.0.0.1 closed.",
        "New status: update-failed",
        "Error message: SSH command failed.",
        "Failed to setup head node.",
    ]


def test_a_command_that_says_much_is_shown_with_the_end_of_it() -> None:
    said = "\n".join(f"line {number}" for number in range(100))
    log = f"{STAMP}VINFO command_runner.py:399 -- Running `make`\n{said}\n"

    assert last_words(log, 2) == "Running `make`\nline 98\nline 99"


def test_a_log_without_a_command_is_shown_as_it_is() -> None:
    assert last_words("ray: not found\n", 25) == "ray: not found"
    assert last_words("", 25) == ""


def test_the_last_failure_is_told_though_ray_has_begun_anew() -> None:
    again = f"{STAMP}VINFO command_runner.py:399 -- Running `uptime`\n"

    assert last_failure(FAILED + again, 25).splitlines() == [
        "Running `pip install ~/.stoker/source`",
        "  error: subprocess-exited-with-error",
        "      ERROR: No matching distribution found for setuptools>=77",
        "Shared connection to 10.0.0.1 closed.",
        "New status: update-failed",
    ]
    assert last_failure(again, 25) == "Running `uptime`"
