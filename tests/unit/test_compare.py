"""Rule compare: table values, dropped columns, marks, figures and error lines."""

import csv
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from docutils.core import publish_parts
from jinja2 import Environment

import compare
from finetune.cli import UserError
from finetune.summary import as_html, as_tsv, baseline_row, code_cells

OLD, NOW = "0" * 40, "1234567" + "8" * 33
CAPTIONS = Path(compare.__file__).parents[1] / "report"
SVG_TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def scores(**changes):
    """metrics.json. A metric set to None was not asked for."""
    full = {
        "rows": 79,
        "loss": 1.25,
        "perplexity": 3.49,
        "token_accuracy": 0.8,
        "exact_match": 0.5,
        "rouge_l": 0.9123456789,
        "generated_rows": 79,
        "peak_memory": {"host": 10**9},
        "wall_seconds": 33.0,
        "code": NOW,
    }
    full |= changes
    return {key: value for key, value in full.items() if value is not None}


MEMORY = {
    "process": {"predicted": 1_500_000_000, "corrected": 2_000_000_000, "measured": 2_082_115_584},
    "node": {"predicted": 3_000_000_000, "corrected": None, "measured": 4_500_000_000},
}
UNCALIBRATED = {
    "process": {"predicted": 1_487_351_939, "corrected": None, "measured": 2_082_115_584},
    "node": {"predicted": 2_500_000_000, "corrected": None, "measured": 3_500_000_000},
}


def facts(dataset, **changes):
    """train.json, as far as the table reads it."""
    return {
        "model_name": "small",
        "dataset_name": dataset,
        "settings": {"method": "qlora", "launch": "ddp"},
        "tokens_per_second": 1480.25,
        "peak_memory": {"host": 2_082_115_584},
        "memory": UNCALIBRATED,
        "wall_seconds": 90.0,
        "world_size": 2,
        "steps": 1200,
        "events": [],
        "code": NOW,
    } | changes


LOG = [
    {"step": 2, "loss": 4.0, "tokens": 100},
    {"step": 4, "loss": 3.0, "tokens": 200},
    {"step": 4, "eval_loss": 2.5},
    {"step": 4, "train_loss": 3.5},
]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Two runs and a baseline on `intents`, one run and no baseline on `news`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "code_commit", lambda: NOW)
    full = {"method": "full", "launch": "zero3"}
    peak = {"host": 5 * 10**9, "gpu": 1_250_000_000}
    runs = {
        "a-qlora": (facts("intents", memory=MEMORY), scores(json_equal=0.6)),
        "news-lora": (facts("news"), scores(rouge_l=0.25)),
        "b-full": (
            facts("intents", settings=full, peak_memory=peak, code=OLD),
            scores(loss=0.75, perplexity=2.117, json_equal=0.4),
        ),
    }
    for name, (record, metrics) in runs.items():
        write(tmp_path / name / "train.json", record)
        write(tmp_path / name / "metrics.jsonl", "".join(json.dumps(x) + "\n" for x in LOG))
        write(tmp_path / name / "evaluation" / "metrics.json", metrics)
    base = scores(loss=4.5, perplexity=90.02, exact_match=0.0, json_equal=0.0)
    write(tmp_path / "base" / "metrics.json", base)
    return tmp_path


RUNS = ("a-qlora:a-qlora", "news-lora:news-lora", "b-full:b-full")


def run_compare(monkeypatch, output, runs=RUNS, baselines=("small/intents:base",)):
    command = ["compare.py", "--output", str(output)]
    command += [part for run in runs for part in ("--run", run)]
    command += [part for baseline in baselines for part in ("--baseline", baseline)]
    monkeypatch.setattr(sys, "argv", command)
    compare.main()
    return output


def table(text):
    return list(csv.DictReader(io.StringIO(text), delimiter="\t"))


def svg_text(path):
    return SVG_TEXT.findall(path.read_text())


def cells(html, name):
    """Text of a row's cells, with the bold marks."""
    [row] = re.findall(rf'<tr><td class="text">{name}</td>(.*)</tr>', html)
    return re.findall(r"<td[^>]*>(.*?)</td>", row)


