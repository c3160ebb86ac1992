"""What answers are drawn as: maths, code, lists, links; and that nothing in them runs."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect

from tests.client.fake_server import FakeServer, Script
from tests.page.test_page import answers, say


def drawn(page: Page, server: FakeServer, text: str) -> Locator:
    server.script = Script(words=[text[start : start + 7] for start in range(0, len(text), 7)])
    say(page, "show")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    return answers(page).last.locator(".prose")


# Source, and what its MathML must have in it.
FORMULAS = [
    ("$x^2$", "msup"),
    (r"\(a_i'\)", "msubsup"),
    (r"$\frac{a+b}{\sqrt[3]{c}}$", "mfrac mroot"),
    (r"$$\sum_{n=1}^\infty n$$", "munderover"),
    (r"\[\left[ x \right)\]", "mo"),
    (r"$\mathbb{R}^n$", "msup"),
    (r"$$\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}$$", "mtable mtr"),
    (r"$\boldsymbol{\theta} + \bm{W}x$", "mi"),
    (r"$$\operatorname*{argmax}_{x} f(x)$$", "munder"),
    (r"$$\sum_{\substack{i<j \\ k>0}} x_{ij}$$", "munder mtable"),
    (r"$$f(x) = \begin{cases} x^2 & x>0 \\ 0 & \text{otherwise} \end{cases}$$", "mtable mtext"),
    ("\\[\n\\begin{aligned}\na &= b \\\\\n  &= c\n\\end{aligned}\n\\]", "mtable"),
    ("\\begin{align*}\na &= b \\\\\nc &= d\n\\end{align*}", "mtable"),
    ("It follows:\n$$\nE = mc^2\n$$", "msup"),
    (r"- in a list: $\mathcal{L}$ and \(y\)", "mi"),
    (r"**bold with $a*b$ in it*s* middle**", "mi"),
    ("| a |\n|---|\n| $|x|$ and $P(A|B)$ |", "mi"),
]


def test_formulas_become_mathml(page: Page, server: FakeServer) -> None:
    prose = drawn(page, server, "\n\n---\n\n".join(source for source, _ in FORMULAS))
    expect(prose.locator("math")).to_have_count(len(FORMULAS) + 2)
    expect(prose.locator(".maths:not(.drawn)")).to_have_count(0)
    parts = prose.evaluate(
        """node => {
            const parts = [[]];
            for (const child of node.children)
                if (child.tagName === "HR") parts.push([]);
                else parts.at(-1).push(...[...child.querySelectorAll("math *")].map(each => each.tagName));
            return parts;
        }"""
    )
    for (source, names), found in zip(FORMULAS, parts, strict=True):
        assert set(names.split()) <= set(found), source
    assert "\\" not in prose.inner_text() and "$" not in prose.inner_text()
    displays = prose.locator("math[display=block]")
    expect(displays).to_have_count(
        sum("$$" in source or "\\[" in source or "align*" in source for source, _ in FORMULAS)
    )


NOT_MATHS = [
    "It costs $5 and $6.",
    "From $5-$10 to $20k and US$30 or (5$), A$6 and 7$.",
    "$5 per item, or 10$ for two.",
    "**$5** and **$10**, $1,000 or 2,000$.",
    "cd $HOME/$USER && echo $PATH",
    r"$\href{javascript:alert(1)}{x}$",
    r"$\includegraphics{https://example.org/x.png}$",
    r"$\unknown{x}$",
    r"$\frac{a}$",
    r"$\begin{evil} x \end{evil}$",
    r"$\def\a{\a\a}\a$",
    "a $x",
]


def test_what_is_no_maths_or_not_understood_stays_as_it_is(page: Page, server: FakeServer) -> None:
    prose = drawn(page, server, "\n\n".join([*NOT_MATHS, "`$x$`", "$y$"]))
    expect(prose.locator("math")).to_have_count(1)  # Temml is there, and left the others alone
    shown = [text.replace("**", "") for text in [*NOT_MATHS, "$x$"]]
    assert prose.locator("p").all_inner_texts()[:-1] == shown


def test_lists_of_tasks_struck_text_and_bare_links(page: Page, server: FakeServer) -> None:
    prose = drawn(
        page,
        server,
        "- [x] done\n- [ ] to do\n\n~~gone~~ and a~b~c\n\nSee https://example.org/a_(b)?c=1, "
        "(https://example.org/d). Not javascript:alert(1) or ftp://x.",
    )
    boxes = prose.get_by_role("checkbox")
    expect(boxes).to_have_count(2)
    assert [boxes.nth(number).is_checked() for number in range(2)] == [True, False]
    expect(boxes.first).to_be_disabled()
    expect(prose.locator("del")).to_have_text(["gone"])
    links = prose.get_by_role("link").evaluate_all("nodes => nodes.map(node => [node.href, node.rel])")
    assert links == [
        ["https://example.org/a_(b)?c=1", "noopener noreferrer"],
        ["https://example.org/d", "noopener noreferrer"],
    ]


CODE = [
    ("python", 'def f(x):  # say\n    return "a#b" + 1.5\n', {"keyword": "def", "comment": "# say", "string": '"a#b"'}),
    ("js", "const a = 1; // end", {"keyword": "const", "comment": "// end", "number": "1"}),
    ("html", '<a href="x">', {"name": "a", "attr": "href", "string": '"x"'}),
    ("diff", "-old\n+new\n", {"deletion": "-old", "addition": "+new"}),
    ("nothing-known", "if x: 1", {}),
    ("", "<b>if</b>", {}),
]


def test_code_has_colours_and_keeps_its_text(page: Page, server: FakeServer) -> None:
    prose = drawn(page, server, "\n\n".join(f"```{language}\n{code}\n```" for language, code, _ in CODE))
    expect(prose.locator(".hljs-deletion")).to_have_count(1)
    blocks = prose.locator("pre code").all()
    for (language, code, expected), block in zip(CODE, blocks, strict=True):
        assert block.evaluate("node => node.textContent") == code, language
        for kind, text in expected.items():
            assert block.locator(f".hljs-{kind}").first.inner_text() == text, language
        assert expected or block.locator("span").count() == 0


HOSTILE = r"""
<script>window.owned = 1</script><img src=x onerror="window.owned = 1"><svg onload="window.owned = 1">

