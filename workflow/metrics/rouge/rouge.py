"""ROUGE-L (Lin 2004): F1 of the longest common subsequence of words, averaged over rows."""

import datasets
import evaluate
from rouge_score.rouge_scorer import RougeScorer

FEATURES = datasets.Features(
    {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
)


class Rouge(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=__doc__, citation="", features=FEATURES)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        scorer = RougeScorer(["rougeL"])
        pairs = zip(references, predictions, strict=True)
        scores = [scorer.score(reference, guess)["rougeL"].fmeasure for reference, guess in pairs]
        return {"rouge_l": float(sum(scores) / len(scores))}
