"""The checks of `make audit` find each kind of fault, and accept faults that are explained.

An explanation without a fault is reported.
"""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

import pytest

from tools.audit import insecure_code, licences, secrets, vulnerabilities
from tools.audit.accepted import BadAuditFile, Licences, Secret, Vulnerability, read
from tools.audit.licences import Metadata, expression_of, is_allowed
from tools.audit.metadata import metadata_of
from tools.audit.pinned import Pin, pins_in, without_namesakes
from tools.audit.secrets import Suspect
from tools.audit.vulnerabilities import Found

ROOT = Path(__file__).parents[4]
LEFT = Pin("left-pad", "1.0", ())
KNOWN = Licences(
    frozenset({"MIT", "Apache-2.0 WITH LLVM-exception"}), {"MIT License": "MIT"}, {}, {}
)
FLAW = Found("left-pad", "1.0", ("GHSA-1", "CVE-1"), ("1.1",), "pads to the right")
EXCUSE = Vulnerability("CVE-1", "left-pad", date(2030, 1, 1), "we pad nothing")


def test_what_this_repository_accepts_can_be_read() -> None:
    accepted = read(ROOT / "requirements/audit.yaml")
    assert accepted.secrets
    assert "MIT" in accepted.licences.allowed


LICENCES = "licences: {allowed: [], names: {}, stated: {}, excepted: {}}\n"
NO_SECRETS, NO_FLAWS = "secrets: []\n", "vulnerabilities: []\n"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("licences: {}", "exactly licences, vulnerabilities, secrets"),
        (
            LICENCES.replace(", excepted: {}", "") + NO_FLAWS + NO_SECRETS,
            "licences.excepted is missing",
        ),
        (
            LICENCES.replace("excepted: {}", "excepted: {a: }") + NO_FLAWS + NO_SECRETS,
            "licences.excepted.a must be text",
        ),
        (
            LICENCES + NO_FLAWS + "secrets: [{files: a, types: [b], why: ''}]",
            "secrets[0].why must be text",
        ),
        (
            LICENCES + NO_SECRETS + "vulnerabilities: [{id: a, package: b, until: soon, why: c}]",
            "vulnerabilities[0].until must be a date",
        ),
    ],
)
def test_a_bad_file_is_refused_with_the_name_of_the_field(
    tmp_path: Path, text: str, field: str
) -> None:
    (tmp_path / "audit.yaml").write_text(text)
    with pytest.raises(BadAuditFile, match=field.replace("[", r"\[")):
        read(tmp_path / "audit.yaml")


