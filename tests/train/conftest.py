from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import make_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("text"))
