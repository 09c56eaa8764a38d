"""Programs of the README and of the site's pages run and print what stands below them; links lead somewhere."""

import re
import runpy

import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.topology import load_topology
from tests.docs.pages import ROOT, blocks, links, outputs, pages, run
from tests.sweeps import swept

PAGES = [str(page.relative_to(ROOT)) for page in pages() if blocks(page.read_text())]
WRITTEN = (ROOT / "docs" / "_build", ROOT / "docs" / "reference" / "api")  # by the site's build
SITE = [page for page in sorted((ROOT / "docs").rglob("*.md")) if not set(WRITTEN) & set(page.parents)]
HOWTO_LINES = 60


def names_of(page):
    return run(ROOT / page)[0]


@swept("page", PAGES, left=("docs/howto/recomputation.md", "docs/howto/host_memory.md"))
def test_programs_run_and_print_what_stands_below_them(page):
    for now, printed in run(ROOT / page)[1]:
        assert now.strip() == printed.strip()


@pytest.mark.parametrize("page", [ROOT / "README.md", *SITE], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    missing = [link for link in links(page.read_text()) if not (page.parent / link.partition("#")[0]).exists()]
    assert missing == []


def test_the_site_lists_every_page():
    tree = "\n".join(page.read_text() for page in SITE)
    listed = re.findall(r"^([\w/]+)$", "\n".join(re.findall(r"```\{toctree\}\n(.*?)```", tree, re.DOTALL)), re.M)
    here = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in SITE} - {"index"}
    assert here - set(listed) == set() and len(listed) == len(set(listed))


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert len(blocks(text)[0].code.strip().splitlines()) == 10


FIGURES = {  # of the README, by the page of evidence that has them
    "benchmarks": ("0.38", "33.1", "252.8", "62,812", "2.5", "1.3%", "2% off", "45 steps"),
    "predictions": ("92 published runs",),
    "coverage": ("5,594", "846"),
    "strategies": ("31 strategies",),
}


@pytest.mark.parametrize("page", FIGURES)
def test_figures_of_the_readme_are_those_of_the_evidence(page):
    for file in ("README.md", f"docs/evidence/{page}.md"):
        text = (ROOT / file).read_text()
        assert [figure for figure in FIGURES[page] if figure not in text] == []


def test_how_to_pages_are_short():
    sizes = {page.name: len(page.read_text().splitlines()) for page in SITE if page.parent.name == "howto"}
    assert {name: size for name, size in sizes.items() if size > HOWTO_LINES} == {}


@pytest.mark.parametrize("page", [page for page in SITE if page.parent.name == "evidence" and page.stem != "index"])
def test_pages_of_evidence_begin_with_a_summary(page):
    title, summary, log = page.read_text().split("\n\n", 2)
    assert title.startswith("# ") and summary.startswith("> **In short.** ") and len(log) > len(summary)
    assert len(summary.splitlines()) <= 4 and len(summary) < 500


# ---- What single pages promise


def test_the_page_of_errors_lists_all():
    text = (ROOT / "docs/reference/errors.md").read_text()
    errors = [name for name in dir(md) if name.endswith("Error") and name != "MeshDSLError"]
    assert errors and [name for name in errors if f"| `{name}` |" not in text] == []


def test_every_public_name_is_in_the_api_reference(tmp_path):
    runpy.run_path(str(ROOT / "docs/api_pages.py"))["write_api_pages"](ROOT, tmp_path)
    text = "\n".join(page.read_text() for page in tmp_path.glob("*.md"))
    public = [name for name in [*dir(md), *dir(md.nd)] if name[0] != "_" and name != "nd"]
    assert len(public) > 100 and [name for name in public if f"## `md.{name}`" not in text] == []
    assert "### `Plan.partition_specs`" in text


def test_the_topology_file_that_is_shown_loads(tmp_path):
    text = re.search(r"```toml\n(.*?)```", (ROOT / "docs/reference/topology.md").read_text(), re.DOTALL)[1]
    (tmp_path / "mine.toml").write_text(text)
    assert [link.devices for link in load_topology(tmp_path / "mine.toml").links] == [8, 0]


def test_the_rule_of_a_kernel_holds():
    attention = names_of("docs/howto/custom_kernels.md")["attention"]
    q, k, v = (np.random.default_rng(0).normal(size=(6, 6, 2, n)).astype(np.float32) for n in (3, 3, 4))
    assert len(attention.check(q, k, v)) == 4
    sharded = md.parallelize(lambda q, k, v: attention(q, k, v), "data=2,model=2", {"q": "data=S(1) model=S(2)"})
    np.testing.assert_allclose(sharded(q, k, v), attention(q, k, v), rtol=1e-5, atol=1e-6)


def test_planned_steps_are_right_where_the_partitioner_is_wrong():
    names = names_of("docs/comparison.md")
    right = np.asarray(names["right"])
    np.testing.assert_allclose(names["planned"], right, rtol=0, atol=1e-6 * np.abs(right).max())
    assert names["plain"].shape == right.shape  # what it holds is the partitioner's affair
    right = np.asarray(names["x"]) @ np.asarray(names["w"])
    np.testing.assert_allclose(names["planned_product"], right, rtol=0, atol=1e-5 * np.abs(right).max())


def test_steps_on_nnx_objects():
    names = names_of("docs/frameworks/nnx.md")
    assert names["opt"].step[...] == names["metrics"].count[...] == 3
    assert "model" in names["model"].layers[0].kernel[...].sharding.spec[1]


def test_sums_in_fewer_bits_send_what_is_printed():
    found = blocks((ROOT / "docs/howto/low_precision.md").read_text())
    plain = [re.sub(r".*without this line.*\n", "", block.code) for block in found]
    assert "without this line, 5.51 MB" in found[0].code and plain[0] != found[0].code
    names = {"__name__": "low_precision"}
    exec(plain[0], names)
    assert f"{names['plan'].bytes / 1e6:.2f} MB" == "5.51 MB"


def test_named_dims_are_pinned_by_rules():
    names = names_of("docs/frameworks/named_dims.md")
    args = names["params"], names["optimizer"].init(names["params"]), names["batch"]
    assert str(names["fsdp"].plan(*args).layout("params/up").on("data")) == "S(0)"
    assert "S" in str(names["tensor"].plan(*args).layout("params/up").on("model"))


def test_printed_text_that_differs_is_seen():
    found = blocks("```python\nprint(1)\n```\n\n```text\n2\n```\n\n```python no-run\nimport torch\n```\n")
    assert [block.printed for block in found] == ["2\n"]
    assert outputs("page.py", found, {}) == ["1\n"]
