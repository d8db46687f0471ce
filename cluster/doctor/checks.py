"""All checks in the order in which they are told, and the findings of a scene."""

from collections.abc import Iterable

from cluster.doctor import host_checks, network_checks, room_checks
from cluster.doctor.scene import Check, Finding, Scene

CHECKS: tuple[Check, ...] = (
    *room_checks.CHECKS,
    *host_checks.CHECKS,
    *network_checks.CHECKS,
)

_WORD = {"ok": "OK", "warn": "WARN", "fail": "FAIL"}


def examine(scene: Scene, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """What the checks say of a scene, in their order."""
    return [finding for check in checks for finding in check.findings(scene)]


def table(findings: Iterable[Finding]) -> str:
    """One line per finding: level, check, culprit, what was seen, what to do."""
    rows = list(findings)
    width = max((len(row.check) for row in rows), default=0)
    return "\n".join(_line(row, width) for row in rows)


def _line(finding: Finding, width: int) -> str:
    who = f"{finding.subject}: " if finding.subject else ""
    fix = f". Fix: {finding.fix}" if finding.fix else ""
    return f"{_WORD[finding.level]:<4}  {finding.check:<{width}}  {who}{finding.seen}{fix}"
