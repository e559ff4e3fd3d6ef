"""The page of the data check: well-formed, escaped, and each number at its place."""

import re
from html.parser import HTMLParser

import pytest

from finetune.lint_page import lint_page, ticks
from lint_record import EMPTY, LABELLED, lint

EVIL = "<script>alert('1')</script>&\u202e"
SHOWN = EVIL.replace("\u202e", "U+202E")
VOID = {"meta"}


class Page(HTMLParser):
    """Every element with what holds it, and its text. Fails on a tag that does not close."""

    def __init__(self, html):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names))
        element = {
            "tag": tag,
            "attrs": dict(attrs),
            "text": "",
            "in": [e["tag"] for e in self.open],
        }
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, **attrs):
        attrs = {name.rstrip("_"): value for name, value in attrs.items()}
        found = [e for e in self.elements if e["tag"] == tag]
        return [e for e in found if attrs.items() <= e["attrs"].items()]

    def texts(self, tag, **attrs):
        return [element["text"] for element in self.all(tag, **attrs)]


def page(record, failed=()):
    return Page(lint_page("intents for tiny", record, list(failed)))


def table(record):
    """Title of each row -> its cells."""
    html = lint_page("t", record, [])
    rows = [Page(f"<tr>{row}</tr>") for row in re.findall("<tr>(.*?)</tr>", html)]
    return {row.texts("th")[0]: row.texts("td") for row in rows if row.all("th", scope="row")}


FULL = lint(
    packing={"padding_before": 0.41, "padding_after": 0.03},
    prepared={"duplicates": 1231, "rejected": {"no answer": 3, "no turns": 1}, "overlap": 12},
    train={
        **{"rows": 12000, "examples": 13000, "sequences": 4000, "tokens": 2_500_000},
        **{"supervised_tokens": 1_000_000, "longest": 511, "truncated": 600, "rewritten": 240},
        **{"quantiles": {"p50": 190, "p90": 1080, "p99": 1811}, "eos_tokens": 26_000},
        **{"dropped": {"too_long": 1200, "unsupervised": 6}, "control_tokens": 120},
        **{"empty_thoughts": 77, "with_bos": 6500, "endings": 12_400, "ended": 12_276},
    },
    validation={"rows": 700, "dropped": {"too_long": 7}},
)
CELLS = {
    "rejected": ["3 x no answer; 1 x no turns"],
    "duplicates left out": ["1,231"],
    "test rows with a prompt that is trained on": ["", "", "12 (6.0%)"],
    "rows read": ["12,000", "700", "200"],
    "left out: too long": ["1,200 (10.0%)", "7 (1.0%)", "0"],
    "left out: nothing to learn from": ["6 (0.1%)", "0", "0"],
    "cut to max_length": ["600 (5.0%)", "0", "0"],
    "made into several examples, since the template rewrites earlier turns": [
        *("240 (2.0%)", "0", "0")
    ],
    "hold control tokens of the model": ["120 (1.0%)", "0", "0"],
    "examples": ["13,000", "1,000", "1,000"],
    "start with BOS": ["6,500 (50.0%)", "0", "0"],
    "end a turn, of those not cut at the end": ["99.0%", "100.0%", "100.0%"],
    "sequences, packed or not": ["4,000", "1,000", "1,000"],
    "tokens": ["2,500,000", "100,000", "100,000"],
    "supervised": ["40.0%", "40.0%", "40.0%"],
    "before cutting: median (p50)": ["190", "90", "90"],
    "before cutting: p90": ["1,080", "200", "200"],
    "before cutting: p99": ["1,811", "400", "400"],
    "longest": ["511", "480", "480"],
    "EOS tokens": ["26,000", "2,000", "2,000"],
    "empty thoughts that are learned": ["77", "0", "0"],
    "packing": ["not asked for"],
    "padding, rows in random order": ["41.0%"],
}


def test_every_number_stands_at_its_place():
    assert table(FULL) == CELLS
    assert page(FULL).texts("th", scope="col") == ["train", "validation", "test"]


@pytest.mark.parametrize(
    ("packing", "cells"),
    [
        (
            {"asked": True, "used": True, "efficiency": 0.97},
            {
                "packing": ["used"],
                "padding, rows in random order": ["41.0%"],
                "padding, packed": ["3.0%"],
                "packing efficiency": ["97.0%"],
            },
        ),
        (
            {"asked": True, "used": False, "why_not": f"sdpa {EVIL}"},
            {
                "packing": [f"asked for, but not used: sdpa {SHOWN}"],
                "padding, rows in random order": ["41.0%"],
            },
        ),
    ],
    ids=["used", "not used"],
)
def test_packing_says_what_it_saved_or_why_it_was_not_used(packing, cells):
    shown = table(lint(FULL, packing=packing))
    names = {"packing", "padding, rows in random order", "padding, packed", "packing efficiency"}
    assert {name: shown[name] for name in shown if name in names} == cells


def test_figures_of_answers_are_left_out_for_labelled_rows():
    gone = {
        "supervised",
        "end a turn, of those not cut at the end",
        "empty thoughts that are learned",
        "left out: nothing to learn from",
        "made into several examples, since the template rewrites earlier turns",
    }
    rows = set(table(LABELLED)) - {"sport", "news"}
    assert rows == set(CELLS) - gone


