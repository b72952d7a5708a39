"""Alerts: each has a runbook and a rule test that shows it firing and silent, and asks only for metrics that exist."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

import chessboard.app
import crm.app
from chessboard.settings import ChessboardSettings
from crm.settings import CrmSettings

SERVICES = ((CrmSettings, crm.app.build), (ChessboardSettings, chessboard.app.build))
ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
TESTS = ROOT / "deploy/prometheus/tests"
ABSENT = "promtool is missing (Debian package prometheus)"
ELSEWHERE = frozenset({"up"})
"""Metrics of Prometheus itself."""

METRIC = re.compile(r"\b(?:pin|crm|chessboard)_[a-z_]+|\bup\b")


def alerts(text: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"] if "alert" in rule]


ALERTS = alerts(RULES.read_text())


def incomplete(alert: dict[str, Any], root: Path) -> list[str]:
    """Return one sentence per thing that an alert lacks."""
    name = alert["alert"]
    runbook = alert.get("annotations", {}).get("runbook_url", "")
    test = root / "deploy/prometheus/tests" / f"{Path(runbook).stem}.yml"
    found = []
    if not runbook.startswith("deploy/runbooks/") or not (root / runbook).is_file():
        found.append(f"{name}: no runbook {runbook!r}")
    elif any(
        part not in (root / runbook).read_text() for part in ("## What to look at", "```sh", "## When to escalate")
    ):
        found.append(f"{name}: the runbook lacks commands or an escalation")
    if alert.get("labels", {}).get("severity") not in ("critical", "warning"):
        found.append(f"{name}: no severity")
    if not test.is_file():
        return [*found, f"{name}: no rule test"]
    cases = [case for test in yaml.safe_load(test.read_text())["tests"] for case in test["alert_rule_test"]]
    outcomes = {bool(case["exp_alerts"]) for case in cases if case["alertname"] == name}
    return found if outcomes == {True, False} else [*found, f"{name}: not shown both firing and silent"]


def unknown_metrics(alert: dict[str, Any], known: frozenset[str]) -> set[str]:
    """Return the metrics of an alert's expression that nobody exports."""
    expression = re.sub(r'"[^"]*"', "", alert["expr"])
    return set(METRIC.findall(expression)) - known


def exported() -> frozenset[str]:
    """Return the sample names in the registries of each service's process with all roles."""
    address = "postgresql://crm@127.0.0.1:1/none"
    values = {
        "env": "development",
        "database_url": address,
        "api_database_url": address,
        "migrate_database_url": address,
        "kafka_bootstrap": "127.0.0.1:1",
        "kafka_security": "plaintext",
    }
    registries: list[CollectorRegistry] = []
    original = CollectorRegistry.__init__

    def noted(self: CollectorRegistry, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        registries.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CollectorRegistry, "__init__", noted)
        for settings, build in SERVICES:
            build(settings(**values), frozenset({"api", "consumers", "relay", "jobs"}))
    names: set[str] = set()
    for registry in registries:
        for family in registry.collect():
            names |= {family.name, f"{family.name}_total" if family.type == "counter" else family.name}
            names |= {f"{family.name}_{part}" for part in ("bucket", "count", "sum") if family.type == "histogram"}
    return frozenset(names)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_has_a_runbook_and_is_shown_firing_and_silent(alert: dict[str, Any]) -> None:
    assert incomplete(alert, ROOT) == []


def test_every_runbook_and_rule_test_belongs_to_an_alert() -> None:
    stems = {Path(alert["annotations"]["runbook_url"]).stem for alert in ALERTS}
    assert len(stems) == len(ALERTS) >= 20
    assert {path.stem for path in (ROOT / "deploy/runbooks").glob("*.md")} - {"README"} == stems
    assert {path.stem for path in TESTS.glob("*.yml")} == stems


def test_alerts_ask_for_metrics_that_exist() -> None:
    known = exported() | ELSEWHERE
    assert {"pin_audit_sealed_total", "crm_timeline_overdue_misfires_total"} <= known
    assert {alert["alert"]: unknown for alert in ALERTS if (unknown := unknown_metrics(alert, known))} == {}


def unwatched(jobs: frozenset[str], rules: list[dict[str, Any]]) -> set[str]:
    """Return alert and prefix of each job that an alert about jobs passes over."""
    return {
        f"{rule['alert']} {job}"
        for rule in rules
        if rule["alert"] in ("JobFailing", "JobNotRunning", "JobPaused", "JobMisfired")
        for job in jobs
        if f"{job}_" not in rule["expr"]
    }


def test_every_job_is_watched_by_every_alert_about_jobs() -> None:
    jobs = frozenset(name.removesuffix("_run_total") for name in exported() if name.endswith("_run_total"))
    assert len(jobs) >= 3
    assert unwatched(jobs, ALERTS) == set()
    assert unwatched(frozenset({"crm_new"}), ALERTS[:8]) != set()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"annotations": {}}, "no runbook ''"),
        ({"annotations": {"runbook_url": "deploy/runbooks/none.md"}}, "no runbook 'deploy/runbooks/none.md'"),
        ({"labels": {}}, "no severity"),
        ({"alert": "Renamed"}, "not shown both firing and silent"),
    ],
)
def test_an_incomplete_alert_is_refused(change: dict[str, Any], said: str) -> None:
    assert any(said in sentence for sentence in incomplete({**ALERTS[0], **change}, ROOT))


def test_a_metric_that_nobody_exports_is_refused() -> None:
    alert = {"expr": 'sum(rate(pin_outbox_publishd_total{reason="pin_text"}[5m])) > 0'}
    assert unknown_metrics(alert, frozenset({"pin_outbox_published_total"})) == {"pin_outbox_publishd_total"}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip(ABSENT)
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=False, timeout=120)


def test_rules_are_understood_by_prometheus() -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.req("OPS-154")
def test_every_alert_fires_and_stays_silent_as_its_rule_test_says() -> None:
    done = promtool("test", "rules", *map(str, sorted(TESTS.glob("*.yml"))))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_that_never_fires_fails_its_rule_test(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "alerts.yml").write_text(RULES.read_text().replace("pin_outbox_oldest_age_seconds) > 120", "up) > 120"))
    shutil.copy(TESTS / "outbox-stuck.yml", tmp_path / "tests")
    assert promtool("test", "rules", str(tmp_path / "tests/outbox-stuck.yml")).returncode != 0
