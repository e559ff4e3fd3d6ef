"""`snakemake --report`: one page with the table, the figures and their captions."""

from pathlib import Path

from project import snakemake


def test_report_is_one_page_with_captions(finished: Path) -> None:
    done = snakemake("--configfile", "config.yaml", "--report", "report.html", cwd=finished)
    assert done.returncode == 0, done.stdout
    page = (finished / "report.html").read_text()
    for name in ("summary.html", "loss.svg", "memory.svg", "tiny-qlora", "Comparison", "Training"):
        assert name in page
    assert "took a base model and a data set through one chain" in page
