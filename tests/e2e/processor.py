"""A mark that skips a test if this machine's processor lacks a feature.

The reason for the skip names the feature.
"""

from __future__ import annotations

import pytest

from pdmesh.engine.vllm.child.cpu_features import missing_for, own_flags
from pdmesh.engine.vllm.config import installed_device

_MISSING = missing_for("fp8", own_flags()) if installed_device() == "cpu" else ""

needs_fp8 = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)