def test_tsv_holds_exact_values_by_dataset_with_the_baseline_first(results, monkeypatch, capsys):
    report = run_compare(monkeypatch, results / "report")
    rows = table((report / "summary.tsv").read_text())
    assert [row["name"] for row in rows] == ["small", "a-qlora", "b-full", "news-lora"]
    assert rows[0] == dict.fromkeys(rows[0], "") | {
        "name": "small",
        "model": "small",
        "dataset": "intents",
        "method": "base",
        "test_loss_nats_per_token": "4.5",
        "perplexity": "90.02",
        "token_accuracy": "0.8",
        "exact_match": "0.0",
        "rouge_l": "0.9123456789",
        "json_equal": "0.0",
        "code": "1234567",
    }
    assert rows[2] == {
        "name": "b-full",
        "model": "small",
        "dataset": "intents",
        "method": "full",
        "launch": "zero3",
        "test_loss_nats_per_token": "0.75",
        "perplexity": "2.117",
        "token_accuracy": "0.8",
        "exact_match": "0.5",
        "rouge_l": "0.9123456789",
        "json_equal": "0.4",
        "tokens_per_second": "1480.25",
        "peak_memory_gb": "1.25",
        "peak_memory_of": "GPU",
        "predicted_memory_gb": "1.487351939",
        "corrected_memory_gb": "",
        "host_memory_gb": "3.5",
        "predicted_host_gb": "2.5",
        "wall_minutes": "1.5",
        "world_size": "2",
        "steps": "1200",
        "code": "0000000",
        "code_note": "older code",
    }
    assert [rows[1][key] for key in rows[1] if "memory" in key or "host" in key] == [
        *("2.082115584", "host", "1.5", "2.0"),
        *("4.5", "3.0"),
    ]
    assert rows[3]["json_equal"] == ""
    said = capsys.readouterr().err
    assert said == f"runs: 3, baselines: 1; see {report}\n"


def test_nothing_but_the_four_files_is_left(results, monkeypatch):
    report = run_compare(monkeypatch, results / "report")
    names = ["loss.svg", "memory.svg", "summary.html", "summary.tsv"]
    assert sorted(path.name for path in report.iterdir()) == names


def test_a_metric_that_no_row_has_is_left_out_of_both_files(results, monkeypatch):
    report = run_compare(monkeypatch, results / "report", ["news-lora:news-lora"], [])
    text, html = ((report / f"summary.{kind}").read_text() for kind in ("tsv", "html"))
    [row] = table(text)
    assert "json_equal" not in row
    assert "json_valid" not in row
    assert row["rouge_l"] == "0.25"
    assert "equal JSON" not in html
    assert "valid JSON" not in html
    assert "exact match" in html


def test_html_shows_shares_as_percentages_and_units(results, monkeypatch):
    html = (run_compare(monkeypatch, results / "report") / "summary.html").read_text()
    assert cells(html, "b-full") == [
        *("small", "full", "zero3"),
        *("<b>0.750</b>", "<b>2.117</b>", "80.0%", "<b>50.0%</b>", "91.2%", "40.0%"),
        *("1,480", "1.5", "2", "1,200", "1.25 GPU", "1.49", "", "3.50", "2.50"),
        "0000000 older code",
    ]
    assert cells(html, "a-qlora")[-6:-1] == ["2.08 host", "1.50", "2.00", "4.50", "3.00"]
    assert "nats per supervised token" in html
    assert "1e9 bytes" in html
    assert "nan" not in html.lower()
    assert not re.search("(src|href)=", html)  # nothing outside the page


def test_bold_marks_the_best_of_each_dataset(results, monkeypatch):
    html = (run_compare(monkeypatch, results / "report") / "summary.html").read_text()
    base, qlora, news = (cells(html, name) for name in ("small", "a-qlora", "news-lora"))
    assert not any("<b>" in cell for cell in base)
    # exact match is shared by two; equal JSON is its own; token accuracy is alike in all
    assert [cell for cell in qlora if "<b>" in cell] == ["<b>50.0%</b>", "<b>60.0%</b>"]
    # the only model of its data set, though its ROUGE-L is the lowest of the table
    assert not any("<b>" in cell for cell in news)


