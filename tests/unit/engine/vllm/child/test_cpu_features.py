"""Settings that need missing CPU features are refused in one line before an engine starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.cli.arguments import build_parser
from pdmesh.cli.commands import up
from pdmesh.cli.errors import CommandFailed
from pdmesh.engine.vllm.child import cpu_features, preflight
from pdmesh.engine.vllm.child.cpu_features import flags_of, missing_for, slow_for
from pdmesh.engine.vllm.child.preflight import check_processor
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.engine import VllmEngine
from pdmesh.errors import EngineFailed
from tests.support.logs import capture_logs_of

ZEN3 = flags_of("processor : 0\nflags\t\t: fpu sse2 avx avx2 vaes\n\nprocessor : 1\nflags : no\n")
ZEN4 = ZEN3 | {"avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512_bf16"}
AMX_ALONE = ZEN3 | {"amx_tile", "amx_bf16"}
CONFIG = VllmConfig("prefill-0", 1, Path("/nowhere"), "m", device="cpu", kv_cache_dtype="fp8")


@pytest.fixture
def on_zen3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {' '.join(sorted(ZEN3))}\n")
    monkeypatch.setattr(cpu_features, "CPUINFO", cpuinfo)


def test_flags_are_those_of_the_first_processor_or_none() -> None:
    assert {"fpu", "sse2", "avx", "avx2", "vaes"} == ZEN3
    assert flags_of("Features\t: fp asimd bf16\n") == {"fp", "asimd", "bf16"}
    assert flags_of("") == frozenset()


def test_fp8_needs_avx512_or_amx() -> None:
    for stored in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        assert "AVX-512 or AMX" in missing_for(stored, ZEN3)
        assert stored in missing_for(stored, ZEN3)
        assert not missing_for(stored, ZEN4)
        assert not missing_for(stored, AMX_ALONE)
        assert missing_for(stored, ZEN4 - {"avx512dq"}), "torch needs all four extensions"
        assert missing_for(stored, frozenset({"fp", "asimd", "bf16"})), "an Arm has neither"
        assert not missing_for(stored, frozenset()), "with unknown flags, vLLM decides"
    assert not missing_for("auto", ZEN3)


def test_bf16_without_its_instructions_is_slow() -> None:
    assert "AVX-512 BF16 or AMX" in slow_for("bfloat16", ZEN3)
    assert not slow_for("bfloat16", ZEN4)
    assert not slow_for("float32", ZEN3)
    assert not slow_for("bfloat16", frozenset())


@pytest.mark.usefixtures("on_zen3")
async def test_an_instance_refuses_before_it_looks_for_its_model() -> None:
    with pytest.raises(EngineFailed, match="fp8 needs AVX-512 or AMX") as caught:
        await VllmEngine(CONFIG).start()
    assert caught.value.reason == "CPU_FEATURE_MISSING"
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("on_zen3")
def test_a_gpu_needs_no_cpu_features_and_a_slow_dtype_is_logged_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = capture_logs_of(preflight, monkeypatch)
    check_processor(replace(CONFIG, device="cuda"))
    check_processor(replace(CONFIG, kv_cache_dtype="auto", dtype="bfloat16"))
    check_processor(replace(CONFIG, kv_cache_dtype="auto"))
    (line,) = lines
    assert (line["event"], line["log_level"], line["dtype"]) == (
        "vllm.slow_dtype", "warning", "bfloat16",
    )  # fmt: skip


@pytest.mark.usefixtures("on_zen3")
@pytest.mark.parametrize("variable", ["PDMESH_KV_CACHE_DTYPE", "PDMESH_DECODE_KV_CACHE_DTYPE"])
def test_up_refuses_a_missing_feature_that_the_environment_asks_for(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(up, "installed_device", lambda: "cpu")
    monkeypatch.setenv(variable, "fp8")
    asked = ["up", "--engine", "vllm", "--model", str(tmp_path), "--state-dir", str(tmp_path)]
    with pytest.raises(
        CommandFailed, match=f"^{variable}: kv_cache_dtype fp8 needs AVX-512 or AMX"
    ):
        up._spec(build_parser().parse_args(asked))
    monkeypatch.setattr(cpu_features, "own_flags", lambda: ZEN4)
    with pytest.raises(CommandFailed, match=r"is not a Hugging Face model|vLLM is not installed"):
        up._spec(build_parser().parse_args(asked))


@pytest.mark.usefixtures("on_zen3")
@pytest.mark.parametrize("where", ["options", "role_options"])
def test_up_refuses_a_missing_feature_that_the_groups_file_asks_for(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(up, "installed_device", lambda: "cpu")
    options = "{kv_cache_dtype: fp8}"
    said = options if where == "options" else f"{{prefill: {options}}}"
    file = tmp_path / "groups.yaml"
    file.write_text(
        f"services:\n  chat: {{model: m, {where}: {said}}}\n"
        "scenarios:\n  chat: {service: chat}\n"
        "groups:\n  chat: {scenario: chat, prefill: 2, decode: 2}\n"
    )
    asked = ["up", "--engine", "vllm", "--groups", str(file), "--blank", "4"]
    with pytest.raises(CommandFailed, match=r"groups\.yaml: services\.chat: kv_cache_dtype fp8"):
        up._spec(build_parser().parse_args(asked))
