"""Run a notebook for one dataset of one scale, keep what a failed one got to, and make its page.

A page needs no network and no script: formulas become MathML, figures are inside, one small style sheet.
"""

import base64
import html
import io
import os
import re
from pathlib import Path

import jinja2
import latex2mathml.converter
import nbformat
import papermill
from nbconvert import HTMLExporter
from PIL import Image

from paperlib import catalogue, paths, records
from paperlib.errors import UserError

FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.DOTALL)
READING = re.compile(r"\b(D\d\d)\b")
DECISIONS = "../../../docs/decisions.md"
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
CODE_CELL = re.compile(r'(<div class="input">.*?</pre></div>\s*</div>\s*</div>\s*</div>)', re.DOTALL)


class NotebookError(UserError):
    """A notebook that failed; the message names its partial output."""


def run(name, scale, dataset):
    """Execute notebooks/NAME.ipynb into results/SCALE/notebooks/, with its page; returns the executed notebook."""
    source = paths.root() / "notebooks" / f"{name}.ipynb"
    if not source.exists():
        known = ", ".join(sorted(path.stem for path in source.parent.glob("*.ipynb")))
        raise NotebookError(f"there is no notebook {name!r}; there are: {known}")
    partial = paths.root() / "logs" / scale / f"{name}-{dataset}.ipynb"
    target = paths.results(scale) / "notebooks" / f"{name}-{dataset}.ipynb"
    for folder in (partial.parent, target.parent):
        records.check_writable(folder)
    os.environ.pop("JUPYTER_PATH", None)  # a kernel of the user's must not shadow the environment's own
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    try:
        executed = papermill.execute_notebook(
            source,
            partial,
            parameters={"scale": scale, "dataset": dataset},
            kernel_name="python3",
            cwd=paths.root(),
            progress_bar=False,
            log_output=False,
            extra_arguments=["--log-level=ERROR"],
        )
    except papermill.PapermillExecutionError as error:
        raise NotebookError(
            f"{name} failed for {dataset} at scale {scale}, cell {error.exec_count}: {error.ename}: {error.evalue}\n"
            f"what it got to is in {partial.relative_to(paths.root())}"
        ) from None
    except Exception as error:  # a dead kernel comes as one of several classes
        if isinstance(error, OSError) and error.errno in (*records.FULL, *records.LOCKED):
            raise records.unwritable(error.filename or partial, error) from None
        if "kernel" not in str(error).lower():
            raise
        raise NotebookError(
            f"the kernel of {source.relative_to(paths.root())} died for {dataset} at scale {scale} ({error}); "
            "run the same command again, with fewer --cores or other programs closed if memory is short\n"
            f"what it got to is in {partial.relative_to(paths.root())}"
        ) from None
    with records.replacing(target) as temporary:
        nbformat.write(_tidied(executed, name, dataset), temporary)  # not partial: a second run may write there as well
    write_page(target)
    return target


def _tidied(notebook, name, dataset):
    """An executed notebook less what differs from run to run, its dataset in the title, its figures small and named."""
    notebook.metadata.pop("papermill", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    heading, *rest = notebook.cells[0].source.split("\n", 1)
    about = "" if dataset == catalogue.ALL else f" ({catalogue.title(dataset)})"
    if not heading.endswith(about):
        notebook.cells[0].source = "\n".join([heading + about, *rest])
    figures = iter([item.title for item in catalogue.ITEMS if (item.notebook, item.kind) == (name, "figure")])
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _with_palette(output.data["image/png"])
                output.metadata["image/png"] = {"alt": f"{next(figures, name)}, {catalogue.title(dataset)}"}
    return notebook


def _with_palette(encoded):
    """A figure in 256 colours: no difference to the eye, a quarter of the bytes."""
    picture, small = Image.open(io.BytesIO(base64.b64decode(encoded))), io.BytesIO()
    if picture.mode == "P":
        return encoded
    picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    return base64.b64encode(small.getvalue()).decode()


def write_page(executed):
    """The page NAME.html beside an executed notebook."""
    notebook = nbformat.read(executed, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "parameters" not in cell.metadata.get("tags", [])]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _for_a_page(cell.source)
        for output in cell.get("outputs", []):
            if "text/markdown" in output.get("data", {}):
                output.data["text/markdown"] = _for_a_page(output.data["text/markdown"])
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    body, _ = exporter.from_notebook_node(notebook)
    body = CODE_CELL.sub(r'<details class="code"><summary>Code</summary>\1</details>', body)
    title = next(
        line.lstrip("# ") for cell in notebook.cells for line in cell.source.splitlines() if line.startswith("#")
    )
    page = Path(executed).with_suffix(".html")
    with records.replacing(page) as temporary:
        temporary.write_text(_template("page.html.j2").render(title=title, body=body))
    return page


def _for_a_page(text):
    """Markdown with readings linked to where they are explained, and formulas that need no script."""
    return formulas_to_mathml(READING.sub(f"[\\1]({DECISIONS})", text))


def formulas_to_mathml(text):
    """Markdown with $...$ and $$...$$ turned into MathML, which browsers draw by themselves; code stays."""
    pieces = CODE.split(text)
    return "".join(piece if i % 2 else FORMULA.sub(_mathml, piece) for i, piece in enumerate(pieces))


def _mathml(match):
    display, inline = match.groups()
    formula = display or inline
    markup = latex2mathml.converter.convert(formula.strip(), display="block" if display else "inline")
    return markup.replace("<math ", f'<math aria-label="{html.escape(formula.strip(), quote=True)}" ', 1)


def write_index(scale, entries):
    """index.html: every figure and table of the paper with its file, picture and notebook; and index.md beside."""
    folder = paths.results(scale) / "notebooks"
    for name in ("index.html", "index.md"):
        with records.replacing(folder / name) as temporary:
            temporary.write_text(_template(f"{name}.j2").render(scale=scale, entries=entries))
    return folder / "index.html"


def _template(name):
    return jinja2.Environment(
        loader=jinja2.PackageLoader("paperlib", "."),
        autoescape=name.endswith("index.html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)