$\text{<img src=x onerror="window.owned=1">}$ and $<script>window.owned=1</script>$ and $\mathrm{<b>}$

$$\begin{pmatrix} <iframe srcdoc="<script>parent.owned=1</script>"> \end{pmatrix}$$

```html onload=window.owned=1
<script>window.owned = 1</script><img src=x onerror=window.owned=1>
```

![x](https://example.org/pixel.png) ![](javascript:window.owned=1) ![x](data:image/svg+xml,<svg/onload=1>)
<a href="javascript:window.owned=1">x</a> <math><mtext><style><img src=x onerror=window.owned=1></style></mtext></math>
<details open ontoggle=window.owned=1> <sub onclick=window.owned=1>x</sub> [x][1] <javascript:window.owned=1>

[1]: javascript:window.owned=1

~~<b onmouseover="window.owned=1">x</b>~~ [x](javascript:window.owned=1) [y](data:text/html,<script>1</script>)
https://example.org/"onclick="window.owned=1 [<img src=x onerror=window.owned=1>](https://example.org/ok)

- [x] <img src=x onerror="window.owned = 1">

| <img src=x onerror="window.owned = 1"> |
|---|
| $<img src=x>$ |
"""
ALLOWED = {
    *("A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H1", "H2", "H3", "H4", "HR", "INPUT", "LI", "OL"),
    *("P", "PRE", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"),
    *("math", "mspace", "mi", "mn", "mo", "mrow", "mtext", "mtable", "mtr", "mtd"),
}


def test_nothing_that_a_model_writes_runs_or_is_fetched(page: Page, server: FakeServer) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    prose = drawn(page, server, HOSTILE)
    expect(prose.locator("math").first).to_be_visible()
    tags = prose.evaluate("node => [...new Set([...node.querySelectorAll('*')].map(each => each.tagName))]")
    assert set(tags) <= ALLOWED
    attributes = prose.evaluate(
        """node => [...node.querySelectorAll("*")].filter(each => !each.closest("math"))
            .flatMap(each => each.getAttributeNames())"""
    )
    assert set(attributes) <= {
        "class",
        "href",
        "target",
        "rel",
        "type",
        "disabled",
        "checked",
        "aria-label",
        "tabindex",
    } | {"role"}
    hrefs = prose.locator("a").evaluate_all("nodes => nodes.map(node => node.protocol + '//' + node.host)")
    assert hrefs and set(hrefs) == {"https://example.org"}
    assert page.evaluate("window.owned") is None
    assert all(url.startswith(server.url) for url in asked)


def test_no_script_can_make_html_of_a_string(page: Page) -> None:
    """Trusted Types: only DOMPurify may, so that no mistake of the page's own code lets an answer in."""
    attempt = """() => {
        try { document.createElement("div").innerHTML = "<b>x</b>"; } catch (error) { return error.name; }
    }"""
    assert page.evaluate(attempt) == "TypeError"


def test_an_answer_that_grows_is_drawn_as_the_whole_is(page: Page, server: FakeServer) -> None:
    """Piece by piece, with what can no longer change drawn once, and at once after a reload."""
    text = "\n\n".join(
        [
            "# Title", "One\ntwo **three**", "- a\n\n  more\n- b", "1. x\n2. y", "```py\nif x:\n\n    y = 1\n```",
            "end", "> quote\n> more", "~~~\n```\nstill code\n~~~", "| a |\n|---|\n| b |", r"$$x^2$$", "last `code`",
        ]
    )  # fmt: skip
    server.script = Script(words=list(text), gap_s=0.001)
    say(page, "show")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    grown = answers(page).locator(".prose").evaluate("node => node.innerHTML")
    page.reload()
    expect(answers(page)).to_have_count(1)
    assert answers(page).locator(".prose").evaluate("node => node.innerHTML") == grown


def test_figures_wrap_without_a_dot_at_an_edge_and_no_bar_is_empty(page: Page, server: FakeServer) -> None:
    page.set_viewport_size({"width": 390, "height": 700})
    server.script = Script(num_prompt_tokens=21, num_cached_tokens=0, miss="short")
    say(page, "short")
    expect(page.locator(".figures")).to_contain_text("21 prompt tokens")
    expect(page.locator(".bar")).to_have_count(0)
    expect(page.locator(".figures")).not_to_contain_text("cached")
    server.script = Script(words=["a "] * 40, gap_s=0.01, num_prompt_tokens=41000, num_cached_tokens=30720)
    say(page, "long")
    figures = page.locator(".figures").nth(1)
    expect(figures).to_contain_text("tokens/s")
    box = figures.bounding_box()
    assert box is not None
    rows: dict[int, list[float]] = {}
    for span in figures.locator("span").all():
        place = span.bounding_box()
        assert place is not None
        rows.setdefault(round(place["y"] + place["height"] / 2) // 12, []).append(place["x"])
    assert len(rows) == 2
    assert all(min(starts) < box["x"] for starts in rows.values())  # the dot of a line's first figure is cut off


SHAPES = {
    "backticks": "`" * 80_000,
    "runs of backticks": "` `` " * 16_000,
    "a heading of blanks": "# " + " " * 80_000 + "x",
    "a fence of blanks": "```" + " " * 80_000 + "`",
    "a table's rule": "|a\n" + " " * 80_000 + "-:-",
    "open maths": "\\(" * 40_000,
    "dollars": "$a " * 26_000,
    "brackets": "[" * 80_000,
    "a link's brackets": "https://x.org/" + ")" * 80_000,
    "quotes in quotes": ">" * 80_000,
    "lists in lists": "".join(" " * depth + "- a\n" for depth in range(400)),
    "fractions in fractions": "$" + "\\frac" * 390 + "$",
    "braces in braces": "$" + "{" * 1999 + "$",
    "a table's head": "|" + "a|" * 50_000 + "\n|" + "-|" * 50_000 + "\n" + "|1\n" * 10_000,
    "a megabyte of code": "```py\n" + "x = 1  # why\n" * 80_000 + "\n```",
    "names with lines": "a_" * 40_000,
    "open formulas": "\\[\n" * 16_000,
    "comments": "```js\n" + "/*" * 40_000 + "\n```",
    "a long name": "```js\n" + "a" * 60_000 + "\n```",
}


def test_no_shape_of_text_stops_the_page(page: Page, server: FakeServer) -> None:
    """What takes time with the square of its length takes minutes here; the sum of all is a few seconds."""
    draw = """async text => {
        const { Prose } = await import("/static/prose.js");
        const prose = new Prose(), started = performance.now();
        prose.show(text, true);
        return performance.now() - started;
    }"""
    page.set_default_timeout(60_000)
    took_ms = {name: page.evaluate(draw, text) for name, text in SHAPES.items()}
    assert sum(took_ms.values()) < 30_000, took_ms
