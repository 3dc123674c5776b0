"""All rules in one list: the same list validates, prints the support matrix and drives the tests."""

from __future__ import annotations

from shoal.config.build import Report
from shoal.config.errors import Finding
from shoal.config.facts import Facts
from shoal.config.llm import LLMConfig
from shoal.config.rules.base import Broken, Rule
from shoal.config.rules.dropout import DROPOUT_RULES
from shoal.config.rules.effect import EFFECT_RULES
from shoal.config.rules.families import FAMILY_RULES
from shoal.config.rules.llm import LLM_RULES
from shoal.config.rules.mesh import MESH_RULES
from shoal.config.rules.pending import PENDING_RULES
from shoal.config.rules.speech import SPEECH_RULES
from shoal.config.rules.trainer import TRAINER_RULES
from shoal.config.speech import SpeechConfig

RULES: tuple[Rule, ...] = (
    *MESH_RULES,
    *DROPOUT_RULES,
    *FAMILY_RULES,
    *TRAINER_RULES,
    *SPEECH_RULES,
    *EFFECT_RULES,
    *LLM_RULES,
    *PENDING_RULES,
)


def apply_rules(
    config: SpeechConfig | LLMConfig, facts: Facts, report: Report
) -> tuple[list[Finding], list[Finding]]:
    """Returns what the rules refuse and what they only note; rules over keys that failed are skipped."""
    refused: list[Finding] = []
    notices: list[Finding] = []
    for rule in RULES:
        if rule.applies_to(config) and not _blocked(rule, report.failed):
            (notices if rule.notice else refused).extend(rule.findings(config, facts))
    return refused, notices


def _blocked(rule: Rule, failed: set[str]) -> bool:
    return any(_overlap(key, path) for key in rule.keys for path in failed)


def _overlap(key: str, path: str) -> bool:
    return key == path or key.startswith(path + ".") or path.startswith(key + ".") or path == ""


def support_matrix() -> str:
    """Returns the rules as a markdown table: what is refused or noted, why, and what to do instead."""
    lines = ["| rule | recipe | kind | why | repair |", "| --- | --- | --- | --- | --- |"]
    seen: set[str] = set()
    for rule in RULES:
        if rule.id in seen:
            continue
        seen.add(rule.id)
        kind = "not yet" if rule.pending else "noted" if rule.notice else "refused"
        lines.append(f"| `{rule.id}` | {rule.recipe} | {kind} | {rule.why} | {rule.repair} |")
    return "\n".join(lines) + "\n"


__all__ = ["RULES", "Broken", "Facts", "Rule", "apply_rules", "support_matrix"]
