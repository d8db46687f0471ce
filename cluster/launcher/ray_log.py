"""What went wrong, out of a log of Ray's launcher: its last command on a node, and what that said.

The rest is left out: each step that Ray takes, Python's traces of Ray, and colours.
"""

import re

RAYS_OWN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s+(?P<level>[A-Z]+) \S+ -- (?P<text>.*)")
COMMAND = "Running `"
FAILED = "New status: update-failed"
ERRORS = ("ERR", "PANIC")
TRACE = "Full traceback"
RULER = "!!!"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def last_words(log: str, max_lines: int) -> str:
    """The last command, then the end of what came after it, `max_lines` lines at most."""
    command, said = "", list[str]()
    in_trace = False
    for line in COLOUR.sub("", log).splitlines():
        own = RAYS_OWN.fullmatch(line)
        if own is None:
            if line.strip() and not in_trace:
                said.append(line)
            continue
        text = own["text"]
        in_trace = text.startswith(TRACE)
        if text.startswith(COMMAND):
            command, said = text, []
        elif own["level"] in ERRORS and text != RULER and not in_trace:
            said.append(text)
    return "\n".join([command, *said[-max_lines:]]).strip()


def last_failure(log: str, max_lines: int) -> str:
    """The last command that failed, though Ray has begun anew; if none did, the last one."""
    before, failed, after = log.rpartition(FAILED)
    return last_words(before + failed if failed else after, max_lines)
