"""JSON output: share of predictions that parse, and that hold what the reference holds."""

from json import JSONDecodeError, loads
from typing import Any

import datasets
import evaluate

FEATURES = datasets.Features(
    {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
)
NOT_JSON = object()


def parse(text: str) -> Any:
    try:
        return loads(text)
    except (JSONDecodeError, RecursionError):
        return NOT_JSON


class Json(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=__doc__, citation="", features=FEATURES)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        guesses = [parse(text) for text in predictions]
        pairs = zip(guesses, references, strict=True)
        equal = sum(guess is not NOT_JSON and guess == parse(text) for guess, text in pairs)
        valid = sum(guess is not NOT_JSON for guess in guesses)
        return {"json_valid": valid / len(guesses), "json_equal": equal / len(guesses)}
