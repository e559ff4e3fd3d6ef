"""The edge of every script: one line on the terminal, the traceback in the log, exit code 1."""

import subprocess
import sys
from pathlib import Path

import pytest

from finetune import cli

SCRIPTS = Path(cli.__file__).parents[1]
HEAD = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\nfrom finetune.cli import *\n"


def run(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """A rule's script with this `main`, run as a rule runs it: stdout and stderr apart."""
    script = folder / "some_rule.py"
    script.write_text(f"{HEAD}def main():\n    {body}\nrun_script(main)\n", encoding="utf-8")
    return subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True)


def test_success_says_what_it_says_and_no_more(tmp_path) -> None:
    done = run(tmp_path, "say('12 rows')")
    line = "some_rule: 12 rows\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, line, line)


def test_lines_and_refusals_name_whose_work_it_is(tmp_path) -> None:
    """Several runs are planned and trained at once."""
    done = run(tmp_path, "speak_for('one-run'); say('12 rows'); raise UserError('no row')")
    assert done.stdout == "some_rule one-run: 12 rows\nERROR some_rule one-run: no row\n"


def test_a_line_that_names_its_run_is_shown_as_it_is(tmp_path) -> None:
    done = run(tmp_path, "speak_for('one-run'); show('one-run: step 1/2')")
    assert done.stdout == "one-run: step 1/2\n"


def test_refusal_is_one_line_without_a_traceback(tmp_path) -> None:
    done = run(tmp_path, "raise UserError('no such file: é.csv')")
    assert done.returncode == 1
    assert done.stdout == "ERROR some_rule: no such file: é.csv\n"
    assert done.stderr == "ERROR some_rule: no such file: é.csv\n"


def test_refusal_of_several_lines_is_put_on_one(tmp_path) -> None:
    """The hub's own messages span lines, and Snakemake would show them as loose ends."""
    done = run(tmp_path, r"raise UserError('403\n\n  Forbidden:\tno access\n')")
    assert done.stdout == "ERROR some_rule: 403 Forbidden: no access\n"


def test_crash_is_one_line_here_and_a_traceback_in_the_log(tmp_path) -> None:
    done = run(tmp_path, "{}['key']")
    assert done.returncode == 1
    assert done.stdout == "ERROR some_rule: KeyError: 'key' (see the log of this job)\n"
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith(done.stdout)


def test_full_disk_has_a_hint_of_its_own(tmp_path) -> None:
    done = run(tmp_path, "open('/dev/full', 'w', buffering=1).write('x\\n')")
    assert done.returncode == 1
    assert done.stdout == (
        "ERROR some_rule: OSError: [Errno 28] No space left on device "
        "(free some space and run again)\n"
    )


def test_what_libraries_print_goes_to_the_log(tmp_path) -> None:
    done = run(tmp_path, "import os; print('noise'); os.system('echo loud'); say('12 rows')")
    assert done.stdout == "some_rule: 12 rows\n"
    assert "noise" in done.stderr
    assert "loud" in done.stderr


def test_interrupt_is_not_taken_for_a_failure_of_the_script(tmp_path) -> None:
    assert run(tmp_path, "raise SystemExit(75)").returncode == 75


@pytest.mark.parametrize("text", ['{"a": [1, null]}', ' \n{"a": [1, null]}'])
def test_settings_as_text(text) -> None:
    assert cli.read_settings(text) == {"a": [1, None]}


def test_settings_as_a_file(tmp_path) -> None:
    (tmp_path / "s.json").write_text('{"a": 1}')
    assert cli.read_settings(str(tmp_path / "s.json")) == {"a": 1}
