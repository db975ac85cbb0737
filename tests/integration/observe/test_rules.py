"""Lets Prometheus' own promtool check the alert rules. The rules must be valid, and each alert must
fire exactly when it should.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from tests.support.observe.prometheus import program

FOLDER = Path(__file__).parents[3] / "deploy/observe/prometheus"


def promtool(*arguments: str) -> str:
    command = [str(program("promtool")), *arguments]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "rules", "rules.yml")


def test_the_scrape_configuration_is_valid() -> None:
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")


def test_each_alert_fires_when_it_should_and_not_otherwise() -> None:
    promtool("test", "rules", "rules_test.yml")


def test_no_alert_is_without_a_test_of_either_kind() -> None:
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())
    alerts = {r["alert"] for group in rules["groups"] for r in group["rules"] if "alert" in r}
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    tested = [each for test in tests for each in test["alert_rule_test"]]
    assert {each["alertname"] for each in tested if each["exp_alerts"]} == alerts
    assert {each["alertname"] for each in tested if not each["exp_alerts"]} == alerts
