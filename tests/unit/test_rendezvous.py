"""Several nodes: who may have them, how they are started, and where their agents meet."""

import argparse

import pytest
from torch.distributed import TCPStore

from finetune import nodes, outcome
from finetune.cli import UserError
from finetune.nodes import Nodes, check_nodes, join


@pytest.fixture
def slurm(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(nodes.shutil, "which", lambda program: f"/usr/bin/{program}")


def test_one_node_needs_no_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    check_nodes(3, 1)
    assert Nodes(1, 8).srun() == []
    assert Nodes(1, 8).meeting() == ["--main_process_port", "0"]


@pytest.mark.parametrize("missing", ["job", "srun"])
def test_several_nodes_outside_a_slurm_job_are_refused(slurm, monkeypatch, missing):
    if missing == "job":
        monkeypatch.delenv("SLURM_JOB_ID")
    else:
        monkeypatch.setattr(nodes.shutil, "which", lambda _: None)
    with pytest.raises(UserError) as error:
        check_nodes(4, 2)
    assert str(error.value) == (
        "this run wants 2 nodes, and this is no SLURM job. Run your command again with "
        "`--profile workflow/profiles/slurm`, which submits it. Or set `nodes: 1` "
        "to train on this machine alone."
    )


def test_gpus_are_the_same_on_each_node(slurm):
    check_nodes(4, 2)
    with pytest.raises(UserError, match=r"3 GPUs cannot be spread evenly over 2 nodes. Is there a"):
        check_nodes(3, 2)


def test_srun_starts_one_agent_a_node_with_all_its_cpus():
    command = Nodes(3, 16).srun()
    assert command[:4] == ["env", "-u", "FINETUNE_PARENT", "srun"]
    options = {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=16"}
    assert set(command[4:]) == options | {"--kill-on-bad-exit=1"}


def port_of(options):
    return int(options[options.index("--main_process_port") + 1])


def test_an_agent_finds_the_store_where_slurm_says_the_launcher_is(monkeypatch):
    here = Nodes(2, 1)
    found = argparse.Namespace(main_process_port=port_of(here.meeting()))
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    join(found)
    assert (found.main_process_ip, found.local_addr) == ("127.0.0.1", "127.0.0.1")
    store = TCPStore(found.main_process_ip, found.main_process_port, is_master=False)
    store.set("met", "yes")
    assert here.store.get("met") == b"yes"


def test_the_store_of_an_attempt_knows_nothing_of_the_one_before():
    here = Nodes(2, 1)
    here.meeting()
    here.store.set("torch.rendezvous.none", "closed")
    here.meeting()
    assert not here.store.check(["torch.rendezvous.none"])


def test_the_last_outcome_is_what_the_first_process_told(tmp_path):
    assert outcome.claim(tmp_path, "stopped", step=3)
    assert outcome.last_outcome(tmp_path) == {"kind": "stopped", "step": 3}


def test_an_outcome_that_another_node_told_is_waited_for(tmp_path, monkeypatch):
    """The network file system does not show it yet, but that it is there."""
    outcome.claim(tmp_path, "stopped", step=3)
    seen = iter([{}, {}, {"kind": "stopped"}])
    monkeypatch.setattr(outcome, "read_outcome", lambda _: next(seen))
    monkeypatch.setattr(outcome.time, "sleep", lambda _: None)
    assert outcome.last_outcome(tmp_path) == {"kind": "stopped"}


def test_when_nobody_told_nobody_can_tell_later(tmp_path):
    assert outcome.last_outcome(tmp_path) == {}
    assert not outcome.claim(tmp_path, "stopped", step=3)
