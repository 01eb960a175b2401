"""Shared fixtures: a repository of its own for each test, with the demo scale shrunk to seconds."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]


def shrink_demo(home, **training):
    """Copy config/ to home and shrink the demo scale: three members, two seeds, two epochs."""
    shutil.copytree(REPOSITORY / "config", home / "config")
    path = home / "config" / "demo.yaml"
    content = yaml.safe_load(path.read_text())
    content["datasets"]["digits"] = {"members": 3, "seeds": 2, "subset": 600}
    content["ensemble"]["sizes"] = [2, 3]
    content["training"] |= {"epochs_ce": 2, "epochs_edl": 2, **training}
    content["collapse"]["epochs"] = 2
    content["split_sensitivity"] = {"dataset": "digits", "seeds": [1], "members": 2}
    path.write_text(yaml.safe_dump(content))


def change_config(home, scale, change):
    """Rewrite config/<scale>.yaml of home with a function that edits its content in place."""
    path = home / "config" / f"{scale}.yaml"
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A repository root of this test's own, with a demo scale that trains in seconds."""
    shrink_demo(tmp_path)
    monkeypatch.setenv("PAPERLIB_HOME", str(tmp_path))
    monkeypatch.delenv("PAPERLIB_CACHE", raising=False)
    return tmp_path


@pytest.fixture
def one_thread():
    """One thread, as every model is trained; the number before is restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def real_data():
    """The folder with the real datasets, for tests that need them."""
    folder = os.environ.get("PAPERLIB_TEST_DATA")
    if not folder:
        pytest.skip("set PAPERLIB_TEST_DATA to a folder with the real datasets (docs/data.md)")
    return Path(folder)