def test_code_of_another_commit_is_marked():
    assert code_cells([NOW, NOW], NOW) == {"code": "1234567", "code_note": ""}
    assert code_cells([NOW, OLD], NOW) == {"code": "1234567", "code_note": "older code"}
    dirty = code_cells([NOW + "-dirty"], NOW)
    assert dirty == {"code": "1234567-dirty", "code_note": "older code"}
    assert code_cells([NOW, None], NOW) == {"code": "unknown", "code_note": ""}
    # outside git nothing is known of the present code
    assert code_cells([OLD], None) == {"code": "0000000", "code_note": ""}


def test_unfinished_thoughts_are_shown_where_there_are_any():
    def rows(*counts):
        return [
            baseline_row(f"m{n}", "news", scores(unfinished_thoughts=count), NOW)
            for n, count in enumerate(counts)
        ]

    first, second = table(as_tsv(rows(1200, 0)))
    assert (first["unfinished_thoughts"], second["unfinished_thoughts"]) == ("1200", "")
    assert "1,200" in cells(as_html(rows(1200, 0)), "m0")
    assert "unfinished_thoughts" not in as_tsv(rows(0, 0))


def test_names_are_escaped_in_html_alone():
    row = {"name": "<a>", "dataset": "x&y", "code": "unknown", "code_note": ""}
    html = as_html([row])
    assert '<td class="text">&lt;a&gt;</td>' in html
    assert "x&amp;y" in html
    assert as_tsv([row]).splitlines()[1].startswith("<a>\t\tx&y\t")


def test_loss_figure_has_a_panel_a_dataset_with_units_and_run_names(results, monkeypatch):
    text = svg_text(run_compare(monkeypatch, results / "report") / "loss.svg")
    assert {"a-qlora", "b-full", "news-lora"} <= set(text)
    assert text.count("optimizer step") == 2
    assert text.count("loss (nats per supervised token)") == 2
    assert "Loss on intents: training (lines), validation (diamonds)" in text
    assert "Loss on news: training (lines), validation (diamonds)" in text


def test_loss_figure_draws_the_logged_points(results):
    runs = [{"name": "a-qlora", "dataset": "intents"}]
    curves = {"a-qlora": compare.read_curves(results / "a-qlora" / "metrics.jsonl")}
    [panel] = compare.loss_figure(runs, curves, {}).axes
    training, validation = panel.get_lines()
    assert training.get_xydata().tolist() == [[2, 4.0], [4, 3.0]]
    assert validation.get_xydata().tolist() == [[4, 2.5]]


def test_loss_figure_shows_where_a_run_was_disturbed(results):
    runs = [{"name": name, "dataset": "intents"} for name in ("a-qlora", "calm")]
    curves = {run["name"]: {"loss": [(2, 4.0)], "eval_loss": []} for run in runs}
    steps = {"started": 0, "stopped": 7, "resumed": 7, "out of memory": 9}
    events = [{"event": event, "step": step} for event, step in steps.items()]
    [panel] = compare.loss_figure(runs, curves, {"a-qlora": events}).axes
    upright = [line for line in panel.get_lines() if list(line.get_xdata()) in ([7, 7], [9, 9])]
    assert len(upright) == 3
    assert {line.get_color() for line in upright} == {panel.get_lines()[0].get_color()}
    legend = [text.get_text() for text in panel.get_legend().get_texts()]
    assert legend == ["a-qlora", "calm", "resumed", "out of memory", "stopped"]


