"""Start the ranks, wait for them, and start them again where that helps.

An attempt ends finished, stopped (it can go on), out of memory (it goes on with a smaller
micro-batch), or failed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from finetune import checkpoints, cli, peaks
from finetune.advice import last_remedies
from finetune.backoff import smaller_micro
from finetune.batch import split_batch
from finetune.cli import complain, say
from finetune.facts import FACTS, check_fits
from finetune.files import read_json, write_json
from finetune.history import BEGINS, note_kill, record
from finetune.metric_lines import LINES, cut_back, read_lines
from finetune.outcome import OUTCOME, STATE, STOP, last_outcome
from finetune.processes import PARENT, STOPS

STOPPED = 75
"""EX_TEMPFAIL: not finished, and the same command goes on."""
FAILED = 1
SECONDS_BETWEEN_LOOKS = 0.2


class Attempts:
    """The attempts of one launch. `command` makes the agent's from a micro-batch and, to go on
    from, a checkpoint."""

    def __init__(
        self,
        state: Path,
        plan: dict,
        facts: dict,
        micro: int,
        command: Callable[[int, Path | None], list[str]],
        env: dict[str, str],
    ) -> None:
        self.state, self.plan, self.facts, self.micro = state, plan, facts, micro
        self.command = command
        self.env = env | {PARENT: str(os.getpid()), STATE: str(state)}
        self.stopping = self.killed = False
        self.seconds = 0.0  # that the last attempt took
        note_kill(state, self.last_step(), peaks.left_behind(state))

    def run(self) -> int:
        """The exit code of the job."""
        code = None
        while code is None:
            checkpoint = self.prepare()
            started = time.monotonic()
            returned = self.attempt(self.command(self.micro, checkpoint))
            self.seconds = time.monotonic() - started
            code = self.conclude(returned)
        if code == 0:
            shutil.rmtree(self.state)
        return code

    def prepare(self) -> Path | None:
        """Choose the checkpoint to go on from, and take the run back to its step."""
        checkpoint, skipped = checkpoints.newest(self.state)
        for line in skipped:
            say(line)
        checkpoints.rotate(self.state)
        self.facts["micro_batch"] = self.micro
        if checkpoint:
            made_with = read_json(checkpoint / checkpoints.MANIFEST)["facts"]
            check_fits(checkpoint, made_with, self.facts, self.plan["settings"]["launch"] != "ddp")
        step = checkpoints.step_of(checkpoint) if checkpoint else 0
        write_json(self.state / FACTS, self.facts)
        cut_back(self.state / LINES, step)
        for name in (OUTCOME, STOP):
            (self.state / name).unlink(missing_ok=True)
        peaks.forget(self.state)
        self.note("resumed" if checkpoint else "started", step)
        return checkpoint

    def attempt(self, command: list[str]) -> int:
        """Run the agent to its end. It and the ranks inherit that stop signals are blocked."""
        agent = subprocess.Popen(command, env=self.env, stdout=cli.terminal)
        while agent.poll() is None:
            if sent := signal.sigtimedwait(STOPS, SECONDS_BETWEEN_LOOKS):
                self.stop(sent.si_signo, agent)
        return agent.returncode

    def stop(self, number: int, agent: subprocess.Popen) -> None:
        """Ask the ranks to save and leave. A second Ctrl-C waits for nothing; a second SIGTERM may
        just be the next in SLURM's sequence."""
        if not self.stopping:
            self.stopping = True
            (self.state / STOP).touch()
            name = signal.Signals(number).name
            say(f"{name}: finishing this step and saving; Ctrl-C from now on does not wait")
        elif number == signal.SIGINT:
            self.killed = True
            agent.kill()  # the ranks die with it

    def conclude(self, returned: int) -> int | None:
        """The exit code of the job, or None to start again."""
        outcome = last_outcome(self.state)
        if returned == 0 and not outcome:
            return 0
        if self.killed:
            return self.on_killed()
        if not outcome:
            return self.on_lost()
        endings = {
            "stopped": self.on_stopped,
            "oom": self.on_oom,
            "error": self.on_error,
            "hang": self.on_hang,
            "died": self.on_died,
        }
        return endings[outcome["kind"]](outcome)

    def on_stopped(self, outcome: dict) -> int:
        step, late = outcome["step"], outcome["late"]
        self.note("stopped", step, late=late)
        why = "the job's time is nearly over: " if late else ""
        say(f"{why}stopped after step {step}; the same command goes on from there")
        return STOPPED

    def on_killed(self) -> int:
        self.note("killed", self.last_step())
        say(f"killed; {self.resumes()}")
        return STOPPED

    def on_oom(self, outcome: dict) -> int | None:
        rank, step, size = outcome["rank"], outcome["step"] + 1, self.plan["global_batch"]
        micro = smaller_micro(size, self.facts["world_size"], self.micro)
        where = f"rank {rank} ran out of memory at step {step} with micro-batch {self.micro}"
        if micro is None:
            self.note("failed", outcome["step"], text=outcome["text"])
            advice = last_remedies(self.plan)
            complain(f"{where}, one row at a time. {advice} {self.resumes()}")
            return FAILED
        self.note("out of memory", outcome["step"], rank=rank, next_micro_batch=micro)
        self.micro = micro
        steps = split_batch(size, micro, self.facts["world_size"])
        say(f"{where}; now {micro} x {steps} accumulated, the same batch of {size} rows")
        return STOPPED if self.stopping else None

    def on_error(self, outcome: dict) -> int:
        self.note("failed", outcome["step"], text=outcome["text"])
        return FAILED  # the rank has said its line

    def on_hang(self, outcome: dict) -> int:
        minutes = self.plan["settings"]["timeout_minutes"]
        text = (
            f"nothing moved for {minutes:g} minutes after step {outcome['step']}. The log shows "
            "where each rank stood. If that was slow and not hung, raise timeout_minutes."
        )
        return self.fail(text, outcome["step"])

    def on_died(self, outcome: dict) -> int:
        number = -outcome["exit_code"]
        how = f"was killed by {signal.Signals(number).name}" if number > 0 else "ended"
        cause = (
            "Host memory ran out, mostly: ask for more mem_mb, or use fewer gpus."
            if number == signal.SIGKILL
            else f"Exit code {outcome['exit_code']}; see the log of this job."
        )
        return self.fail(f"rank {outcome['rank']} {how}. {cause}", self.last_step())

    def on_lost(self) -> int:
        text = "torchrun itself ended or was killed, and the ranks with it; see the log."
        return self.fail(text, self.last_step())

    def fail(self, text: str, step: int) -> int:
        self.note("failed", step, text=text)
        complain(f"{text} {self.resumes()}")
        return FAILED

    def note(self, event: str, step: int, **facts: object) -> None:
        if event not in BEGINS:
            facts["seconds"] = round(self.seconds, 1)
            facts["peak_memory"] = peaks.left_behind(self.state)
        record(self.state, event, step, micro_batch=self.micro, **facts)

    def last_step(self) -> int:
        """The last one that is known of: it was logged."""
        return max((line["step"] for line in read_lines(self.state / LINES)), default=0)

    def resumes(self) -> str:
        checkpoint, _ = checkpoints.newest(self.state)
        step = f"after step {checkpoints.step_of(checkpoint)}" if checkpoint else "at its beginning"
        return f"The same command goes on {step}."
