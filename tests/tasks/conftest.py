from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows from files are kept in a folder of this test, so that none is found by accident."""
    import datasets

    cache = str(tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