def test_memory_figure_tells_the_gpu_from_the_host(results, monkeypatch):
    text = svg_text(run_compare(monkeypatch, results / "report") / "memory.svg")
    assert {"a-qlora", "b-full", "news-lora"} <= set(text)
    assert {"predicted", "corrected by earlier runs", "measured, GPU"} <= set(text)
    assert text.count("measured, host") == 2
    assert text.count("memory (GB = 1e9 bytes)") == 2
    shown = {"1.49": 2, "2.08": 2, "1.25": 1, "1.50": 1, "2.00": 1, "3.00": 1, "4.50": 1}
    shown |= {"2.50": 2, "3.50": 2}
    assert {number: text.count(number) for number in shown} == shown


def test_the_same_records_give_the_same_bytes(results, monkeypatch):
    first = run_compare(monkeypatch, results / "first")
    second = run_compare(monkeypatch, results / "second")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_many_runs_without_logs_or_with_odd_names(results):
    names = ["_odd", *(f"run-{number}" for number in range(20))]
    runs = [{"name": name, "dataset": "intents"} for name in names]
    nothing = {"loss": [], "eval_loss": []}
    [panel] = compare.loss_figure(runs, dict.fromkeys(names, nothing), {}).axes
    assert [text.get_text() for text in panel.get_legend().get_texts()] == names
    looks = {(line.get_color(), line.get_linestyle()) for line in panel.get_lines()[::2]}
    assert len(looks) == len(names)


def test_a_step_logged_twice_counts_as_last(tmp_path):
    lines = [{"step": 4, "loss": 9.0}, {"step": 2, "loss": 4.0}, {"step": 4, "loss": 3.0}]
    write(tmp_path / "metrics.jsonl", "\n".join(map(json.dumps, lines)))
    curves = compare.read_curves(tmp_path / "metrics.jsonl")
    assert curves == {"loss": [(2, 4.0), (4, 3.0)], "eval_loss": []}


LACKING = (
    "model_name, dataset_name, settings, tokens_per_second, peak_memory, memory, wall_seconds, "
    "world_size, events, code"
)


