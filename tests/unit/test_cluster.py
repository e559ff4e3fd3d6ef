"""What is asked of SLURM before the first job; the answers are those of real commands."""

from math import inf

import pytest
from snakemake.common.tbdstring import TBDString

from finetune import cluster
from finetune.cli import UserError

PARTITIONS = """\
PartitionName=cpu AllowGroups=ALL MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 GraceTime=0 \
PreemptMode=OFF State=UP
PartitionName=long AllowGroups=ALL MaxTime=UNLIMITED GraceTime=0 PreemptMode=CANCEL State=UP
"""
CONFIG = """\
AccountingStorageType   = {storage}
MinJobAge               = {age} sec
"""


@pytest.fixture
def answers(monkeypatch):
    """answers(command name -> text)"""

    def set_to(**texts):
        monkeypatch.setattr(cluster, "ask", lambda *command: texts[command[0]])

    return set_to


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("1-00:00:00", 1440), ("02:30:00", 150), ("7-12:00:59", 10800), ("UNLIMITED", inf)],
)
def test_time_limits(text, minutes):
    assert cluster.minutes_of(text) == minutes


@pytest.mark.parametrize("minutes", [60, 1440, None, TBDString()])
@pytest.mark.parametrize("name", ["cpu", None])
def test_what_a_partition_allows_is_let_through(answers, minutes, name, capsys):
    """A runtime that a plan will tell is not known yet; without a partition SLURM has its own."""
    answers(scontrol=PARTITIONS)
    cluster.check_partitions({("merge", name, minutes)})
    assert capsys.readouterr().err == ""


def test_of_several_partitions_the_longest_limit_counts(answers):
    answers(scontrol=PARTITIONS + PARTITIONS.splitlines()[0].replace("cpu", "short"))
    cluster.check_partitions({("train", "cpu,long", 99999), ("merge", "cpu,short", 1440)})
    with pytest.raises(UserError, match="the partition cpu,short allows 1440"):
        cluster.check_partitions({("merge", "cpu,short", 1441)})
    with pytest.raises(UserError, match="asks for the partition 'gpu'"):
        cluster.check_partitions({("merge", "cpu,gpu", 60)})


def test_a_partition_that_cancels_without_grace_is_told_once(answers, capsys):
    answers(scontrol=PARTITIONS)
    cluster.check_partitions({("train", "long", 99999), ("evaluate_run", "long", 60)})
    assert capsys.readouterr().err.count("the partition long cancels jobs") == 1


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (("train", "gpu", 60), "asks for the partition 'gpu', and this cluster has cpu, long"),
        (("train", "cpu", 1441), "1441 minutes, and the partition cpu allows 1440"),
    ],
)
def test_what_would_pend_for_ever_is_refused(answers, asked, text):
    answers(scontrol=PARTITIONS)
    with pytest.raises(UserError, match=text):
        cluster.check_partitions({asked})


@pytest.mark.parametrize(
    ("storage", "command", "age", "poll"),
    [
        ("accounting_storage/slurmdbd", "sacct", 10, 20),
        ("accounting_storage/none", "squeue", 300, 20),
        ("(null)", "squeue", 300, 100),
    ],
)
def test_a_status_command_that_works(answers, storage, command, age, poll, capsys):
    answers(scontrol=CONFIG.format(storage=storage, age=age))
    cluster.check_accounting(command, poll)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("storage", "command", "age", "text"),
    [
        ("accounting_storage/none", "sacct", 300, "In the profile: `slurm-status-command: squeue`"),
        ("(null)", "sacct", 300, "keeps no accounts"),
        ("(null)", "squeue", 59, "slurm-init-seconds-before-status-checks: 19`"),
    ],
)
def test_a_status_command_that_would_hang_is_refused(answers, storage, command, age, text):
    answers(scontrol=CONFIG.format(storage=storage, age=age))
    with pytest.raises(UserError) as error:
        cluster.check_accounting(command, 20)
    assert text in str(error.value)


def test_a_short_memory_is_told(answers, capsys):
    answers(scontrol=CONFIG.format(storage="(null)", age=180))
    cluster.check_accounting("squeue", 20)
    assert "Ask for MinJobAge=300" in capsys.readouterr().err


def test_only_jobs_of_this_folder_that_snakemake_submitted_count(answers):
    theirs = "1|RUNNING|rule_train|/elsewhere\n2|RUNNING|(null)|/here\n"
    answers(squeue=theirs)
    cluster.check_earlier_jobs("/here")
    answers(squeue=theirs + "3|PENDING|rule_merge_wildcards_a|/here\n")
    with pytest.raises(UserError, match=r"ended: 3 \(rule_merge_wildcards_a, PENDING\)\. Wait"):
        cluster.check_earlier_jobs("/here")


def test_a_host_without_slurm_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no squeue here"):
        cluster.ask("squeue")
