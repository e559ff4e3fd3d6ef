"""imports: libraries are loaded once, quickly, and left as they are."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.imports import collect_rarely, compile_later

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
IN_RANK = """
import gc, sys
from finetune.imports import collect_rarely, in_rank
import torch
compiler, usual = torch.compile, gc.get_threshold()
collect_rarely()
with in_rank():
    from finetune.training import train
assert "bitsandbytes.backends.default.ops" in sys.modules
assert "torch._inductor.compile_fx" not in sys.modules
assert torch.compile is compiler
assert gc.isenabled() and gc.get_threshold() == usual and gc.get_freeze_count() > 100_000
"""


def test_a_rank_loads_no_compiler_and_collects_as_python_does():
    subprocess.run([sys.executable, "-c", IN_RANK], cwd=SCRIPTS, check=True)


@pytest.fixture
def threshold():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_garbage_is_collected_rarely_and_not_never(threshold):
    collect_rarely()
    assert gc.get_threshold()[0] == 50_000
    assert gc.isenabled()


def test_compiled_at_the_first_call_and_once():
    calls = []

    def compiler(function, **options):
        calls.append(options)
        return lambda number: function(number) * 10

    @compile_later(compiler, dynamic=False)
    def decorated(number):
        """Adds one."""
        return number + 1

    assert calls == []
    assert [decorated(1), decorated(2)] == [20, 30]
    assert calls == [{"dynamic": False}]
    assert compile_later(compiler, lambda number: number)(4) == 40
    assert decorated.__doc__ == "Adds one."