def test_an_empty_split_divides_by_nothing():
    record = lint(validation=EMPTY, test=EMPTY, prepared={"rows": {"test": 0}})
    shown = table(record)
    assert shown["rows read"] == ["1,000", "0", "0"]
    assert shown["supervised"] == ["40.0%", "\N{EN DASH}", "\N{EN DASH}"]
    assert shown["before cutting: p99"] == ["400", "\N{EN DASH}", "\N{EN DASH}"]
    assert shown["test rows with a prompt that is trained on"] == ["", "", "0"]
    assert page(record).texts("p").count("None.") == 2


def test_a_page_of_nothing_at_all():
    shown = page(lint(train=EMPTY, validation=EMPTY, test=EMPTY), ["no rows"])
    assert "No training examples." in shown.texts("p")
    assert shown.all("svg") == []


def test_the_caption_names_the_settings_that_say_something():
    settings = {"system_prompt": f"Be brief. {EVIL}", "template_options": {"think": False}}
    assert page(lint(settings=settings)).texts("caption") == [
        f"Made with system_prompt: Be brief. {SHOWN}, train_on: completions, max_length: 512, "
        'truncate: drop, packing: false, trust_remote_code: false, template_options: {"think": '
        "false}."
    ]
    assert page(lint()).texts("caption") == [
        "Made with train_on: completions, max_length: 512, truncate: drop, packing: false, "
        "trust_remote_code: false."
    ]


def test_the_verdict_comes_first_and_in_words():
    passed, one = page(lint()), page(lint(), [f"bad {EVIL}"])
    two = page(lint(), ["bad", "worse"])
    assert passed.texts("p", class_="verdict passed") == ["\N{CHECK MARK} All checks passed."]
    assert one.texts("h2")[0] == "\N{BALLOT X} 1 check failed: runs on this data will not start"
    assert one.texts("li") == [f"bad {SHOWN}"]
    assert two.texts("h2")[0].startswith("\N{BALLOT X} 2 checks failed")
    assert two.texts("li") == ["bad", "worse"]
    for shown in (passed, one):
        body = [e for e in shown.elements if e["in"] == ["html", "body"]]
        assert [e["tag"] for e in body[:1]] == ["h1"]
        assert body[1]["attrs"]["class"].startswith("verdict")


def test_a_note_stands_below_the_verdict():
    shown = page(FULL)
    body = [e for e in shown.elements if e["in"] == ["html", "body"]]
    assert [e["tag"] for e in body[:4]] == ["h1", "p", "p", "h2"]
    assert shown.texts("p")[1].startswith("Note: 77 training answers begin with an empty thought")
    assert not any(text.startswith("Note:") for text in page(lint()).texts("p"))


def test_the_page_is_whole_and_accessible():
    html = lint_page("intents for tiny", lint(), [])
    shown = Page(html)
    assert shown.all("html", lang="en")
    assert shown.texts("h1") == shown.texts("title")[:1] == ["Data check: intents for tiny"]
    assert shown.texts("h2") == ["Counts", "Length of the training examples", "Samples"]
    assert shown.texts("h3") == ["train", "validation", "test"]
    assert all("scope" in th["attrs"] for th in shown.all("th"))
    [svg] = shown.all("svg", role="img")
    [title] = shown.texts("title", id=svg["attrs"]["aria-labelledby"])
    assert " ".join(title.split()) == (
        "How many of 1,000 training examples have how many tokens before cutting; max_length is 512"
    )
    assert not re.search("(src|href|url)\\b", html)  # nothing outside the page
    assert shown.all("script") == []


def test_nothing_of_the_data_becomes_markup():
    sample = {"id": EVIL, "label": EVIL, "pieces": [[False, EVIL], [True, f"{EVIL}{{x}}"]]}
    record = lint(
        LABELLED,
        labels=[EVIL, "news"],
        prepared={"rejected": {EVIL: 2}},
        train={"samples": [sample]},
    )
    shown = Page(lint_page(EVIL, record, []))
    assert shown.all("script") == []
    assert shown.texts("h1") == shown.texts("title")[:1] == [f"Data check: {EVIL}"]
    assert shown.texts("h4")[0] == f"{SHOWN} \N{EM DASH} label: {SHOWN}"
    assert shown.texts("pre")[0] == f"{SHOWN}{SHOWN}{{x}}"
    assert shown.texts("mark") == [f"{SHOWN}{{x}}", "hello</s>", "hello</s>"]
    assert SHOWN in shown.texts("th", scope="row")
    assert f"2 x {SHOWN}" in shown.texts("td")


