"""ROUGE-L (Lin 2004): F1 of the longest common subsequence of words, averaged over rows."""

import re

import datasets
import evaluate
from rouge_score.rouge_scorer import RougeScorer

FEATURES = datasets.Features(
    {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
)
WORD = re.compile(r"[^\W_]+")


class Words:
    """Letters and digits of any script, in lower case. rouge_score's own words are a-z and 0-9
    only, so that an answer in Chinese would score 0 against itself."""

    def tokenize(self, text: str) -> list[str]:
        return WORD.findall(text.lower())


class Rouge(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=__doc__, citation="", features=FEATURES)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        scorer = RougeScorer(["rougeL"], tokenizer=Words())
        pairs = zip(references, predictions, strict=True)
        scores = [scorer.score(reference, guess)["rougeL"].fmeasure for reference, guess in pairs]
        return {"rouge_l": float(sum(scores) / len(scores))}
