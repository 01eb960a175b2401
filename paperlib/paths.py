"""Where things are: the repository's root, whatever folder a notebook, a test or a command runs in."""

import os
from pathlib import Path


def root():
    """The repository: PAPERLIB_HOME, else the nearest folder above with a Snakefile, else beside the package."""
    if home := os.environ.get("PAPERLIB_HOME"):
        return Path(home).resolve()
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "Snakefile").is_file() and (folder / "config").is_dir():
            return folder
    return Path(__file__).resolve().parents[1]


def results(scale):
    """Folder of a scale's results."""
    return root() / "results" / scale


def figures(scale):
    """Folder of a scale's figures."""
    return root() / "figures" / scale


def cache():
    """Folder of what can be computed again: cached features. PAPERLIB_CACHE moves it, e.g. to a scratch disk."""
    return Path(os.environ.get("PAPERLIB_CACHE", root() / ".cache"))