def test_the_supervised_part_is_marked_and_told_in_the_legend():
    shown = page(lint())
    assert shown.texts("mark") == ["Marked", *["hello</s>"] * 3]
    assert (
        shown.texts("pre") == ["user: hi\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\nhello</s>"] * 3
    )
    style = shown.texts("style")[0]
    assert re.search("mark {[^}]*background: #[^}]*underline", style)
    assert re.search("pre {[^}]*pre-wrap[^}]*max-height[^}]*overflow: auto", style)
    assert all(pre["attrs"]["tabindex"] == "0" for pre in shown.all("pre"))
    assert "Marked text is trained on" in " ".join(shown.texts("p"))
    signs = ["\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\N{RIGHTWARDS ARROW}", "U+200B"]
    assert shown.texts("i")[:3] == signs
    assert "learns the label above it" in " ".join(page(LABELLED).texts("p"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a<i>\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}</i>\nb"),
        ("a\tb", "a<i>\N{RIGHTWARDS ARROW}</i>\tb"),
        ("a\r\0\x7f", "a<i>U+000D</i><i>U+0000</i><i>U+007F</i>"),
        ("a\u200b\u00a0\u202e\ufeff", "a<i>U+200B</i><i>U+00A0</i><i>U+202E</i><i>U+FEFF</i>"),
        ("\ud83d \U000e0041", "<i>U+D83D</i> <i>U+E0041</i>"),
        ("\u0645\u06cc\u200c\u062e \N{WOMAN}\u200d\N{GIRL}",) * 2,
        ("<|im_end|></s>", "&lt;|im_end|&gt;&lt;/s&gt;"),
    ],
)
def test_characters_that_cannot_be_seen_are_shown(text, shown):
    html = lint_page("t", lint(train={"samples": [{"id": "1", "pieces": [[False, text]]}]}), [])
    assert f">{shown}</pre>" in html
    html.encode()  # a lone surrogate could not be written


def percents(element, *names):
    """Where it is in the plot."""
    return [float(element["attrs"][name].removesuffix("%")) for name in names]


def lengths(edges, counts, max_length):
    """The page of training examples of these lengths."""
    train = {"histogram": {"edges": edges, "counts": counts}}
    return page(lint(train=train, settings={"max_length": max_length}))


def test_bars_are_as_high_as_their_counts_and_stand_on_their_tokens():
    bars = lengths([0, 100, 200, 300, 400, 500], [600, 300, 0, 75, 25], 500).all("rect")
    places = [percents(bar, "x", "height") for bar in bars]
    assert places == [[0, 100], [20, 50], [60, 12.5], [80, 4.167]]  # none for 0
    assert [sum(percents(bar, "y", "height")) for bar in bars] == [100] * 4
    widths = [percents(bar, "width")[0] for bar in bars]
    assert widths == pytest.approx([20 - 100 / 620] * 4, abs=1e-3)  # a pixel parts them


def test_bars_say_their_bin_and_axes_their_unit():
    shown = page(lint())
    assert shown.texts("title")[2:4] == ["0 to 100 tokens: 600", "100 to 200 tokens: 300"]
    assert shown.texts("text", class_="axis") == ["tokens per example", "training examples"]
    assert shown.texts("text", class_="tick") == [
        *("0", "200", "400"),
        *("0", "200", "400", "600"),
    ]


@pytest.mark.parametrize(
    ("max_length", "text", "at"),
    [
        (125, "max_length 125", 25),
        (500, "max_length 500", 100),
        (750, "max_length 750", 100),
        (4000, "max_length 4,000 \N{RIGHTWARDS ARROW}", None),
    ],
)
def test_max_length_is_marked_where_it_lies(max_length, text, at):
    shown = lengths([0, 500], [3], max_length)
    assert shown.texts("text", class_="limit") == [text]
    lines = [percents(line, "x1", "x2") for line in shown.all("line", class_="limit")]
    assert lines == ([] if at is None else [[at, at]])


def test_all_rows_of_one_length_make_a_bar_that_can_be_seen():
    [bar] = lengths([2048, 2049], [7], 2048).all("rect")
    assert percents(bar, "width", "height") == [pytest.approx(100 / 620, abs=1e-3), 100]


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (1, [0, 1]),
        (7, [0, 2, 4, 6]),
        (500, [0, 100, 200, 300, 400, 500]),
        (600, [0, 200, 400, 600]),
        (12_345, [0, 5000, 10_000]),
    ],
)
def test_ticks_are_whole_and_round(top, expected):
    assert list(ticks(top)) == expected


def classes(labels, counts):
    """The table of classes, without the page around it."""
    html = lint_page("t", lint(LABELLED, labels=labels, label_counts=counts), [])
    return Page(re.search("<h2>Classes</h2>\n(.*?)<h2>", html, re.S)[1])


def test_classes_are_bars_in_proportion_with_the_largest_first():
    shown = classes(["sport", "a<b", "none"], [250, 750, 0])
    assert shown.texts("th", scope="row") == ["a<b", "sport", "none"]
    cells = [cell.strip() for cell in shown.texts("td")]
    assert cells == ["", "750", "75.0%", "", "250", "25.0%", "", "0", "0.0%", ""]
    assert [percents(bar, "width") for bar in shown.all("rect")] == [[100], [33.3], [0]]
    assert "Classes" not in page(lint()).texts("h2")


def test_classes_without_rows_divide_by_nothing():
    shown = classes(["a", "b"], [0, 0])
    assert [percents(bar, "width") for bar in shown.all("rect")] == [[0], [0]]