def test_every_pin_is_found_once_with_its_hashes(tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("# Why.\nA.b_c==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n")
    two.write_text("a-b-c==1.0\na-b-c==2.0+cpu \\\n    --hash=sha256:cc\n")
    first, second = pins_in([one, two])
    assert first == Pin("a-b-c", "1.0", ("sha256:aa", "sha256:bb"))
    assert (second.version, second.public_version) == ("2.0+cpu", "2.0")
    assert without_namesakes([first, second, LEFT]) == [[first, LEFT], [second]]


def test_this_repository_pins_every_package_with_a_hash() -> None:
    pins = pins_in(sorted((ROOT / "requirements").glob("*.txt")))
    assert len(pins) > 300
    assert [str(pin) for pin in pins if not pin.hashes] == []


@pytest.mark.parametrize(
    ("expression", "is_fine"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("MIT OR MIT AND GPL-3.0-only", True),
        ("(MIT OR MIT) AND GPL-3.0-only", False),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("Apache-2.0", False),
    ],
)
def test_a_choice_of_licences_is_read_as_such(expression: str, is_fine: bool) -> None:
    assert is_allowed(expression, KNOWN.allowed) is is_fine


@pytest.mark.parametrize(
    ("metadata", "expression"),
    [
        (Metadata(expression="MIT"), "MIT"),
        (Metadata(licence="MIT License"), "MIT"),
        (Metadata(licence="a whole text", classifiers=("License :: MIT License",)), "MIT"),
        (Metadata(licence="do as you like"), ""),
    ],
)
def test_a_licence_comes_from_whatever_the_metadata_say(
    metadata: Metadata, expression: str
) -> None:
    assert expression_of(LEFT, metadata, KNOWN) == expression


def test_a_forbidden_licence_is_found_and_may_be_excepted() -> None:
    for licence in ("AGPL-3.0-only", ""):
        (finding,) = licences.forbidden({LEFT: licence}, KNOWN)
        assert "left-pad 1.0" in finding
    excepted = Licences(KNOWN.allowed, {}, {}, {"left-pad": "we link nothing"})
    assert list(licences.forbidden({LEFT: "AGPL-3.0-only"}, excepted)) == []
    family = Licences(KNOWN.allowed, {}, {}, {"left-*": "we link nothing"})
    assert list(licences.forbidden({LEFT: ""}, family)) == []
    (idle,) = licences.forbidden({LEFT: "MIT"}, excepted)
    assert "excepted.left-pad is needed by no package" in idle
    assert list(licences.forbidden({LEFT: "MIT"}, excepted, is_whole=False)) == []


def test_metadata_come_from_an_environment_and_from_earlier_answers(tmp_path: Path) -> None:
    about = tmp_path / "venv/lib/python3.11/site-packages/left_pad-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Name: Left_Pad\nVersion: 1.0\nLicense-Expression: MIT\n")
    kept = tmp_path / "kept.json"
    kept.write_text('[["other", "2", {"expression": "ISC", "licence": "", "classifiers": []}]]')
    other = Pin("other", "2", ())
    build = Pin("left-pad", "1.0+cu130", ())
    found = metadata_of([LEFT, other, build], [tmp_path / "venv"], kept)
    assert {str(pin): said.expression for pin, said in found.items()} == {
        "left-pad 1.0": "MIT", "left-pad 1.0+cu130": "MIT", "other 2": "ISC",
    }  # fmt: skip


def test_a_vulnerability_is_accepted_only_until_its_day() -> None:
    (finding,) = vulnerabilities.unaccepted([FLAW], [], date(2029, 1, 1))
    assert "left-pad 1.0: GHSA-1 CVE-1 (fixed in 1.1)" in finding
    assert list(vulnerabilities.unaccepted([FLAW], [EXCUSE], date(2030, 1, 1))) == []
    (late,) = vulnerabilities.unaccepted([FLAW], [EXCUSE], date(2030, 1, 2))
    assert "accepted until 2030-01-01" in late
    (idle,) = vulnerabilities.unaccepted([], [EXCUSE], date(2029, 1, 1))
    assert "CVE-1 of left-pad is no longer found" in idle


def test_a_secret_is_explained_by_its_place_and_its_kind() -> None:
    found = Suspect("libs/a.py", 3, "AWS Access Key")
    explained = Secret("libs/*", ("AWS Access Key",), "an example")
    assert list(secrets.unexplained([found], [])) == ["secrets: libs/a.py:3: AWS Access Key"]
    assert list(secrets.unexplained([found], [explained])) == []
    elsewhere = Secret("services/*", ("AWS Access Key",), "an example")
    findings = list(secrets.unexplained([found], [elsewhere]))
    assert len(findings) == 2
    assert "services/*: nothing there looks like a secret" in findings[1]


def test_ruff_finds_insecure_code_and_an_exception_must_say_why(tmp_path: Path) -> None:
    for folder in ("libs", "services"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.ruff.lint]\nselect = ["S", "F"]\n')
    (tmp_path / "libs/a.py").write_text('import os\neval("1")\n')
    (tmp_path / "services/b.py").write_text(
        'eval("1")  # noqa: S307\neval("1")  # noqa: S307  the text is ours\n'
    )
    (finding,) = insecure_code.found_by_ruff(Path(sys.executable).with_name("ruff"), tmp_path)
    assert finding.startswith("code: libs/a.py:2: S307")
    assert list(insecure_code.silent_exceptions(tmp_path)) == [
        "code: services/b.py:1: says not why S is excepted"
    ]
