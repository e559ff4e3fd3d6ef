"""What is counted while data is prepared, and when the counts stop a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from finetune.cli import UserError
from finetune.records import Reject
from finetune.sources import file_kind
from finetune.splits import SPLITS


class Tally:
    """Counts of rows, by split and by source."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        self.sources: dict[str, Counter[str]] = defaultdict(Counter)
        """By source: rows that can be used, duplicates among them, rows left out by their
        source's weight, and rejects."""
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.prompts: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}

    def reject(self, source: str, reject: Reject) -> None:
        self.sources[source]["rejected"] += 1
        self.reasons[reject.reason] += 1
        self.examples.setdefault(reject.reason, f"{reject.source}:{reject.line}")

    def write(self, split: str, prompts: list[int]) -> None:
        """Count rows that are written, by the digests of their prompts."""
        self.rows[split] += len(prompts)
        self.prompts[split].append(np.array(prompts, dtype=np.int64))

    def overlap(self) -> int:
        """Test rows whose prompt is trained on too."""
        none = np.array([], dtype=np.int64)
        train, test = (np.concatenate([none, *self.prompts[s]]) for s in ("train", "test"))
        return int(np.isin(test, train).sum())

    def total(self, what: str) -> int:
        return sum(counts[what] for counts in self.sources.values())

    def stats(self) -> dict:
        kinds = ("rows", "duplicates", "weighed_out", "rejected")
        return {
            "rows": {split: self.rows[split] for split in SPLITS},
            "duplicates": self.total("duplicates"),
            "overlap": self.overlap(),
            "rejected": dict(self.reasons.most_common()),
            "by_source": {s: {k: c[k] for k in kinds} for s, c in self.sources.items()},
        }

    def check_rejects(self, limit: float) -> None:
        """Stop when more rows are unreadable than the user allows."""
        bad, good = self.reasons.total(), self.total("rows")
        if bad == 0 or bad <= limit * (good + bad):
            return
        common = "; ".join(
            f"{n} x {r} (e.g. {self.examples[r]})" for r, n in self.reasons.most_common(3)
        )
        raise UserError(
            f"{bad} of {good + bad} rows cannot be used, more than max_rejects {limit:.2%} allows: "
            f"{common}. Mend them, or raise max_rejects under the dataset to leave them out."
        )

    def check_splits(self, split: dict) -> None:
        """An empty split where rows are needed is found now, not after training. Every model is
        evaluated, so a share of 0 for the test split is fine only where a source brings one."""
        for name in SPLITS:
            needed = name != "validation" or split["validation"] > 0
            if self.rows[name] == 0 and needed:
                none = " (validation: 0 if you want none)" if name == "validation" else ""
                cure = f"or a larger share{none}"
                cure = cure if name in split else "or smaller shares to the others"
                texts = any(file_kind(Path(source)) == "txt" for source in self.sources)
                hint = " A .txt file is one row unless sample_by says otherwise." if texts else ""
                raise UserError(
                    f"the {name} split is empty ({self.rows.total()} rows in all). Give more rows, "
                    f"another split.seed, {cure}.{hint}"
                )
