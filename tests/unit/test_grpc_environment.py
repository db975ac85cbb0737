"""gRPC reads its environment when it is imported, and ignores variables that are set later."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import importlib, os, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"), os.environ.get("GRPC_VERBOSITY"))

sys.meta_path.insert(0, AtImport())
importlib.import_module(sys.argv[1])
"""
_MODULES = [
    "pdmesh.net.grpc.rpc",
    "pdmesh.v1.instance_service_pb2_grpc",
    "pdmesh.cli.commands.look.status",
    *(
        f"pdmesh.services.{name}.__main__"
        for name in ("gateway", "master_scheduler", "prefill", "decode", "kv_cache_index")
    ),
]


@pytest.mark.parametrize("module", _MODULES)
def test_the_environment_is_set_before_grpc_is_imported(module: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRPC_")}
    command = [sys.executable, "-c", _PROGRAM, module]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.splitlines()[:1] == ["-event_engine_client,-event_engine_listener NONE"]
