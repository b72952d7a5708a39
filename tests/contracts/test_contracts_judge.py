"""How the foreign parser is brought and asked; npm and node are stand-ins, the real ones run in `make contracts`."""

import json
import os
import stat
from pathlib import Path

import pytest
from contract_checks import ROOT

from devstack import apache, judge

NPM = """#!/bin/sh
echo "$@" >> "{calls}"
[ -z "$FAKE_NPM" ] && exit 0
echo "npm error code $FAKE_NPM" >&2
echo "npm error the reason" >&2
echo "npm error A complete log of this run can be found in: here" >&2
exit 1
"""
NODE = """#!/bin/sh
echo "$PWD $@"
exit ${FAKE_NODE:-0}
"""
NETWORK = "AsyncAPI parser: not run (npm does not reach its registry: ENOTFOUND)"


@pytest.fixture(autouse=True)
def no_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """The only folder on PATH, with stand-ins for npm and node."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("npm", NPM.replace("{calls}", str(tmp_path / "calls"))), ("node", NODE)):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def run(tmp_path, contracts=ROOT / "contracts"):
    return judge.judge_contracts(contracts, tmp_path / "parser")


def calls(tmp_path) -> list[str]:
    log = tmp_path / "calls"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("missing", ["npm", "node"])
@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_without_npm_one_line_says_so_and_only_ci_fails(missing, ci, status, programs, tmp_path, monkeypatch, capsys):
    (programs / missing).unlink()
    monkeypatch.setenv("CI", ci)
    assert run(tmp_path) == status
    assert capsys.readouterr().out == f"AsyncAPI parser: not run (no {missing})\n"


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_without_network_one_line_says_so_and_only_ci_fails(ci, status, programs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_NPM", "ENOTFOUND")
    monkeypatch.setenv("CI", ci)
    assert run(tmp_path) == status
    assert capsys.readouterr().out.splitlines()[-1] == NETWORK


def test_what_npm_refuses_fails_with_its_reason(programs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_NPM", "EINTEGRITY")
    assert run(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "AsyncAPI parser: npm failed: EINTEGRITY the reason"


def test_the_parser_is_installed_once_per_lock_file(programs, tmp_path, monkeypatch, capfd):
    assert run(tmp_path) == run(tmp_path) == 0
    assert len(calls(tmp_path)) == 1
    assert calls(tmp_path)[0].startswith("ci --ignore-scripts ")
    files = " ".join(map(str, sorted((ROOT / "contracts").glob("*.asyncapi.yaml"))))
    asked = f"{tmp_path / 'parser'} judge.mjs {files}"
    assert capfd.readouterr().out.splitlines()[1:] == [asked, asked]
    (tmp_path / "parser" / "installed").write_text("of another lock file")
    assert run(tmp_path) == 0
    assert len(calls(tmp_path)) == 2


def test_an_install_that_failed_is_tried_again(programs, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_NPM", "ECONNRESET")
    run(tmp_path)
    monkeypatch.delenv("FAKE_NPM")
    assert run(tmp_path) == 0
    assert len(calls(tmp_path)) == 2


def test_a_contract_that_the_parser_refuses_fails(programs, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_NODE", "1")
    assert run(tmp_path) == 1


def test_a_folder_without_contracts_fails(programs, tmp_path):
    assert run(tmp_path, contracts=tmp_path) == 1


def test_the_lock_file_pins_the_parser_by_hash_and_names_no_address_to_load_from():
    lock = json.loads((judge.SOURCES / "package-lock.json").read_text())
    wanted = json.loads((judge.SOURCES / "package.json").read_text())["dependencies"]
    assert lock["packages"][""]["dependencies"] == wanted
    installed = {name: package for name, package in lock["packages"].items() if name}
    assert all(package["integrity"].startswith("sha512-") for package in installed.values())
    assert [name for name, package in installed.items() if "resolved" in package] == []


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_without_maven_apache_kafka_is_not_run_and_only_ci_fails(ci, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    assert apache.try_apache_kafka(tmp_path / "cache") == status
    assert capsys.readouterr().out == "Apache Kafka: not run: no Maven (mvn) on PATH to fetch it with\n"


@pytest.mark.messaging
@pytest.mark.skipif(os.environ.get("PIN_KAFKA") != "apache", reason="runs Apache Kafka: only with PIN_KAFKA=apache")
def test_apache_kafka_takes_a_declared_example_there_and_back(capsys):
    assert apache.try_apache_kafka() == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Apache Kafka 4.")
    assert said[-2].startswith("the example of DealTimelineOverdueEvent went to pin.crm.timeline-overdue.v1 and back")
    assert said[-1] == "the tests run on it: make test PIN_KAFKA=apache"
