"""Memory that is freed leaves the process, where rows of other lengths would leave gaps."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
FREE = """
import os, sys
sys.path.insert(0, {scripts!r})
from finetune.heap import free_at_once
if {when!r} == "before":
    free_at_once()
bytes(16 * 2**20)  # freed at once: from here on glibc's own threshold is 16 MB
kept = []
large = []
for _ in range(50):
    large.append(bytearray(2 * 2**20))
    kept.append(bytearray(1000))  # holds the heap below it
del large
if {when!r} == "after":
    free_at_once()
pages = int(open("/proc/self/statm").read().split()[1])
print(pages * os.sysconf("SC_PAGE_SIZE") // 2**20, os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])
"""


def left(when, **variables):
    """MB that are resident after 100 MB were freed, and the kernels that oneDNN may keep."""
    code = FREE.format(scripts=str(SCRIPTS), when=when)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, check=True)
    return [int(word) for word in done.stdout.split()]


def test_freed_memory_leaves_the_process_unless_the_user_chose_otherwise(monkeypatch):
    for name in ("MALLOC_MMAP_THRESHOLD_", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)
    kept, _ = left("never", ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024")
    assert kept > 100
    for when in ("before", "after"):
        freed, kernels = left(when)
        assert freed < kept - 90, when
        assert kernels == 256
    chosen, kernels = left(
        "before", MALLOC_MMAP_THRESHOLD_=str(32 * 2**20), ONEDNN_PRIMITIVE_CACHE_CAPACITY="7"
    )
    assert chosen > 100
    assert kernels == 7
