"""Classification: loss (nats per row), accuracy, F1 of each class and their mean, confusion matrix.

Macro F1 is the mean over the classes that occur in the references or the predictions; a class of
which the test rows know nothing has no part in it. A share of nothing (the precision of a class
that is never predicted) counts as 0.
"""

import datasets
import evaluate
import numpy as np

FEATURES = datasets.Features(
    {
        "predictions": datasets.Value("int64"),
        "references": datasets.Value("int64"),
        "nll": datasets.Value("float64"),
    }
)


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


class Classification(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=__doc__, citation="", features=FEATURES)

    def _compute(
        self, predictions: list[int], references: list[int], nll: list[float], labels: list[str]
    ) -> dict:
        """`labels` are the names of the classes, in the order of their numbers."""
        counts = np.zeros((len(labels), len(labels)), dtype=np.int64)
        np.add.at(counts, (np.asarray(references), np.asarray(predictions)), 1)
        right, rows, guesses = counts.diagonal(), counts.sum(1), counts.sum(0)
        f1 = share(2 * right, rows + guesses)
        columns = {"precision": share(right, guesses), "recall": share(right, rows), "f1": f1}
        table = zip(*(values.tolist() for values in (*columns.values(), rows)), strict=True)
        return {
            "loss": float(np.mean(nll)),
            "accuracy": float(right.sum() / counts.sum()),
            "macro_f1": float(f1[rows + guesses > 0].mean()),
            "per_class": {
                label: dict(zip((*columns, "rows"), values, strict=True))
                for label, values in zip(labels, table, strict=True)
            },
            "confusion_matrix": {"labels": labels, "counts": counts.tolist()},
        }
