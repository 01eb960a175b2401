"""What the repository promises about itself: one list of dependencies, a clean lock, commands that exist."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = PROJECT["dependencies"] + [name for group in PROJECT["optional-dependencies"].values() for name in group]


def test_environment_yml_repeats_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda, pip = environment["dependencies"][:-1], environment["dependencies"][-1]["pip"]
    assert pip[-1] == "--editable ."
    assert sorted(map(str, map(Requirement, pip[:-1]))) == sorted(map(str, map(Requirement, REQUIRED)))
    rattler = pytest.importorskip("rattler")
    names = [rattler.MatchSpec(spec).name.normalized for spec in conda]
    assert names == ["python", "pip"]


def test_the_lock_pins_every_dependency_with_hashes_and_names_no_address():
    lock = (ROOT / "requirements.lock").read_text()
    pinned = {}
    for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", lock, re.MULTILINE):
        pinned.setdefault(name.lower().replace("_", "-"), set()).add(version)
    for requirement in map(Requirement, REQUIRED):
        versions = pinned[requirement.name.lower().replace("_", "-")]
        assert all(requirement.specifier.contains(version) for version in versions), requirement
    assert "://" not in lock
    entries = [entry for entry in re.split(r"\n(?=\S)", lock) if "==" in entry]
    assert all("--hash=sha256:" in entry for entry in entries)


def test_torch_and_torchvision_are_the_pair_that_works():
    assert {"torch==2.14.0", "torchvision==0.29.2"} <= set(PROJECT["dependencies"])


def test_make_targets_of_the_readme_exist():
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE))
    assert {"reproduce", "test", "lab"} <= named
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(p.name for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page):
    path = ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_notebook_sources_and_library_hold_no_path_of_a_machine():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    homes = re.compile(r"/(?:home|root|Users|tmp|mnt)/\w+")
    for name in listed:
        path = ROOT / name
        if path.suffix in (".py", ".ipynb", ".md", ".yaml", ".yml", ".smk", ".toml", ".html", ".j2") and path.exists():
            found = homes.search(path.read_text())
            assert not found or path == Path(__file__), f"{name}: {found.group()}"


def test_every_decision_is_documented_once():
    text = (ROOT / "docs" / "decisions.md").read_text()
    numbers = [int(number) for number in re.findall(r"^\| D(\d\d) \|", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    sources = [
        *(ROOT / "paperlib").glob("*.py"),
        *(ROOT / "config").glob("*.yaml"),
        *(ROOT / "notebooks").glob("*.ipynb"),
    ]
    used = {int(number) for path in sources for number in re.findall(r"\bD(\d\d)\b", path.read_text())}
    assert used <= set(numbers)