@pytest.mark.parametrize(
    ("path", "content", "text"),
    [
        ("a-qlora/train.json", None, "a-qlora/train.json is missing. Run your command"),
        ("a-qlora/metrics.jsonl", None, "a-qlora/metrics.jsonl is missing"),
        ("base/metrics.json", None, "base/metrics.json is missing"),
        ("a-qlora/evaluation/metrics.json", '{"loss": 1', "metrics.json is not JSON"),
        ("a-qlora/metrics.jsonl", '{"step": 1}\n{"st', "metrics.jsonl is not JSON"),
        ("a-qlora/train.json", '{"steps": 1}', f"train.json lacks {LACKING}: other code wrote it"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(results, monkeypatch, path, content, text):
    (results / path).unlink()
    if content is not None:
        write(results / path, content)
    with pytest.raises(UserError, match=re.escape(text)):
        run_compare(monkeypatch, results / "report")
    assert not (results / "report").exists()


def test_names_without_a_folder_are_refused(results, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_compare(monkeypatch, results / "report", ["a-qlora"])
    assert "'a-qlora' is not NAME:FOLDER" in capsys.readouterr().err
    with pytest.raises(UserError, match="must start with MODEL/DATASET"):
        run_compare(monkeypatch, results / "report", baselines=["small:base"])


@pytest.mark.parametrize("path", sorted(CAPTIONS.glob("*.rst")), ids=lambda path: path.stem)
def test_captions_render_without_a_warning(path):
    # Snakemake adds the targets itself (snakemake.report)
    links = "\n\n.. _Workflow: javascript:w\n.. _Statistics: javascript:s\n"
    config = {"runs": {"a-qlora": {}, "b-full": {}}}
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    source = environment.from_string(path.read_text(encoding="utf-8") + links)
    text = source.render(snakemake=SimpleNamespace(config=config))
    html = publish_parts(text, writer="html", settings_overrides={"halt_level": 2})["html_body"]
    if path.stem == "workflow":
        assert ">b-full</span></tt>.</p>" in html  # a paragraph of its own


CLASSES = {
    "loss": 0.5,
    "accuracy": 0.75,
    "macro_f1": 0.5,
    "per_class": {
        "a<b": {"precision": 0.75, "recall": 1.0, "f1": 6 / 7, "rows": 3},
        "none\u202e": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "rows": 1},
    },
    "confusion_matrix": {"labels": ["a<b", "none\u202e"], "counts": [[3, 0], [1, 0]]},
    "code": NOW,
}


@pytest.fixture
def with_classifier(results):
    """A classifier and its baseline beside the rest."""
    write(results / "spam" / "train.json", facts("spam", settings={"method": "lora"} | DDP))
    write(results / "spam" / "metrics.jsonl", "".join(json.dumps(x) + "\n" for x in LOG))
    write(results / "spam" / "evaluation" / "metrics.json", CLASSES)
    prior = CLASSES | {"baseline": "class prior", "loss": 0.625, "accuracy": 0.75}
    write(results / "prior" / "metrics.json", prior)
    return results


DDP = {"launch": "ddp"}
SPAM = ((*RUNS, "spam:spam"), ("small/intents:base", "small/spam:prior"))


def test_a_classifier_has_metrics_of_its_own_in_the_same_table(with_classifier, monkeypatch):
    report = run_compare(monkeypatch, with_classifier / "report", *SPAM)
    rows = {row["name"]: row for row in table((report / "summary.tsv").read_text())}
    spam, text = rows["spam"], rows["a-qlora"]
    scores = [spam[key] for key in ("test_loss_nats_per_row", "accuracy", "macro_f1")]
    assert scores == ["0.5", "0.75", "0.5"]
    assert not spam["perplexity"] + spam["token_accuracy"] + spam["test_loss_nats_per_token"]
    assert not text["accuracy"] + text["macro_f1"] + text["test_loss_nats_per_row"]
    html = (report / "summary.html").read_text()
    body = html.partition(">spam</th>")[2].partition("</tbody>")[0]
    assert cells(body, "small")[1:6] == ["class prior", *[""] * 4]
    assert "<td>0.625</td>" in body
    assert "<b>0.500</b>" in body  # the best of the data set, though a-qlora's 1.25 is higher
    assert "loss (nats per row)" in svg_text(report / "loss.svg")
    assert "loss (nats per supervised token)" in svg_text(report / "loss.svg")


def test_each_classifier_has_a_section_on_its_classes(with_classifier, monkeypatch):
    html = (
        run_compare(monkeypatch, with_classifier / "report", *SPAM) / "summary.html"
    ).read_text()
    [section] = html.split("<h2>")[1:]
    assert section.startswith("spam on spam: classes</h2>")
    titles = re.findall("<th[^>]*>(.*?)</th>", section.partition("</thead>")[0])
    assert titles == ["class", "precision", "recall", "F1", "rows", "a&lt;b", "none<i>U+202E</i>"]
    lines = re.findall("<tr><th scope=.row.>(.*?)</th>(.*)</tr>", section.partition("<tbody>")[2])
    assert [name for name, _ in lines] == titles[-2:]
    found = [re.findall("<td>(.*?)</td>", line) for _, line in lines]
    assert found[0] == ["75.0%", "100.0%", "85.7%", "3", "<b>3</b>", ""]
    assert found[1] == ["0.0%", "0.0%", "0.0%", "1", "1", ""]
    assert html.endswith("</table>\n</body>\n</html>\n")


def test_without_a_classifier_there_is_no_section_and_no_column_of_one(results, monkeypatch):
    report = run_compare(monkeypatch, results / "report")
    html, text = ((report / f"summary.{kind}").read_text() for kind in ("html", "tsv"))
    assert "<h2>" not in html
    assert "macro_f1" not in text
    assert "test_loss_nats_per_row" not in text


def test_scores_of_a_classifier_that_lack_the_matrix_are_named(with_classifier, monkeypatch):
    write(with_classifier / "spam" / "evaluation" / "metrics.json", {"loss": 1, "accuracy": 1})
    with pytest.raises(UserError, match="lacks macro_f1, per_class, confusion_matrix, code"):
        run_compare(monkeypatch, with_classifier / "report", *SPAM)
