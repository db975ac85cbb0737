"""`pdmesh plan`: its input, its output and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests.sizing.scenes import CONFIGS
from pdmesh.cli import app
from pdmesh.core.sizing.advice import LOAD_ERROR
from pdmesh.desired_file import read

GOALS = ("--ttft", "0.5", "--tpot", "0.02")
LENGTHS = ("--prompt", "400", "--answer", "100")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["Llama-3.1-8B"]))
    return folder


def plan(model: Path | str, *words: str, gpu: str = "h100") -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(["plan", "--model", str(model), "--gpu", gpu, *words])
    return int(str(ended.value.code or 0))


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_the_table_has_both_deployments_and_the_stated_errors(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(model, "--rate", "10", "--price", "2.5", *LENGTHS, *GOALS) == 0
    text = told(capsys)
    assert "2P:2D" in text
    assert "2 fusion" in text
    assert "fusion is cheaper: P/D takes 4 GPUs, fusion takes 2 GPUs" in text
    assert f"+-{LOAD_ERROR:.0%}" in text
    assert "10.00" in text  # 4 GPUs at a price of 2.50
    assert "90 % of their prefills are within" in text


def test_json_and_yaml_have_the_same_data_and_a_state_that_can_be_applied(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--rate", "10", *LENGTHS, *GOALS)
    assert plan(model, *words, "--json") == 0
    data: dict[str, Any] = json.loads(told(capsys))
    assert plan(model, *words, "-o", "yaml") == 0
    assert yaml.safe_load(told(capsys)) == data
    assert data["answer"] == "fusion"
    assert data["pd"]["instances"]["decode"]["count"] == 2
    assert read(yaml.safe_dump(data["desired"])).groups["planned"].fusion == 2


@pytest.mark.parametrize(("mode", "pair"), [("pd", (2, 2, 0)), ("fusion", (0, 0, 2))])
def test_only_the_desired_state_of_the_mode(
    model: Path, capsys: pytest.CaptureFixture[str], mode: str, pair: tuple[int, int, int]
) -> None:
    (model / "model.safetensors").write_bytes(b"\0" * 1000)
    assert plan(model, "--rate", "10", *LENGTHS, *GOALS, "--mode", mode, "--desired") == 0
    desired = read(told(capsys))
    group = desired.groups["planned"]
    assert (group.prefill, group.decode, group.fusion) == pair
    assert desired.services["planned"].model_dir == str(model)


def test_a_scenario_file_and_options_that_go_before_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "chat.yaml"
    scenario.write_text(
        "rate_per_s: 10\nprompt: 400\nanswer: 50-150\nttft_s: 0.5\ntpot_s: 0.02\ncached_share: 0.5"
    )
    assert plan(model, "--scenario", str(scenario), "--rate", "20", "--cached", "0.32") == 0
    head = told(capsys).splitlines()[0]
    assert head.startswith("20 requests/s, 400 tokens in (32% cached), 100 out")


def test_a_mooncake_trace_gives_rate_lengths_and_what_was_seen_before(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 1024, "output_length": 100, "hash_ids": [0, 1 + i]}
        for i in range(101)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert plan(model, "--trace", str(trace), *GOALS) == 0
    assert "10.1 requests/s, 1024 tokens in (50% cached), 100 out" in told(capsys)


def test_an_azure_table_is_read_too(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"2026-11-16 18:17:0{i}.9799600,374,44" for i in range(9)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
    assert plan(model, "--trace", str(trace), *GOALS) == 0
    assert "374 tokens in (0% cached), 44 out" in told(capsys)


def test_a_hub_id_is_found_in_the_local_cache(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--org--small" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "config.json").rename(snapshot / "config.json")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert plan("org/small", "--rate", "10", *LENGTHS, *GOALS) == 0
    assert plan("org/other", "--rate", "10", *LENGTHS, *GOALS) == 2


def test_a_measured_law_takes_the_place_of_the_roofline(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    law = tmp_path / "mine.yaml"
    law.write_text("prefill_token_s: 0.0001\nstep_fixed_s: 0.011\n")
    words = ("--rate", "1", *LENGTHS, *GOALS)
    assert plan(model, *words, "--law", str(law), "--tp", "1", "--json") == 0
    data = json.loads(told(capsys))
    assert data["pd"]["tpot_p50_s"] == pytest.approx(0.011, rel=0.02)
    assert f"step times are those of the law {law}" in data["notes"]
    assert plan(model, *words, "--law", str(law)) == 2
    law.write_text("prefill_tokens_s: 1\n")
    assert plan(model, *words, "--law", str(law), "--tp", "1") == 2
    assert "did you mean prefill_token_s" in capsys.readouterr().err
    law.write_text("prefill_token_s: 0.0001\n")
    assert plan(model, *words, "--law", str(law), "--tp", "1") == 2
    assert f"law: {law}: a decode step takes no time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((*LENGTHS, *GOALS), "rate_per_s: is missing: give it in the scenario or as --rate"),
        (("--rate", "1", *GOALS), "prompt: is missing"),
        (("--rate", "1", *LENGTHS), "ttft_s: is missing"),
        (("--rate", "1", "--prompt", "x", "--answer", "9", *GOALS), "prompt: 'x' is not a number"),
        (("--rate", "1", *LENGTHS, *GOALS, "--trace", "none.csv"), "trace: a trace has its own"),
        ((*GOALS, "--trace", "none.csv"), "trace: cannot read none.csv"),
        (("--rate", "1", "--prompt", "9", "--answer", "1", *GOALS), "answer: has only one token"),
        (("--scenario", "none.yaml"), "scenario: cannot read none.yaml"),
        (("--rate", "1", *LENGTHS, *GOALS, "--law", "none"), "tp: a law holds for one number"),
        (("--rate", "1", "--prompt", "9" * 5000, "--answer", "9", *GOALS), "prompt: '999"),
    ],
)
def test_what_is_wrong_is_named(
    model: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], error: str
) -> None:
    assert plan(model, *words) == 2
    assert f"pdmesh: {error}" in capsys.readouterr().err


def test_a_wrong_field_of_a_file_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "chat.yaml"
    for text, error in (
        ("rate: 5", "rate: Extra inputs are not permitted"),
        ("rate_per_s: -5", "rate_per_s: Input should be greater than 0"),
        ("[1]", "is not a mapping"),
        ("a: [", "is not YAML"),
    ):
        scenario.write_text(text)
        assert plan(model, "--scenario", str(scenario)) == 2
        assert error in capsys.readouterr().err


def test_a_broken_model_folder_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--rate", "1", *LENGTHS, *GOALS)
    assert plan(model, *words, gpu="h20") == 2
    assert "gpu: there is no 'h20'; did you mean h200?" in capsys.readouterr().err
    # the model's config has no maximum length
    assert plan(model, *words, "--prompt", "200000") == 0
    (model / "config.json").write_text("{")
    assert plan(model, *words) == 2
    assert "config.json is not JSON" in capsys.readouterr().err
    assert plan(model / "none", *words) == 2
    assert "model: there is no config.json at" in capsys.readouterr().err
    long = {**CONFIGS["Llama-3.1-8B"], "max_position_embeddings": 256}
    (model / "config.json").write_text(json.dumps(long))
    assert plan(model, *words) == 2
    assert "prompt: prompt and answer have up to 500 tokens; the model takes 256" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"quantization": 5}'])
def test_a_broken_file_beside_the_config_is_named(
    model: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (model / "hf_quant_config.json").write_text(text)
    assert plan(model, "--rate", "1", *LENGTHS, *GOALS) == 2
    error = capsys.readouterr().err
    assert "pdmesh: model: " in error
    assert "hf_quant_config.json" in error


def test_a_long_list_of_ranks_is_refused_before_the_search(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--rate", "1", *LENGTHS, *GOALS, "--tp")
    assert plan(model, *words, ",".join(map(str, range(1, 65)))) == 2
    assert "--tp: 64 numbers: the most allowed is 8" in capsys.readouterr().err
    assert plan(model, *words, "1,2,2,1") == 0


def test_goals_that_nothing_holds_give_no_desired_state(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--rate", "1", *LENGTHS, "--ttft", "0.001", "--tpot", "0.02")
    assert plan(model, *words) == 0
    assert "no deployment holds the goals" in told(capsys)
    assert plan(model, *words, "--desired") == 1
    assert plan(model, *words, "--mode", "pd") == 2
    assert "mode: pd cannot meet the goals" in capsys.readouterr().err
