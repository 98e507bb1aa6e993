"""The docs tell the truth: drawings are fresh, tables whole, examples run, links lead on."""

from __future__ import annotations

import enum
import importlib.util
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, get_type_hints

import pytest
import yaml
from console_lab import Session, steps
from postgres_lab import shared_server
from typer.main import get_command
from valkey_lab import program

from domicile import Entity, Settings, errors, handler
from domicile.ops.cli import app
from domicile.testing import Sim, history
from proving import story

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(DOCS.rglob("*.md")),
    *(EXAMPLE_PAGES := sorted((ROOT / "examples").glob("*/README.md"))),
)
SHOWN = ("python", "console", "sh", "text", "mermaid", "yaml")
"""What blocks may hold. Python and consoles are run, the targets that shells name exist, and YAML
can be read."""

FENCE = re.compile(r"(?P<above>[^\n]*\n)```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
ROW = re.compile(r"^\| `(?P<name>[\w-]+)` \| (?P<second>[^|]+) \|", re.MULTILINE)
EVENT = re.compile(r"\.event\(\s*\"(?P<kind>\w+)\"")
BLOCK = re.compile(r"^```(?P<kind>python|console)\n.*?^```$", re.DOTALL | re.MULTILINE)
YAML = re.compile(r"^```yaml\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
KIND = re.compile(r"^ *```(?P<kind>\w*)[^\n]*\n.*?^ *```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- test(?:: (?P<file>[\w.]+)(?P<fails>, fails)?)? -->")
VERB = re.compile(r"(?<![\w.])sim\.(?P<name>\w+)")
LINK = re.compile(r"\]\((?!\w+:|#)(?P<target>[^)#]+)")


class Example(NamedTuple):
    """A Python block of a page."""

    place: str
    tested: bool
    code: str
    file: str | None = None
    fails: bool = False


class Step(NamedTuple):
    """A row of a toy table, shaped like the rows in core."""

    to: tuple[Light, ...]
    rule: str
    does: Deed


class Light(enum.Enum):
    """A toy state."""

    RED = "red"
    GREEN = "bright green"


class Knob(enum.Enum):
    """A toy event."""

    PRESS = "press|push"
    WAIT = "wait"


class Deed(enum.Enum):
    """A toy action."""

    SWITCH = "switch"
    NOTHING = "nothing"
    FALL_BACK = "fall back"


TOY = {
    (Light.RED, Knob.PRESS): Step((Light.GREEN, Light.RED), "T1", Deed.SWITCH),
    (Light.RED, Knob.WAIT): Step((Light.RED,), "T2", Deed.NOTHING),
    (Light.GREEN, Knob.PRESS): Step((Light.GREEN,), "T3", Deed.NOTHING),
    (Light.GREEN, Knob.WAIT): Step((Light.RED,), "T4", Deed.FALL_BACK),
}


def load(name: str, path: Path) -> ModuleType:
    """A module from a file. It stays importable: type hints are looked up in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def examples(text: str, page: str) -> list[Example]:
    """The Python blocks of a page; those under `<!-- test -->` are to be run.

    `<!-- test: name.py -->` also gives the block a file for the console sessions of the page;
    with `, fails` after the name its tests must fail.
    """
    found: list[Example] = []
    for match in FENCE.finditer("\n" + text):
        place = f"{page}:{text[: match.start('code')].count(chr(10)) + 1}"
        mark = MARK.fullmatch(match["above"].strip())
        file, fails = (None, None) if mark is None else (mark["file"], mark["fails"])
        found.append(Example(place, mark is not None, match["code"], file, bool(fails)))
    return found


generate = load("domicile_docs_generate", DOCS / "generate.py")
EXAMPLES = [
    example
    for page in PAGES
    for example in examples(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
]


def test_a_diagram_shows_the_changes_of_state() -> None:
    assert generate.diagram(TOY).splitlines() == [
        "```mermaid",
        "stateDiagram-v2",
        '    state "red" as RED',
        '    state "bright green" as GREEN',
        "    [*] --> RED",
        "    RED --> GREEN: press|push (T1)",
        "    GREEN --> RED: wait (T4)",
        "```",
    ]


def test_a_grid_shows_every_pair() -> None:
    assert generate.grid(TOY).splitlines() == [
        "| in | on | goes to | does | rule |",
        "| --- | --- | --- | --- | --- |",
        r"| red | press\|push | bright green or red | switch | T1 |",
        "| red | wait | red | nothing | T2 |",
        r"| bright green | press\|push | bright green | nothing | T3 |",
        "| bright green | wait | red | fall back | T4 |",
    ]


def test_filling_replaces_marked_sections_only() -> None:
    page = "before\n<!-- generated:toy -->\nold\n<!-- /generated:toy -->\nafter\n"
    filled = generate.fill(page, {"toy": "new\n"})
    assert filled == "before\n<!-- generated:toy -->\nnew\n<!-- /generated:toy -->\nafter\n"
    assert generate.fill(filled, {"toy": "new\n"}) == filled


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("<!-- generated:other -->\n<!-- /generated:other -->", "no drawing is called other"),
        ("<!-- generated:toy -->\n", "not closed"),
        ("<!-- /generated:toy -->\n", "not closed"),
    ],
)
def test_a_marker_that_pairs_with_nothing_is_an_error(page: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        generate.fill(page, {"toy": ""})


def test_a_stale_page_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- generated:toy -->\nold\n<!-- /generated:toy -->\n", encoding="utf-8")
    assert list(generate.stale(tmp_path, {"toy": "new\n"})) == [page]
    assert generate.stale(tmp_path, {"toy": "old\n"}) == {}
    picture = tmp_path / "picture.svg"
    assert list(generate.stale(tmp_path, {"toy": "old\n"}, {"picture.svg": "<svg/>"})) == [picture]
    picture.write_text("<svg/>", encoding="utf-8")
    assert generate.stale(tmp_path, {"toy": "old\n"}, {"picture.svg": "<svg/>"}) == {}


def test_the_drawings_are_fresh() -> None:
    drawings, pictures = generate.drawings(), generate.pictures()
    assert [str(one) for one in generate.stale(DOCS, drawings, pictures)] == [], "run `make docs`"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"This run is seed {story.SEED} of a simulation" in readme
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in drawings if f"<!-- generated:{name} -->" not in text] == []


def test_events_are_read_from_a_ruled_table() -> None:
    doc = (
        "Intro.\n\n=====  =====\nkind   fields\n=====  =====\n**birds**\nsing   song, and\n"
        "       loudness\nfly    to\n**fish**\nswim   depth\n=====  =====\n\nEnd.\n"
    )
    assert generate.events(doc) == {
        "birds": {"sing": "song, and loudness", "fly": "to"},
        "fish": {"swim": "depth"},
    }


def test_every_event_of_the_source_is_documented() -> None:
    groups = generate.events(history.__doc__ or "")
    known = {kind for kinds in groups.values() for kind in kinds}
    told = {
        match["kind"]
        for path in (ROOT / "src").rglob("*.py")
        for match in EVENT.finditer(path.read_text(encoding="utf-8"))
    }
    assert len(told) > 15
    assert told - known == set()


def test_the_settings_page_names_every_field_with_its_default() -> None:
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    rows = {match["name"]: match["second"].replace(",", "") for match in ROW.finditer(page)}
    defaults = Settings()
    names = list(get_type_hints(Settings))
    assert list(rows) == names
    assert [name for name in names if not _says(rows[name], getattr(defaults, name))] == []


def _says(written: str, default: float | str) -> bool:
    if isinstance(default, bool):
        return written == str(default).lower()
    if isinstance(default, str):
        return written == (default or "(none)")
    return float(written) == default


def test_the_errors_page_names_every_error() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    tree = page.partition("```text")[2].partition("```")[0]
    kinds = [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.DomicileError)
    ]
    assert [name for name in kinds if not re.search(rf"\b{name}\b", tree)] == []


def test_the_table_of_mutants_is_whole() -> None:
    page = (DOCS / "explanation" / "testing.md").read_text(encoding="utf-8")
    section = page.partition("## Mutants")[2].partition("\n## ")[0]
    section, _, beside = section.partition("`proving/mutants/suites`")
    suites = sorted(path.stem for path in (ROOT / "proving" / "mutants" / "suites").glob("*.patch"))
    assert [match["name"] for match in ROW.finditer(beside)] == suites
    patches = sorted(path.stem for path in (ROOT / "proving" / "mutants").glob("*.patch"))
    assert [match["name"] for match in ROW.finditer(section)] == patches


class Bird(Entity, name="docs.bird"):
    """Something to simulate."""

    @handler
    async def sing(self) -> None:
        """Nothing."""


def test_the_verbs_of_the_simulator_exist() -> None:
    sim = Sim(0, entities=[Bird], nodes=1)
    try:
        unknown = [
            f"{page.relative_to(ROOT)}: sim.{match['name']}"
            for page in PAGES
            for match in VERB.finditer(page.read_text(encoding="utf-8"))
            if not hasattr(sim, match["name"])
        ]
    finally:
        sim.close()
    assert unknown == []


def test_the_targets_that_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    promised = {"demo"}
    named = {
        target
        for page in PAGES
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.M)
    }
    assert {"test", "sim"} <= named
    assert named - targets - promised == set()


def test_the_options_of_nodes_that_pages_name_exist() -> None:
    """Units and container files are not run, so nobody would notice an option that is not there."""
    known = {
        name: {
            option for param in command.params for option in (*param.opts, *param.secondary_opts)
        }
        for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
    }
    files = [*PAGES, *(ROOT / "examples").glob("*/deploy/*")]
    named = [
        (path.relative_to(ROOT), command, option)
        for path in files
        for command, rest in re.findall(
            r"domicile (run|manager) ([^\n`]*)", path.read_text(encoding="utf-8")
        )
        for option in re.findall(r"(?<!\S)--[a-z-]+", rest)
    ]
    assert named
    assert [one for one in named if one[2] not in known[one[1]]] == []


def test_examples_are_found_with_their_lines() -> None:
    text = "# A\n\n<!-- test -->\n```python\nx = 1\n```\n\n```python\ny = 2\n```\n"
    assert examples(text, "a.md") == [
        Example("a.md:5", True, "x = 1\n"),
        Example("a.md:9", False, "y = 2\n"),
    ]
    assert [example.tested for example in examples("```python\nz = 3\n```\n", "b.md")] == [False]
    named = examples("\n<!-- test: app.py -->\n```python\nz = 3\n```\n", "c.md")
    assert [(example.tested, example.file) for example in named] == [(True, "app.py")]
    [bad] = examples("\n<!-- test: bad.py, fails -->\n```python\nz = 3\n```\n", "d.md")
    assert (bad.tested, bad.file, bad.fails) == (True, "bad.py", True)


def test_every_python_example_is_run() -> None:
    assert [example.place for example in EXAMPLES if not example.tested] == []


@pytest.fixture(autouse=True)
def program_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is a program of its own: its rejections may have the names of another page's."""
    monkeypatch.setattr(errors.Rejection, "registry", dict(errors.Rejection.registry))


def of_page(page: Path) -> list[Example]:
    """The examples of a page, in order."""
    name = str(page.relative_to(ROOT))
    return [example for example in EXAMPLES if example.place.rpartition(":")[0] == name]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if of_page(page)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other in one directory, as a reader tries them: import each, then call what it
    calls a test. Blocks may import the files of others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = of_page(page)
    if any("DATABASE_URL" in example.code for example in found):
        monkeypatch.setenv("DATABASE_URL", shared_server().new_database())
    for example in found:
        if example.file is not None:
            (tmp_path / example.file).write_text(example.code, encoding="utf-8")
    for example in found:
        try:
            run(example, tmp_path)
        except BaseException as error:
            error.add_note(f"the example at {example.place}")
            raise


def run(example: Example, directory: Path) -> None:
    """Import an example and call its tests; nothing that it imported stays."""
    before = set(sys.modules)
    path = directory / (example.file or "example.py")
    path.write_text(example.code, encoding="utf-8")
    name = path.stem if example.file else re.sub(r"\W", "_", f"docs_example_{example.place}")
    try:
        module = load(name, path)
        for thing in [value for key, value in vars(module).items() if key.startswith("test_")]:
            with pytest.raises(AssertionError) if example.fails else nullcontext():
                thing()
    finally:
        for one in set(sys.modules) - before:
            if getattr(sys.modules[one], "__file__", None) in map(str, directory.iterdir()):
                del sys.modules[one]


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page not in EXAMPLE_PAGES and steps(page.read_text(encoding="utf-8"))
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_console_sessions_of_a_page_are_true(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named block is saved where the page shows it. The sessions of the examples are played in
    `test_examples.py`, beside their files."""
    text = page.read_text(encoding="utf-8")
    files = iter(of_page(page))
    if "valkey-server" in text:
        server = program()
        if server is None:
            pytest.skip("no Valkey or Redis server is installed")
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "valkey-server").symlink_to(server)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with Session(tmp_path) as console:
        for block in BLOCK.finditer(text):
            if block["kind"] == "console":
                for step in steps(block[0]):
                    console.play(step)
            elif block["kind"] == "python":
                example = next(files)
                if example.file is not None:
                    (tmp_path / example.file).write_text(example.code, encoding="utf-8")


def test_blocks_are_of_known_kinds() -> None:
    unknown = [
        f"{page.relative_to(ROOT)}: {match['kind']}"
        for page in PAGES
        for match in KIND.finditer(page.read_text(encoding="utf-8"))
        if match["kind"] and match["kind"] not in SHOWN
    ]
    assert unknown == []


def test_blocks_of_yaml_can_be_read() -> None:
    found = [match["text"] for page in PAGES for match in YAML.finditer(page.read_text("utf-8"))]
    assert found
    assert all(part for text in found for part in yaml.safe_load_all(text))


def test_links_within_the_docs_lead_somewhere() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {match['target']}"
        for page in PAGES
        for match in LINK.finditer(page.read_text(encoding="utf-8"))
        if not (page.parent / match["target"]).exists()
    ]
    assert dead == []


def test_the_index_links_every_page() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    whole = index.partition("## All pages")[2]
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert [page for page in pages if page != "index.md" and f"]({page})" not in whole] == []
