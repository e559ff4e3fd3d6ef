"""Start-up of each Python process: the benchmark of the workflow puts this folder on PYTHONPATH.

A line of JSON per process, in the file $STARTUP_RECORD: the log that its stderr goes to, which is
its job's; its script; seconds until the interpreter was up, and in imports of the main thread.
"""

import atexit
import importlib._bootstrap as bootstrap
import json
import os
import sys
import threading
import time

load, depth, imports = bootstrap._find_and_load, 0, 0.0
with open("/proc/self/stat") as stat:
    ticks = int(stat.read().rpartition(")")[2].split()[19])  # of the clock, when it started
interpreter = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
main, owner = threading.main_thread(), os.getpid()


def timed(*args):
    """What `import` and importlib call, by its name, for a module that is not there yet."""
    global depth, imports
    if threading.current_thread() is not main:
        return load(*args)
    started, depth = time.monotonic(), depth + 1
    try:
        return load(*args)
    finally:
        depth -= 1
        imports += 0 if depth else time.monotonic() - started


def record():
    if os.getpid() != owner:  # a fork of this process has its exit functions too
        return
    line = {"log": os.readlink("/proc/self/fd/2"), "script": os.path.basename(sys.argv[0])}
    line |= {"interpreter": interpreter, "imports": imports}
    with open(os.environ["STARTUP_RECORD"], "a") as file:
        file.write(json.dumps(line) + "\n")


bootstrap._find_and_load = timed
atexit.register(record)
