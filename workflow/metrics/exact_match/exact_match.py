"""Exact match: share of predictions that equal their reference, white space at the ends aside."""

import datasets
import evaluate

FEATURES = datasets.Features(
    {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
)


class ExactMatch(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=__doc__, citation="", features=FEATURES)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        equal = sum(a.strip() == b.strip() for a, b in pairs)
        return {"exact_match": equal / len(references)}
